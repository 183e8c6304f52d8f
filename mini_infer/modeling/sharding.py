"""Tensor parallelism: which part of a model a rank has. All of its rules are here.

After Megatron-LM (arXiv 1909.08053): of two products that follow each other, the first is cut by
its rows and the second by its columns, so that each rank computes a part of every sum, and one
all-reduce adds the parts. Layers know nothing of it: a rank's model is one of fewer heads and a
narrower feed-forward network, in which a few modules add up what the ranks have.

======================  ==========================================================================
q, k, v; gate, up       rows: whole heads; a run of the intermediate size. Biases alike
o, down                 columns, the same heads or run. Their biases are added once, by rank 0
routed experts          whole: a run of them. Shared experts as a feed-forward network of their own
embedding, head         rows: a run of the vocabulary
norms, routers          whole
======================  ==========================================================================
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor, nn

from mini_infer.core.errors import InvalidConfigError, UnsupportedModelError
from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels import ops
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.decoder_layer import DecoderLayer
from mini_infer.modeling.experts import ExpertSum
from mini_infer.modeling.layers import Embedding, GatedMLP, Linear, RMSNorm, activation_dtype
from mini_infer.modeling.rank_sums import NormAfterSum, RankSum
from mini_infer.modeling.sharded_source import WHOLE, Cut, ShardedSource
from mini_infer.modeling.stage import Stage
from mini_infer.modeling.weights import (
    WeightSource,
    check_checkpoint,
    checkpoint_places,
    empty_model,
    fill_model,
)
from mini_infer.parallel.group import TensorParallelGroup

ROWS, COLUMNS = 0, 1
ROUTED_EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""As checkpoints name its tensors, with its number."""


def check_divides(config: ModelConfig, size: int) -> None:
    """Query heads are not cut; all else is, whatever its size.

    Raises:
        InvalidConfigError: the heads can't be shared out evenly; the message says among how many.
    """
    if config.num_heads % size:
        sizes = [str(count) for count in _divisors(config.num_heads)]
        raise InvalidConfigError(
            f"tensor_parallel_size {size} does not divide the model's {config.num_heads} attention "
            f"heads: it may be {', '.join(sizes)}"
        )


