"""From texts that a target wrote to a draft head for it."""

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.training.draft_distillation import Distillation, accepted_lengths
from mini_infer.modeling.training.draft_vocabulary import DraftVocabulary
from mini_infer.modeling.training.head_start import LeastSquares, new_head
from mini_infer.modeling.training.target_pass import TargetPass, TargetTexts, pad
from mini_infer.modeling.training.texts import Text, in_batches

RECORD_FILE = "training.json"
BATCH_TOKENS = {"cpu": (1024, 1024), "cuda": (8192, 32768)}
"""Tokens of a step: at least, and at most. A CPU is busy with few. A GPU's step takes the time of
its launches, whatever it holds: between these bounds it holds what makes some ``MANY_STEPS``."""
MANY_STEPS = 2000
LENGTH_MULTIPLE = {"cpu": 1, "cuda": 128}
"""What texts are padded to. A GPU's attention is built anew for every shape (cuDNN: 60 ms each)."""
HELD_OUT_SHARE, MOST_HELD_OUT = 0.05, 128
WARM_UP_SHARE = 0.05
LEAST_RATE = 0.05
"""The learning rate at the end, of the one at the beginning."""
BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """How a head is trained.

    Raises:
        InvalidConfigError: a value out of range.
    """

    num_layers: int = 1
    """Of the head. Each costs a draft as much as one of the target's."""
    num_draft_tokens: int = 16384
    """The vocabulary that is drafted from."""
    parallel: bool = False
    """Drafts all of a step in one pass."""
    depth: int = 4
    """Drafts behind a token that the loss looks at. A sequential head goes on in the same way; the
    places behind these a parallel one has never seen."""
    epochs: int = 4
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_draft_tokens", "depth", "epochs"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise InvalidConfigError(
                f"learning_rate must be between 0 and 1, got {self.learning_rate}"
            )

    def check_fits(self, target: ModelConfig) -> None:
        """
        Raises:
            InvalidConfigError: more layers than the target's own.
        """
        if self.num_layers > target.num_layers:
            raise InvalidConfigError(
                f"num_layers must be at most the model's own {target.num_layers}, got "
                f"{self.num_layers}"
            )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts fare on texts that were held out."""

    by_depth: tuple[float, ...]
    """Of the drafts at each depth, those that are right where all before them are."""
    rate: float
    """Accepted drafts of those proposed, when a text is decoded with ``depth`` drafts a step."""


@dataclass(slots=True)
class TrainingRecord:
    """What happened: it is kept beside the head."""

    options: HeadTraining
    num_texts: int = 0
    num_tokens: int = 0
    """Of the texts trained on, those that the target wrote."""
    seconds: dict[str, float] = field(default_factory=dict)
    losses: list[tuple[float, ...]] = field(default_factory=list)
    """Per epoch and depth, in nats."""
    held_out: list[Acceptance] = field(default_factory=list)
    """Before the first epoch, and after each."""

    def save(self, folder: Path) -> None:
        """Writes ``training.json``."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / RECORD_FILE).write_text(text, encoding="utf-8")

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] = round(time.perf_counter() - begin, 1)


