"""Training a draft head: what it starts from, what its loss is, and that it learns."""

import random

import pytest
import torch

from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.training import draft_distillation, head_trainer
from mini_infer.modeling.training.draft_distillation import (
    DEPTH_DECAY,
    Distillation,
    accepted_lengths,
)
from mini_infer.modeling.training.draft_vocabulary import DraftVocabulary
from mini_infer.modeling.training.head_start import LeastSquares, new_head
from mini_infer.modeling.training.head_trainer import (
    HeadTrainer,
    HeadTraining,
    learning_rate_share,
    trained_parameters,
)
from mini_infer.modeling.training.target_pass import TargetPass, TargetTexts, pad
from mini_infer.modeling.training.texts import Text, in_batches
from mini_infer.modeling.training.unrolled import head_logits, unroll
from mini_infer.modeling.weights import empty_model, load_weights
from tests.modeling.driver import PagedDriver
from tests.modeling.fakes import MemorySource, random_tensors, tiny_config
from tests.runtime.fake_executor import make_config

CONFIG = tiny_config()
VOCAB = CONFIG.vocab_size


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return plain_model(CONFIG)


def plain_model(config: ModelConfig) -> CausalLM:
    """A random model that is not sure of anything, but has preferences."""
    model, tensors = empty_model(config, torch.float32), random_tensors(config)
    tensors["lm_head.weight"] *= 60
    assert list(load_weights(model, MemorySource(tensors)))
    return model


def own_texts(model: CausalLM, count: int, length: int) -> list[Text]:
    """Greedy continuations of random prompts, of different lengths."""
    chance = random.Random(0)
    texts = []
    for index in range(count):
        prompt = [chance.randrange(VOCAB) for _ in range(3 + index % 3)]
        own = PagedDriver(model).greedy(prompt, length - index % 4)
        texts.append(Text([*prompt, *own], len(prompt)))
    return texts


def padded(texts: list[Text]) -> torch.Tensor:
    token_ids = [text.token_ids for text in texts]
    return pad(token_ids, torch.device("cpu"), max(map(len, token_ids)))


def batch_of(model: CausalLM, texts: list[Text]) -> TargetTexts:
    token_ids = padded(texts)
    wanted = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        wanted[row, text.num_prompt_tokens : len(text.token_ids)] = True
    return TargetPass(model, 1, "torch")(token_ids, wanted)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_the_target_pass_is_the_model(family: str) -> None:
    """Its states predict what the model says, and its keys are those in a cache of paged chunks."""
    model = plain_model(tiny_config(f"{family}ForCausalLM"))
    texts = own_texts(model, 3, 12)
    batch = batch_of(model, texts)
    for row, text in enumerate(texts):
        driver = PagedDriver(model)
        logits = driver.prefill("x", text.token_ids, 5)
        length = len(text.token_ids)
        torch.testing.assert_close(
            model.compute_logits(batch.hidden[row, :length].clone()), logits, atol=1e-5, rtol=1e-4
        )
        blocks = torch.tensor(driver.tables["x"])
        for kept, cache in zip((batch.keys, batch.values), driver.caches[-1], strict=True):
            paged = cache[blocks].flatten(0, 1)[:length]
            torch.testing.assert_close(kept[0][row, :length], paged, atol=1e-5, rtol=1e-4)


def test_a_tap_has_what_the_last_layer_reads(model: CausalLM) -> None:
    texts = own_texts(model, 2, 8)
    token_ids = padded(texts)
    tap: list[torch.Tensor] = []
    TargetPass(model, 1, "torch")(token_ids, token_ids > 0, tap)
    (below,) = tap
    driver = PagedDriver(model)
    driver.caches = driver.caches[:-1]
    driver.prefill("x", texts[0].token_ids, 99)
    assert below.shape == (*token_ids.shape, CONFIG.hidden_size)


def test_least_squares_find_a_linear_target(model: CausalLM) -> None:
    """Where the last layer's input is linear in what a head sees, the head starts with that map."""
    batch = batch_of(model, own_texts(model, 60, 30))
    start, head = LeastSquares(model), new_head(model, torch.arange(VOCAB))
    size = CONFIG.hidden_size
    generator = torch.Generator().manual_seed(3)
    truth = torch.randn(2 * size, size, generator=generator)

    def inputs() -> torch.Tensor:
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG.rms_norm_eps)

        embedded = model.embed_tokens(batch.token_ids[:, 1:])
        return torch.cat((scaled(batch.hidden[:, :-1]), scaled(embedded)), dim=-1)

    below = torch.zeros_like(batch.hidden)
    below[:, 1:] = inputs() @ truth
    start.add(batch, below)
    start.solve_into(head)
    found = torch.cat((head.hidden_proj.weight.T, head.token_proj.weight.T))
    residual = (inputs() @ (found - truth))[batch.wanted[:, 1:]]
    assert residual.std() < 0.05 * below.std()


