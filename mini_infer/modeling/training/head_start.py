"""A draft head before its first step of training, already useful.

Its block is a copy of the target's last layer, which knows how to read the keys that it finds. What
that layer wants is the residual stream below it, at a token that the target has not computed. The
best linear guess of it, from the state at the token before and the token's embedding, is a least
squares problem whose normal equations are small and solved at once.
"""

import torch
from torch import Tensor

from mini_infer.kernels.reference import rms_norm
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.proposers.head import DraftHead, last_layer
from mini_infer.modeling.training.target_pass import TargetTexts

RIDGE = 1e-3
"""Of the mean square of the inputs: few texts say little about most directions."""


def new_head(model: CausalLM, token_ids: Tensor) -> DraftHead:
    """A head in float32 on the model's device that drafts ``token_ids [Vd]``, ascending.

    Its block is the target's last layer; its two inputs are still added up as they are.
    """
    last, config = last_layer(model), model.config
    device = model.embed_tokens.weight.device
    with torch.device(device):
        head = DraftHead(model, len(token_ids)).float()
    attention = last.self_attn
    heads_size = config.num_heads * config.head_dim
    pairs = [
        (head.input_layernorm.weight, last.input_layernorm.weight),
        (head.q_proj.weight, attention.qkv_proj.weight[:heads_size]),
        (head.o_proj.weight, attention.o_proj.weight),
        (head.post_attention_layernorm.weight, last.post_attention_layernorm.weight),
        (head.mlp.gate_up_proj.weight, last.mlp.gate_up_proj.weight),
        (head.mlp.down_proj.weight, last.mlp.down_proj.weight),
        (head.norm.weight, model.norm.weight),
        (head.lm_head.weight, model.lm_head.weight[token_ids.to(device)]),
        (head.token_ids, token_ids),
    ]
    if head.q_norm is not None:
        pairs.append((head.q_norm.weight, attention.q_norm.weight))
    biases = (
        (head.q_proj.bias, attention.qkv_proj.bias),
        (head.o_proj.bias, attention.o_proj.bias),
        (head.mlp.gate_up_proj.bias, last.mlp.gate_up_proj.bias),
        (head.mlp.down_proj.bias, last.mlp.down_proj.bias),
    )
    pairs += [
        (ours, theirs[: len(ours)])
        for ours, theirs in biases
        if ours is not None and theirs is not None
    ]
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(theirs)
        for norm in (head.hidden_norm, head.token_norm):
            norm.weight.fill_(1.0)
        for product in (head.hidden_proj, head.token_proj):
            product.weight.copy_(torch.eye(config.hidden_size, device=device))
    return head


class LeastSquares:
    """The normal equations of ``[norm(h), norm(e)] -> x``, summed over texts."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        size, device = model.config.hidden_size, model.embed_tokens.weight.device
        self._inputs = torch.zeros(2 * size, 2 * size, device=device)
        self._outputs = torch.zeros(2 * size, size, device=device)

    @torch.no_grad()
    def add(self, texts: TargetTexts, below: Tensor) -> None:
        """``below [B, L, hidden]`` is the residual stream that the last layer read."""
        known = texts.wanted[:, 1:]
        embedded = self._model.embed_tokens(texts.token_ids[:, 1:][known])
        pairs = _rms(texts.hidden[:, :-1][known]), _rms(embedded)
        inputs = torch.cat(pairs, dim=-1)
        self._inputs += inputs.T @ inputs
        self._outputs += inputs.T @ below[:, 1:][known].float()

    @torch.no_grad()
    def solve_into(self, head: DraftHead) -> None:
        """Sets the head's two projections, whose norms have weights of one."""
        size = len(self._inputs)
        ridge = RIDGE * self._inputs.diagonal().mean().double()
        eye = torch.eye(size, device=self._inputs.device, dtype=torch.float64)
        solved = torch.linalg.solve(self._inputs.double() + ridge * eye, self._outputs.double())
        for product, part in zip((head.hidden_proj, head.token_proj), solved.chunk(2), strict=True):
            product.weight.copy_(part.T)


def _rms(x: Tensor) -> Tensor:
    x = x.float()
    return rms_norm(x, x.new_ones(x.shape[-1]), 1e-5)