@dataclass(frozen=True)
class Shard:
    """The part of the model ``whole`` that ``rank`` of ``size`` has."""

    whole: ModelConfig
    rank: int
    size: int

    @property
    def config(self) -> ModelConfig:
        """The shape of this part, as if it were a model; ``vocab_size`` is its table's rows."""
        experts = self.whole.experts
        if experts is not None:
            experts = replace(
                experts,
                shared_size=len(_run(experts.shared_size, self.rank, self.size)),
                start=self.experts.start,
                stop=self.experts.stop,
            )
        return replace(
            self.whole,
            experts=experts,
            num_heads=len(self._heads),
            num_kv_heads=len(self._kv_heads),
            intermediate_size=len(_run(self.whole.intermediate_size, self.rank, self.size)),
            vocab_size=self._vocab_rows,
        )

    @property
    def vocabulary(self) -> range:
        """The tokens whose rows are here. The last ranks may have fewer than others, or none."""
        start = min(self.rank * self._vocab_rows, self.whole.vocab_size)
        return range(start, min(start + self._vocab_rows, self.whole.vocab_size))

    @property
    def experts(self) -> range:
        """The routed experts that are here: with more ranks than experts, none on some."""
        experts = self.whole.experts
        return _run(0 if experts is None else experts.num_experts, self.rank, self.size)

    def cut(self, name: str) -> Cut | None:
        """What is here of a layer's tensor; None for a bias that another rank adds, and for another
        rank's expert."""
        if expert := ROUTED_EXPERT.search(name):
            return WHOLE if int(expert[1]) in self.experts else None
        inner = self._inner_size(name)
        inner_rows = (_run(inner, self.rank, self.size),)
        module, _, kind = name.rpartition(".")
        module = module.rpartition(".")[2]
        if module in ("o_proj", "down_proj"):
            if kind == "bias":
                return WHOLE if self.rank == 0 else None
            return Cut(COLUMNS, self._query_rows if module == "o_proj" else inner_rows)
        if module == "q_proj":
            return Cut(ROWS, self._query_rows)
        if module in ("k_proj", "v_proj"):
            return Cut(ROWS, _joined(self._head_rows(head) for head in self._kv_heads))
        if module in ("gate_proj", "up_proj"):
            return Cut(ROWS, inner_rows)
        if module == "gate_up_proj":  # both, one after the other
            [run] = inner_rows
            return Cut(ROWS, (run, range(inner + run.start, inner + run.stop)))
        return WHOLE

    def cut_of_model(self, name: str) -> Cut | None:
        """The same of any tensor of a checkpoint."""
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return Cut(ROWS, (self.vocabulary,), self._vocab_rows)
        return self.cut(name)

    @property
    def _heads(self) -> range:
        return _run(self.whole.num_heads, self.rank, self.size)

    @property
    def _kv_heads(self) -> list[int]:
        """KV heads, one for each group of query heads; several ranks have the same ones where there
        are fewer KV heads than ranks.

        Groups are as large as they can be and still be of one size: those of the model, or parts of
        them where a rank's heads begin or end within one.
        """
        group = self.whole.num_heads // self.whole.num_kv_heads
        part = gcd(group, len(self._heads))
        return [head // group for head in self._heads[::part]]

    @property
    def _vocab_rows(self) -> int:
        return -(-self.whole.vocab_size // self.size)

    @property
    def _query_rows(self) -> tuple[range, ...]:
        return _joined(self._head_rows(head) for head in self._heads)

    def _inner_size(self, name: str) -> int:
        experts = self.whole.experts
        if experts is not None and ".shared_experts." in name:
            return experts.shared_size
        return self.whole.intermediate_size

    def _head_rows(self, head: int) -> range:
        size = self.whole.head_dim
        return range(head * size, (head + 1) * size)


def build_shard(
    shard: Shard,
    group: TensorParallelGroup,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    stage: Stage | None = None,
) -> CausalLM:
    """A rank's part of a model, or of a ``stage`` of it, ready for inference; it reads no other
    part of the checkpoint.

    Raises:
        UnsupportedModelError: the architecture is not implemented, or has what can't be cut.
        WeightsError: the checkpoint does not fit it.
    """
    check_checkpoint(shard.whole, source)
    model = empty_model(shard.config, dtype, device, max_model_len, stage)
    here, tied = model.stage, shard.whole.tie_word_embeddings
    if shard.size > 1:
        if here.has_table(tied):
            table = model.embed_tokens
            model.embed_tokens = VocabularyParallelEmbedding(table, shard.vocabulary, group)
        if here.is_last:
            model.lm_head = VocabularyParallelHead(model.lm_head, shard.whole.vocab_size, group)
        add_up_products(model, group)
        _name_norms_after_sums(model)
    model.config = replace(shard.config, vocab_size=shard.whole.vocab_size)
    model.whole_config = shard.whole
    model.group = group
    cut = shard.cut_of_model if shard.size > 1 else _whole
    sharded = ShardedSource(source, lambda name: cut(name) if here.has(name, tied) else None)
    for name, place in checkpoint_places(model).items():
        if place.shape != sharded.shape(name):
            raise UnsupportedModelError(
                f"{model.config.architecture} can't be cut for several ranks, as no rule of "
                f"sharding.py fits {name}: use a tensor_parallel_size of 1"
            )
    fill_model(model, sharded)
    model.layers = nn.ModuleList(model.layers[layer] for layer in here.layers)
    return model


def shard_of(model: CausalLM) -> Shard:
    """Which part of its model this one is; of a whole one, all of it."""
    return Shard(model.whole_config, model.group.rank, model.group.size)


def add_up_products(model: nn.Module, group: TensorParallelGroup) -> None:
    """Replaces the products of which each rank has some columns; before weights are loaded. Those
    within a mixture of experts add to one sum, at its end."""
    within_mixtures: set[nn.Module] = set()
    for parent in list(model.modules()):
        for child in parent.children():
            if isinstance(child, ExpertSum):
                child.sum = RankSum(group)
                within_mixtures.update(parent.modules())
        if parent in within_mixtures:
            continue
        for name, module in list(parent.named_children()):
            if name in ("o_proj", "down_proj") and isinstance(module, Linear):
                setattr(parent, name, RowParallelLinear(module, group))


def _name_norms_after_sums(model: CausalLM) -> None:
    """Tells the sums of the residual stream which norm each is for, where blocks are as usual."""
    end: nn.Module = getattr(model, "embed_tokens", model)
    for layer in model.layers:
        if not isinstance(layer, DecoderLayer):
            end = layer
            continue
        layer.input_layernorm = _norm_after(end, layer.input_layernorm)
        attention_end = layer.self_attn.o_proj
        layer.post_attention_layernorm = _norm_after(attention_end, layer.post_attention_layernorm)
        end = _end_of(layer.mlp)
    if model.stage.is_last and isinstance(model.norm, RMSNorm):
        model.norm = _norm_after(end, model.norm)


def _end_of(mlp: nn.Module) -> nn.Module:
    """What adds up the parts of a feed-forward network, or of a mixture of them."""
    if isinstance(mlp, GatedMLP):
        return mlp.down_proj
    return next((child for child in mlp.children() if isinstance(child, ExpertSum)), mlp)


def _norm_after(end: nn.Module, norm: RMSNorm) -> RMSNorm:
    if not isinstance(end, RowParallelLinear | VocabularyParallelEmbedding | ExpertSum):
        return norm
    assert end.sum is not None, "its ranks add up"
    end.sum.norm_after = NormAfterSum(norm)
    return end.sum.norm_after


class RowParallelLinear(Linear):
    """A product whose columns are spread over the ranks: each has a part of every sum."""

    def __init__(self, part: Linear, group: TensorParallelGroup) -> None:
        """Takes over the parameters of ``part``; its bias only on rank 0."""
        nn.Module.__init__(self)
        self.weight = part.weight
        self.bias = part.bias if group.rank == 0 else None
        self._packed = None
        self.sum = RankSum(group)

    def forward(self, x: Tensor, norm: RMSNorm | None = None, out: Tensor | None = None) -> Tensor:
        """See ``Linear.forward``."""
        return self.sum.group.all_reduce_(super().forward(x, norm, out))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See ``Linear.add_to``; of many rows the sum may be another tensor than ``residual``."""
        part, added = super().forward, super().add_to
        return self.sum.add_to(residual, lambda: part(x), lambda: added(residual, x))


class VocabularyParallelEmbedding(Embedding):
    """An embedding of which each rank has the rows of some tokens."""

    def __init__(self, part: Embedding, tokens: range, group: TensorParallelGroup) -> None:
        """Takes over the rows of ``part``, which are those of ``tokens``."""
        nn.Module.__init__(self)
        self.weight = part.weight
        self._tokens = tokens
        self.sum = RankSum(group)

    def forward(self, token_ids: Tensor) -> Tensor:
        """See ``Embedding``: a sum of one rank's row and of nought from all others is exact."""
        here = (token_ids >= self._tokens.start) & (token_ids < self._tokens.stop)
        places = (token_ids - self._tokens.start).where(here, 0)
        rows = ops.embedding(places, self.weight).to(activation_dtype(self.weight))
        return self.sum(rows.masked_fill_(~here[:, None], 0))


class VocabularyParallelHead(Linear):
    """An ``lm_head`` of which each rank has the rows of some tokens; all get all logits."""

    def __init__(self, part: Linear, vocab_size: int, group: TensorParallelGroup) -> None:
        """Takes over the rows of ``part``: as many on each rank, surplus ones on the last."""
        nn.Module.__init__(self)
        self.weight, self.bias = part.weight, None
        self._packed = None
        self._vocab_size, self._group = vocab_size, group

    def forward(self, x: Tensor, norm: RMSNorm | None = None, out: Tensor | None = None) -> Tensor:
        """See ``Linear.forward``."""
        return self._group.all_gather_columns(super().forward(x, norm), self._vocab_size, out)


def _whole(name: str) -> Cut:
    """Of a model that is not cut."""
    return WHOLE


def _run(count: int, rank: int, size: int) -> range:
    """A rank's share of ``count`` in a row; shares differ by one at most."""
    return range(count * rank // size, count * (rank + 1) // size)


def _joined(runs: Iterable[range]) -> tuple[range, ...]:
    """The same numbers in the same order, in as few runs as they make."""
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            run = range(joined.pop().start, run.stop)
        joined.append(run)
    return tuple(joined)


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]
