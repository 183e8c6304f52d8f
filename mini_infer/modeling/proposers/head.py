"""A head of a layer or a few over the target's residual stream, which drafts without a prefill.

Its input is what the target's last layer left at the newest verified token (as in EAGLE, arXiv
2401.15077, and in DeepSeek's multi-token prediction, 2412.19437), and the embedding of the token
that came of it. Its layers are shaped as the target's last ones and use *their* KV cache (GLIDE,
2402.02082, reads the target's keys so): verified tokens have the target's keys and values there,
only the newest token and the drafts behind it have the head's. Those are overwritten when the
target verifies the drafts. So there is nothing to prefill, to catch up with after steps without
drafts, or to take back after a rejection.

Only frequent tokens are drafted (FR-Spec, 2502.14856): the head has copies of their rows of the
target's ``lm_head``, which would otherwise take longer than all else that a draft needs.

Drafts come one after another, each computed from the one before, or all in one pass (P-EAGLE,
2602.01469, and before it ParallelSpec, 2410.05589): then a learnt vector stands where a token and a
state are not there yet. Which token a draft is says most about the next one, so what the layers
leave for each is corrected by the draft before it, as Hydra's heads are (2402.05109): that part of
the work, a small one, is done draft by draft.

Letters in shapes: R requests, k drafts of a pass, n layers of the head, Vd tokens that can be
drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from mini_infer.core.model_config import ModelConfig
from mini_infer.kernels.metadata import AttentionMetadata, Rope
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.layers import GatedMLP, Layer, Linear, RMSNorm


class LaterDrafts(Layer):
    """``x + token_proj(norm(e))``, then a feed-forward network: e is the embedding of the draft
    before, x what the head's layers left without it."""

    start: Tensor
    """``[hidden]``: what the layers are given where a draft stands that is not known yet."""
    by_draft: Tensor
    """``[Vd, hidden]``: ``token_proj(norm(e))`` of each token that can be drafted."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.start = nn.Parameter(torch.empty(size))
        self.token_norm = RMSNorm(size, eps)
        self.token_proj = Linear(size, size)
        self.norm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    @torch.no_grad()
    def prepare(self, embedded: Tensor) -> None:
        """Once weights are loaded: ``embedded [Vd, hidden]`` are the tokens that can be drafted.

        A look-up in place of a norm and a product, each a kernel that takes longer to start than to
        run.
        """
        self.by_draft = self.token_proj(embedded, self.token_norm)

    def forward(self, x: Tensor, drafts: Tensor) -> Tensor:
        """``x [R, hidden]``, and ``drafts [R]`` int64, which of the Vd tokens stands before -> the
        residual stream ``[R, hidden]``."""
        return self.mlp.add_to(x + self.by_draft.index_select(0, drafts), self.norm)


class DraftHead(Layer):
    """``x = hidden_proj(norm(h)) + token_proj(norm(e))``, then n blocks of the target's kind.

    h is the residual stream at the token before, e the embedding of the token that stands now. What
    the last block leaves is the h of the next draft, unless all are drafted at once; its logits
    come from ``compute_logits``.
    """

    later: LaterDrafts | None
    """What drafts behind the first need, if all go through the layers in one pass."""

    token_ids: Tensor
    """``[Vd]`` int64, ascending: what each row of ``lm_head`` stands for."""

    packed_names: ClassVar[dict[str, tuple[str, ...]]] = CausalLM.packed_names

    def __init__(
        self, target: CausalLM, num_tokens: int, num_layers: int = 1, *, parallel: bool = False
    ) -> None:
        """A head for ``target`` that drafts ``num_tokens`` (Vd) tokens, if ``parallel`` all drafts
        of a step at once; its weights are not set."""
        super().__init__()
        config = target.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(size, eps)
        self.token_norm = RMSNorm(size, eps)
        self.hidden_proj = Linear(size, size)
        self.token_proj = Linear(size, size)
        self.later = LaterDrafts(config) if parallel else None
        self.layers = nn.ModuleList(
            target.build_layer(config, layer)
            for layer in range(config.num_layers - num_layers, config.num_layers)
        )
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, num_tokens)
        self.register_buffer("token_ids", torch.empty(num_tokens, dtype=torch.int64))

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rope: Rope,
        caches: Sequence[KVCache],
        meta: AttentionMetadata,
        num_drafts: int = 1,
    ) -> Tensor:
        """``hidden, embedded [R, hidden]`` -> the residual stream ``[R * k, hidden]`` at the tokens
        that are embedded and, in a parallel head, at the k - 1 places behind each, which ``later``
        corrects; the keys and values of all are written. ``caches`` are those of the target's last
        n layers; ``meta`` has k = ``num_drafts`` queries a row, as for a step of the target."""
        x: Tensor = self.token_proj(embedded, self.token_norm)
        x = self.hidden_proj.add_to(x, self.hidden_norm(hidden))
        if num_drafts > 1:
            assert self.later is not None, "others draft one at a time"
            later = self.later.start.expand(len(x), num_drafts - 1, -1)
            x = torch.cat((x[:, None], later), dim=1).flatten(0, 1)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rope, cache, meta)
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        """Rows of the residual stream ``[R, hidden]`` -> logits ``[R, Vd]`` of ``token_ids``."""
        logits: Tensor = self.lm_head(x, self.norm)
        return logits
