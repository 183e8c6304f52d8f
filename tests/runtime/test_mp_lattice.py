"""Ranks that are processes say what one process says, with drafts and without, at many points of
the lattice: engines come and go, the processes stay."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer.core.batch import ScheduledBatch
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.step_costs import StepCosts
from mini_infer.modeling.model_files import ModelFiles
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.executor import StepHandle
from mini_infer.runtime.mp_executor import MultiProcessExecutor
from mini_infer.runtime.rank_processes import RankProcesses
from tests.runtime.engine_tools import run
from tests.runtime.fake_executor import TINY_MODEL, make_config
from tests.runtime.test_tensor_parallel import LLAMA, PARAMS, PROMPTS, alone, assert_same

pytestmark = pytest.mark.processes

NUM_BLOCKS = 256
DRAFT_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": TINY_MODEL.vocab_size,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


class Lasting:
    """Ranks that outlive an engine, which takes as many of their blocks as it likes."""

    def __init__(self, ranks: MultiProcessExecutor, num_blocks: int) -> None:
        self._ranks, self._num_blocks = ranks, num_blocks

    def start(self) -> int:
        return self._num_blocks

    def step_costs(self) -> StepCosts | None:
        return self._ranks.step_costs()

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        return self._ranks.submit(batch)

    def shutdown(self) -> None:
        pass


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MultiProcessExecutor]:
    """Two, with a draft model."""
    folder = tmp_path_factory.mktemp("draft")
    (folder / "config.json").write_text(json.dumps(DRAFT_CONFIG))
    config = make_config(
        model_config=LLAMA,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        num_kv_blocks=NUM_BLOCKS,
        max_num_batched_tokens=256,
        depth=2,
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(folder),
            model_config=replace(TINY_MODEL, num_layers=1),
            num_speculative_tokens=3,
            adaptive=False,
            on_device=True,
        ),
    )
    ranks = MultiProcessExecutor(config, ModelFiles(Path("unused"), Path("unused")))
    assert ranks.start() == NUM_BLOCKS
    yield ranks
    ranks.shutdown()
    assert not ranks.ranks.folder.exists()


def test_ctrl_c_between_two_ranks(
    ranks: MultiProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are told of every step, some twice; so whoever asks next is served."""
    config = replace(ranks._config, speculative_config=None)
    push, places = RankProcesses._push, random.Random(0)
    num_interrupted = 0

    def interrupted(processes: RankProcesses, *message: Any) -> None:
        place = places.random()
        if place < 0.1:
            raise KeyboardInterrupt
        push(processes, *message)
        if place > 0.9:
            raise KeyboardInterrupt

    for _ in range(2):
        engine = LLMEngine(config, Lasting(ranks, NUM_BLOCKS), ByteTokenizer())
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(str(index), prompt, params)
        with monkeypatch.context() as patch:
            patch.setattr(RankProcesses, "_push", interrupted)
            for _ in range(10):
                try:
                    engine.step()
                except KeyboardInterrupt:
                    num_interrupted += 1
    assert num_interrupted > 5
    engine = LLMEngine(config, Lasting(ranks, NUM_BLOCKS), ByteTokenizer())
    for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(index), prompt, params)
    for index, output in run(engine).items():
        assert_same(output, alone("llama")[int(index)])


@settings(max_examples=8, deadline=None)
@given(
    method=st.sampled_from([None, "ngram", "draft_model"]),
    chunk=st.sampled_from([5, 16, 256]),
    caching=st.booleans(),
    forced_preemption=st.booleans(),
    depth=st.sampled_from([1, 2]),
    order=st.permutations(range(len(PROMPTS))),
)
def test_outputs_are_identical_at_every_point(
    ranks: MultiProcessExecutor,
    method: str | None,
    chunk: int,
    caching: bool,
    forced_preemption: bool,
    depth: int,
    order: list[int],
) -> None:
    speculation = ranks._config.speculative_config
    if method is None:
        speculation = None
    elif method == "ngram":
        speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)
    num_blocks = 17 if forced_preemption else NUM_BLOCKS
    config = replace(
        ranks._config,
        speculative_config=speculation,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(8, chunk),
        enable_prefix_caching=caching,
        num_kv_blocks=num_blocks,
        depth=depth,
    )
    engine = LLMEngine(config, Lasting(ranks, num_blocks), ByteTokenizer())
    for index in order:
        engine.add_request(str(index), PROMPTS[index], PARAMS[index])
    outputs = run(engine)
    for index in order:
        assert_same(outputs[str(index)], alone("llama")[index])