class HeadTrainer:
    """Trains a head for ``model``, whose weights stay as they are.

    The texts' states and last keys and values are computed once and kept on the model's device:
    ``hidden_size + 2 * num_layers * num_kv_heads * head_dim`` numbers a token, padding included.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        texts: Sequence[Text],
        options: HeadTraining,
    ) -> None:
        """``model`` comes from ``load_plain_target``.

        Raises:
            InvalidConfigError: fewer than two texts, or more layers than the model's own.
        """
        options.check_fits(model.config)
        if len(texts) < 2:
            raise InvalidConfigError(
                "a draft head is trained on some texts and measured on others, but there are only "
                f"{len(texts)}: raise num_tokens, or give more prompts"
            )
        self._model, self._options = model, options
        self._run = TargetPass(model, options.num_layers, config.attention_backend)
        shuffled = random.Random(options.seed).sample(list(texts), len(texts))
        num_held_out = max(1, min(MOST_HELD_OUT, int(HELD_OUT_SHARE * len(texts))))
        self._held_out, self._texts = shuffled[:num_held_out], shuffled[num_held_out:]
        self.record = TrainingRecord(
            options, len(self._texts), sum(text.num_own_tokens for text in self._texts)
        )
        least, most = BATCH_TOKENS[config.device]
        num_tokens = options.epochs * sum(len(text.token_ids) for text in self._texts)
        self._batch_tokens = max(least, min(most, num_tokens // MANY_STEPS))
        self._multiple, self._longest = LENGTH_MULTIPLE[config.device], config.max_model_len

    def train(self) -> DraftHead:
        """The head, in float32; ``record`` says how it went."""
        with self.record.timing("target"):
            head, batches, held_out = self._prepare()
        distillation = Distillation(self._model, head, self._options.depth)
        with self.record.timing("training"):
            self._measure(distillation, held_out)
            self._optimise(head, distillation, batches, held_out)
        return head

    def _prepare(self) -> tuple[DraftHead, list[TargetTexts], list[TargetTexts]]:
        """An untrained head, and what the target makes of the texts."""
        vocabulary, start = DraftVocabulary(self._model), LeastSquares(self._model)
        batches = []
        groups = self._in_batches(self._texts)
        for group in tqdm(groups, desc="Target", disable=None, leave=False):
            tap: list[Tensor] = []
            batch = self._target_texts(group, tap)
            vocabulary.add(batch)
            start.add(batch, tap[0])
            batches.append(batch)
        held_out = [self._target_texts(group) for group in self._in_batches(self._held_out)]
        options = self._options
        token_ids = vocabulary.most_likely(options.num_draft_tokens)
        head = new_head(self._model, token_ids, options.num_layers, parallel=options.parallel)
        start.solve_into(head)
        return head, batches, held_out

    def _in_batches(self, texts: Sequence[Text]) -> list[list[Text]]:
        return in_batches(texts, self._batch_tokens, self._padded)

    def _padded(self, length: int) -> int:
        """Beyond the longest text no position has an angle."""
        return min(-(-length // self._multiple) * self._multiple, self._longest)

    def _target_texts(self, texts: Sequence[Text], tap: list[Tensor] | None = None) -> TargetTexts:
        device = self._model.embed_tokens.weight.device
        length = self._padded(max(len(text.token_ids) for text in texts))
        token_ids = pad([text.token_ids for text in texts], device, length)
        bounds = torch.tensor([(text.num_prompt_tokens, len(text.token_ids)) for text in texts])
        place = torch.arange(length)
        wanted = (place >= bounds[:, :1]) & (place < bounds[:, 1:])
        return self._run(token_ids, wanted.to(device), tap)

    def _optimise(
        self,
        head: DraftHead,
        distillation: Distillation,
        batches: list[TargetTexts],
        held_out: list[TargetTexts],
    ) -> None:
        options = self._options
        parameters = trained_parameters(head)
        for parameter in parameters:
            parameter.requires_grad_()
        optimiser = torch.optim.AdamW(
            parameters, options.learning_rate, BETAS, weight_decay=0.0, fused=True
        )
        num_steps = options.epochs * len(batches)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: learning_rate_share(step, num_steps)
        )
        order = random.Random(options.seed)
        with tqdm(total=num_steps, desc="Training", disable=None, leave=False) as bar:
            for _ in range(options.epochs):
                losses = torch.zeros(options.depth, device=head.token_ids.device)
                for batch in order.sample(batches, len(batches)):
                    losses += distillation.backward(batch)
                    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                    optimiser.step()
                    schedule.step()
                    optimiser.zero_grad()
                    bar.update()
                self.record.losses.append(_rounded(losses / len(batches)))
                rate = self._measure(distillation, held_out)
                bar.set_postfix_str(f"held-out acceptance {rate:.1%}", refresh=False)
        for parameter in parameters:
            parameter.requires_grad_(False)

    def _measure(self, distillation: Distillation, held_out: list[TargetTexts]) -> float:
        """Adds to the record how drafts fare on the texts held out; returns the rate."""
        per_text = []
        for batch in held_out:
            matches = distillation.matches(batch).cpu()
            for row, wanted in zip(matches, batch.wanted.cpu(), strict=True):
                places = wanted.nonzero()[:, 0]
                if len(places):  # a start stands before the token that it drafts
                    per_text.append(row[int(places[0]) - 1 : int(places[-1])])
        right = torch.cat(per_text).float().mean(0)
        before = torch.cat((right.new_ones(1), right[:-1]))
        num_steps, num_accepted = accepted_lengths(per_text, self._options.depth)
        rate = num_accepted / (num_steps * self._options.depth)
        self.record.held_out.append(
            Acceptance(_rounded(right / before.clamp_min(1e-9)), round(rate, 4))
        )
        return rate


def trained_parameters(head: DraftHead) -> list[torch.nn.Parameter]:
    """All but the rows of the vocabulary: those are the target's, and most of the weights."""
    return [
        parameter for name, parameter in head.named_parameters() if not name.startswith("lm_head.")
    ]


def learning_rate_share(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to ``LEAST_RATE``."""
    warm_up = max(1, int(WARM_UP_SHARE * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, num_steps - warm_up)
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def _rounded(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values.tolist())
