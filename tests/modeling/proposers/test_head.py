"""A draft head drafts what it was trained to: paged inference and training compute the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mini_infer.core.batch import Admission, Chunk, ScheduledBatch
from mini_infer.core.errors import (
    InvalidConfigError,
    MiniInferError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsError,
)
from mini_infer.core.model_config import ModelConfig
from mini_infer.core.sampling_params import SamplingParams
from mini_infer.core.speculative_config import SpeculativeConfig
from mini_infer.kernels.metadata import AttentionMetadata
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.proposers.head_files import load_draft_head, save_draft_head
from mini_infer.modeling.proposers.head_proposer import HeadProposer
from mini_infer.modeling.proposers.proposer import DraftRows
from mini_infer.modeling.training.head_start import new_head
from mini_infer.modeling.training.target_pass import TargetPass, TargetTexts
from mini_infer.modeling.training.unrolled import head_logits, unroll
from mini_infer.modeling.weights import build_model, empty_model, load_weights
from tests.modeling.fakes import MemorySource, random_tensors, tiny_config
from tests.runtime.fake_executor import make_config

CPU = torch.device("cpu")
TARGETS = {
    "llama": tiny_config(),
    "llama-biases": tiny_config(attention_bias=True, mlp_bias=True),
    "mistral-window": tiny_config("MistralForCausalLM", sliding_window=5),
    "qwen2": tiny_config("Qwen2ForCausalLM", tie_word_embeddings=True),
    "qwen3": tiny_config("Qwen3ForCausalLM", head_dim=12),
}
DRAFTED = torch.arange(3, 60)
LENGTH, BLOCK_SIZE, DRAFTS = 23, 4, 3
CASES = [
    *((case, 1, False) for case in TARGETS),
    ("mistral-window", 2, False),
    ("qwen3", 2, False),
    ("llama", 1, True),
    ("mistral-window", 2, True),
    ("qwen3", 2, True),
]
"""Targets, layers of their heads, and whether these draft all at once."""


def target(config: ModelConfig, *, plain: bool, seed: int = 0) -> CausalLM:
    """A random float32 model: as a checkpoint has it, or packed for inference."""
    source = MemorySource(random_tensors(config, seed))
    if not plain:
        return build_model(config, source, torch.float32)
    model = empty_model(config, torch.float32)
    assert list(load_weights(model, source))
    return model


def random_head(model: CausalLM, num_layers: int = 1, *, parallel: bool = False) -> DraftHead:
    """One in which every parameter matters."""
    head = new_head(model, DRAFTED, num_layers, parallel=parallel)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        parameter.data.normal_(float("norm" in name), 0.2, generator=generator)
    return head


def two_texts(model: CausalLM, num_layers: int = 1) -> TargetTexts:
    run = TargetPass(model, num_layers, "torch")
    token_ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    return run(token_ids, torch.ones_like(token_ids, dtype=torch.bool))


def saved(
    folder: Path, config: ModelConfig = TARGETS["llama"], *, parallel: bool = False
) -> CausalLM:
    """The target for which a random head is saved in ``folder``."""
    model = target(config, plain=True)
    save_draft_head(folder, random_head(model, parallel=parallel), model, torch.float32)
    return model


def propose(
    folder: Path,
    model: CausalLM,
    texts: TargetTexts,
    starts: tuple[int, ...],
    params: SamplingParams,
) -> Tensor:
    """Drafts behind the token at ``starts[i]`` of text i, from a paged cache of its predecessors'
    keys whose other places are poisoned."""
    config = make_config(
        model_config=model.config,
        max_model_len=LENGTH,
        block_size=BLOCK_SIZE,
        speculative_config=SpeculativeConfig(method="head", model=str(folder), on_device=True),
    )
    state = DeviceState(config, CPU)
    layout = model.kv_layout
    shape = 32, BLOCK_SIZE, layout.num_kv_heads, layout.head_dim
    caches = [(torch.full(shape, 1e4), torch.full(shape, 1e4)) for _ in texts.keys]
    admissions, chunks = [], []
    for row, start in enumerate(starts):
        tokens = tuple(texts.token_ids[row, :start].tolist())
        blocks = tuple(range(7 * row + 3, 7 * row + 3 - (-(start + DRAFTS) // BLOCK_SIZE)))
        admissions.append(
            Admission(str(row), 2 - row, tokens, start, params, params.seed or 0, block_ids=blocks)
        )
        chunks.append(Chunk(str(row), 2 - row, 0, start))
        for place in range(start):
            block, offset = blocks[place // BLOCK_SIZE], place % BLOCK_SIZE
            for cache, planes in zip(
                caches, zip(texts.keys, texts.values, strict=True), strict=True
            ):
                for plane, kept in zip(cache, planes, strict=True):
                    plane[block, offset] = kept[row, place]
    batch = ScheduledBatch(0, tuple(chunks), tuple(admissions))
    state.take_in(batch)
    state.sampling.admit(batch.admissions)
    rows = torch.arange(len(starts))
    positions = torch.tensor(starts)
    head = load_draft_head(folder, model, torch.float32)
    proposer = HeadProposer(head, model, caches, state)
    return proposer.propose(
        DraftRows(
            slots=2 - rows,
            positions=positions,
            token_ids=texts.token_ids[rows, positions],
            hidden=texts.hidden[rows, positions - 1],
        ),
        DRAFTS,
    )


@pytest.mark.parametrize("starts", [(1, 2), (7, 19), (16, 12)])
@pytest.mark.parametrize(("case", "num_layers", "parallel"), CASES)
def test_drafts_are_what_training_computes(
    case: str, num_layers: int, parallel: bool, starts: tuple[int, int], tmp_path: Path
) -> None:
    plain = target(TARGETS[case], plain=True)
    head = random_head(plain, num_layers, parallel=parallel)
    save_draft_head(tmp_path, head, plain, torch.float32)
    texts = two_texts(plain, num_layers)
    model = target(TARGETS[case], plain=False)
    drafts = propose(tmp_path, model, texts, starts, SamplingParams(temperature=0.0))
    # Training feeds true tokens: put the drafts there, which are then both.
    for row, start in enumerate(starts):
        texts.token_ids[row, start + 1 : start + 1 + DRAFTS] = drafts[row]
    states = unroll(plain, head, texts, DRAFTS)
    for row, start in enumerate(starts):
        for ahead in range(DRAFTS):
            logits = head_logits(head, states[ahead][row, start - 1])
            assert drafts[row, ahead] == DRAFTED[logits.argmax()]


@pytest.mark.parametrize(("case", "num_layers", "parallel"), CASES)
def test_paged_states_are_those_of_training(
    case: str, num_layers: int, parallel: bool, tmp_path: Path
) -> None:
    plain = target(TARGETS[case], plain=True)
    head = random_head(plain, num_layers, parallel=parallel)
    save_draft_head(tmp_path, head, plain, torch.float32)
    model = target(TARGETS[case], plain=False)
    loaded = load_draft_head(tmp_path, model, torch.float32)
    texts = two_texts(plain, num_layers)
    states = unroll(plain, head, texts, DRAFTS)
    start, blocks = 11, torch.tensor([[2, 0, 4, 6], [1, 5, 3, 7]], dtype=torch.int32)
    slots = blocks.repeat_interleave(BLOCK_SIZE, 1).long() * BLOCK_SIZE
    slots += torch.arange(slots.shape[1]) % BLOCK_SIZE  # [2, places]

    def cached(plane: Tensor) -> Tensor:
        cache = torch.full((8, BLOCK_SIZE, *plane.shape[2:]), 1e4)
        cache.view(-1, *plane.shape[2:])[slots[:, :start]] = plane[:, :start]
        return cache

    caches = [
        (cached(keys), cached(values))
        for keys, values in zip(texts.keys, texts.values, strict=True)
    ]

    def drafted(x: Tensor, position: int, count: int) -> Tensor:
        """What the head leaves at so many places of both texts."""
        end = position + count
        meta = AttentionMetadata(
            cu_seqlens_q=torch.arange(3) * count,
            seqlens_k=torch.tensor([end] * 2),
            block_table=blocks,
            slot_mapping=slots[:, position:end].flatten(),
            max_query_len=count,
            max_seqlen_k=end,
            query_lens=(count, count),
            context_lens=(end, end),
        )
        embedded = model.embed_tokens(texts.token_ids[:, position])
        rope = model.rotary(torch.arange(position, end).repeat(2))
        return loaded(x, embedded, rope, caches, meta, count)

    x = texts.hidden[:, start - 1]
    at_once = drafted(x, start, DRAFTS).unflatten(0, (2, DRAFTS)) if parallel else None
    for ahead, state in enumerate(states):
        x = drafted(x, start + ahead, 1) if at_once is None else at_once[:, ahead].contiguous()
        if ahead and loaded.later is not None:
            x = loaded.later(x, texts.token_ids[:, start + ahead] - int(DRAFTED[0]))
        torch.testing.assert_close(x, state[:, start - 1], atol=1e-4, rtol=1e-4)
        logits = head_logits(head, state[:, start - 1])
        torch.testing.assert_close(loaded.compute_logits(x), logits, atol=1e-4, rtol=1e-4)


def test_sampled_drafts_follow_the_request(tmp_path: Path) -> None:
    """The same seed draws the same, another one does not; a greedy request is not random."""
    model = saved(tmp_path)
    texts = two_texts(model)

    def drafts(temperature: float, seed: int) -> list[list[int]]:
        params = SamplingParams(temperature=temperature, seed=seed)
        return propose(tmp_path, model, texts, (9, 14), params).tolist()

    assert drafts(1.5, 1) == drafts(1.5, 1)
    assert drafts(0.0, 1) == drafts(0.0, 2)
    assert len({json.dumps(drafts(1.5, seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("parallel", [False, True])
def test_drafts_beyond_the_longest_request(parallel: bool, tmp_path: Path) -> None:
    """A request may be at its end while the step's others go on."""
    model = saved(tmp_path, parallel=parallel)
    drafts = propose(
        tmp_path, model, two_texts(model), (LENGTH - 1, 5), SamplingParams(temperature=0.0)
    )
    assert set(drafts.flatten().tolist()) <= set(DRAFTED.tolist())