def test_gradients_do_not_depend_on_how_logits_are_cut(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(model, own_texts(model, 5, 14))
    gradients, losses = [], []
    for logits_at_once in (10**9, 7 * VOCAB):
        monkeypatch.setitem(draft_distillation.LOGITS_AT_ONCE, "cpu", logits_at_once)
        head = new_head(model, torch.arange(2, VOCAB))
        for parameter in trained_parameters(head):
            parameter.requires_grad_()
        losses.append(Distillation(model, head, 3).backward(batch))
        gradients.append([parameter.grad for parameter in trained_parameters(head)])
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("parallel", [False, True])
def test_the_loss_is_the_divergence_from_the_target(parallel: bool, model: CausalLM) -> None:
    """Against the plain formula, one start and draft at a time, by torch's own gradients."""
    texts = own_texts(model, 3, 10)
    batch = batch_of(model, texts)
    drafted = torch.arange(5, 50)
    head = new_head(model, drafted, parallel=parallel)
    for parameter in trained_parameters(head):
        parameter.requires_grad_()
    losses = Distillation(model, head, 3).backward(batch)
    found = [parameter.grad for parameter in trained_parameters(head)]
    states = unroll(model, head, batch, 3)
    expected = torch.zeros(3)
    total, count = torch.zeros(()), int(batch.wanted.sum())
    for row, text in enumerate(texts):
        for token in range(text.num_prompt_tokens, len(text.token_ids)):
            hidden = batch.hidden[row, token - 1].clone()
            goal = model.compute_logits(hidden[None])[0, drafted].softmax(-1)
            for ahead in range(3):
                start = token - 1 - ahead  # where the last token of the context stands
                if start >= 1:
                    logits = head_logits(head, states[ahead][row, start - 1])
                    loss = -(goal * logits.log_softmax(-1)).sum() / count
                    expected[ahead] += loss.detach()
                    total = total + DEPTH_DECAY**ahead * loss
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-4)
    plain = torch.autograd.grad(total, trained_parameters(head))
    torch.testing.assert_close(found, list(plain), atol=1e-5, rtol=1e-3)


def test_matches_are_chains_of_right_drafts(model: CausalLM) -> None:
    texts = own_texts(model, 4, 16)
    batch = batch_of(model, texts)
    head = new_head(model, torch.arange(VOCAB))
    matches = Distillation(model, head, 3).matches(batch)
    states = unroll(model, head, batch, 3)
    for row, text in enumerate(texts):
        length = len(text.token_ids)
        for start in range(1, length - 1):
            wanted = start + 1 >= text.num_prompt_tokens
            chain = wanted
            for ahead in range(min(3, length - 1 - start)):
                draft = int(head_logits(head, states[ahead][row, start - 1]).argmax())
                # Greedy texts: what the target finds likeliest is what stands there.
                chain = chain and draft == text.token_ids[start + 1 + ahead]
                assert bool(matches[row, start, ahead]) == chain


def test_accepted_lengths_walk_along_the_text() -> None:
    row = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0], [1, 0], [0, 0]], dtype=torch.bool)
    # From 0 two are right: on to 3, none; 4, one; and that is the end.
    assert accepted_lengths([row], 2) == (3, 3)
    # With one draft: from 0, 2 and 4, each right.
    assert accepted_lengths([row, row], 1) == (6, 6)


def test_the_vocabulary_is_of_likely_tokens(model: CausalLM) -> None:
    vocabulary = DraftVocabulary(model)
    batch = batch_of(model, own_texts(model, 3, 10))
    vocabulary.add(batch)
    said = set(batch.token_ids[batch.wanted].tolist())
    likely = vocabulary.most_likely(len(said) + 10)
    assert said <= set(likely.tolist())
    assert likely.tolist() == sorted(set(likely.tolist()))
    assert vocabulary.most_likely(10**6).tolist() == list(range(VOCAB))


def test_batches_hold_texts_of_similar_length() -> None:
    texts = [Text([0] * length, 1) for length in (9, 2, 7, 3, 20, 2)]
    batches = in_batches(texts, 12, lambda length: length)
    lengths = [[len(text.token_ids) for text in batch] for batch in batches]
    assert lengths == [[2, 2, 3], [7], [9], [20]]


@pytest.mark.parametrize("parallel", [False, True])
def test_training_learns_to_foresee_texts(
    parallel: bool, model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many steps over few texts, of which each is trained on and held out in different copies."""
    monkeypatch.setitem(head_trainer.BATCH_TOKENS, "cpu", (64, 64))
    monkeypatch.setattr(head_trainer, "HELD_OUT_SHARE", 0.3)
    config = make_config(model_config=CONFIG)
    texts = own_texts(model, 24, 24) * 3
    options = HeadTraining(num_draft_tokens=VOCAB, parallel=parallel, epochs=6, learning_rate=2e-3)
    trainer = HeadTrainer(config, model, texts, options)
    head = trainer.train()
    record = trainer.record
    assert len(record.held_out) == 7
    assert len(record.losses) == 6
    assert record.losses[-1][0] < record.losses[0][0]
    assert record.held_out[-1].rate > record.held_out[0].rate + 0.1
    assert not any(parameter.requires_grad for parameter in head.parameters())
    assert torch.equal(head.lm_head.weight, model.lm_head.weight)


def test_texts_are_padded_to_few_lengths_within_the_longest(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(head_trainer.LENGTH_MULTIPLE, "cpu", 8)
    config = make_config(model_config=CONFIG, max_model_len=27)
    texts = [Text([1 + length % 7] * length, 1) for length in (3, 5, 7, 8, 15, 20, 25, 27, 27, 26)]
    trainer = HeadTrainer(config, model, texts, HeadTraining(num_draft_tokens=VOCAB, epochs=1))
    monkeypatch.setattr(trainer, "_batch_tokens", 32)
    _, batches, held_out = trainer._prepare()
    lengths = {batch.token_ids.shape[1] for batch in [*batches, *held_out]}
    assert max(lengths) == 27
    assert lengths <= {8, 16, 24, 27}
    assert sum(int(batch.wanted.sum()) for batch in [*batches, *held_out]) == sum(
        text.num_own_tokens for text in texts
    )


def test_one_text_is_too_few(model: CausalLM) -> None:
    config = make_config(model_config=CONFIG)
    with pytest.raises(InvalidConfigError, match="raise num_tokens"):
        HeadTrainer(config, model, own_texts(model, 1, 5), HeadTraining())


def test_the_learning_rate_rises_and_falls() -> None:
    shares = [learning_rate_share(step, 100) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert shares[-1] == pytest.approx(0.05, abs=1e-3)
