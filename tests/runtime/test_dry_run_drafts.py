"""A dry run that speculates says what it says without drafts."""

import itertools
import random
from collections.abc import Sequence

import pytest

from mini_infer.core.request import Request
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.core.structured_outputs import StructuredOutputsParams
from mini_infer.runtime.byte_tokenizer import ByteTokenizer
from mini_infer.runtime.dry_run import DryRunExecutor
from mini_infer.runtime.engine import LLMEngine
from mini_infer.runtime.speculation.host_drafts import HostDrafts
from tests.runtime.engine_tools import run
from tests.runtime.test_dry_run import PROMPT, make_config

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40),
    SamplingParams(seed=3, max_tokens=30, logprobs=2),
    SamplingParams(seed=4, max_tokens=25, min_tokens=20, bad_words=["a", "th"]),
    SamplingParams(
        seed=5, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[a-c]{4,9}")
    ),
]
texts: dict[str, list[int]] = {}


class PartlyRight:
    def __init__(self, config: SpeculativeConfig) -> None:
        pass

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        return [self._drafts(request, num_drafts) for request in requests]

    def _drafts(self, request: Request, num_drafts: int) -> list[int]:
        start = request.num_output_tokens
        num_right = random.Random(start).randrange(num_drafts + 1)
        right = texts[request.request_id][start : start + num_right]
        return right + [33] * (num_drafts - len(right))


def answers(**options: object) -> dict[str, tuple[list[int], object]]:
    config = make_config(**options)
    engine = LLMEngine(config, DryRunExecutor(config), ByteTokenizer())
    for index, params in enumerate(PARAMS):
        engine.add_request(str(index), [*PROMPT, 65 + index], params)
    outputs = {name: output.outputs[0] for name, output in run(engine).items()}
    return {name: (choice.token_ids, choice.logprobs) for name, choice in outputs.items()}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_that_come_and_go_change_nothing(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answers()
    texts.update({name: token_ids for name, (token_ids, _) in plain.items()})
    on = itertools.cycle([True, True, False, True, False, False, True])
    monkeypatch.setattr(HostDrafts, "drafting", lambda self, num_rows: num_rows > 0 and next(on))
    speculation = SpeculativeConfig(method=f"{__name__}:PartlyRight", num_speculative_tokens=4)
    assert answers(depth=depth, speculative_config=speculation) == plain