def test_a_head_survives_its_folder(tmp_path: Path) -> None:
    model = target(TARGETS["qwen3"], plain=True)
    head = random_head(model, 2, parallel=True)
    save_draft_head(tmp_path / "new" / "folder", head, model, torch.bfloat16)
    assert (tmp_path / "new" / "folder" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    loaded = load_draft_head(tmp_path / "new" / "folder", model, torch.bfloat16)
    for name, value in head.state_dict().items():
        rounded = value.bfloat16() if value.is_floating_point() else value
        assert torch.equal(loaded.state_dict()[name].to(rounded.dtype), rounded)


def test_a_head_of_before_there_were_parallel_ones_drafts_one_after_another(tmp_path: Path) -> None:
    model = saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("parallel_drafting") is False
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_draft_head(tmp_path, model, torch.float32).later is None


def _no_folder(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _whole_model(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))


def _change(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def _not_a_number(folder: Path) -> None:
    """As training that diverges leaves it: its keys would stay in the target's cache."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def _no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (_no_folder, ModelNotFoundError, "train-draft"),
        (_no_json, UnsupportedModelError, "not valid JSON"),
        (_whole_model, InvalidConfigError, "draft_model"),
        (_change(target={}), InvalidConfigError, "architecture None"),
        (_change(target=[1]), InvalidConfigError, "architecture None"),
        (_change(num_draft_tokens=True), WeightsError, "num_draft_tokens"),
        (_change(num_hidden_layers=3), WeightsError, "num_hidden_layers"),
        (_change(num_hidden_layers=2), WeightsError, "layers.1"),
        (_change(num_draft_tokens=65), WeightsError, "num_draft_tokens"),
        (_change(parallel_drafting=1), WeightsError, "parallel_drafting"),
        (_change(parallel_drafting=True), WeightsError, "later"),
        (_change(num_draft_tokens=9), WeightsError, "lm_head.weight, token_ids"),
        (_truncated, WeightsError, "truncated"),
        (_not_a_number, WeightsError, "model.norm.weight has values that are no finite"),
    ],
)
def test_a_damaged_folder_says_what_to_do(
    damage: Callable[[Path], None], error: type[MiniInferError], says: str, tmp_path: Path
) -> None:
    model = saved(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=says):
        load_draft_head(tmp_path, model, torch.float32)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (target(tiny_config(intermediate_size=52), plain=True), "intermediate_size 48"),
        (target(tiny_config("Qwen2ForCausalLM"), plain=True), "architecture LlamaForCausalLM"),
        (target(tiny_config(), plain=True, seed=1), "embeddings differ"),
    ],
)
def test_another_target_is_refused(other: CausalLM, says: str, tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(InvalidConfigError, match=says):
        load_draft_head(tmp_path, other, torch.float32)


def test_the_same_target_is_known_in_any_dtype(tmp_path: Path) -> None:
    saved(tmp_path)
    config = TARGETS["llama"]
    for dtype in (torch.float16, torch.bfloat16):
        model = build_model(config, MemorySource(random_tensors(config)), dtype)
        assert load_draft_head(tmp_path, model, dtype)


def test_a_head_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target(TARGETS["llama"], plain=True)
    save_draft_head(tmp_path, random_head(model, 1), model, torch.float32)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(self: Path, *_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_draft_head(tmp_path, random_head(model, 2), model, torch.float32)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_what_a_killed_training_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".new-killed").mkdir()
    (tmp_path / ".new-killed" / "model.safetensors").write_bytes(b"half")
    saved(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_full_disk_is_the_systems_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("mini_infer.modeling.proposers.head_files.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path)
    assert not list(tmp_path.iterdir())
