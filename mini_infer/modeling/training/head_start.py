"""A draft head before its first step of training, already useful.

Its blocks are copies of the target's last layers, which know how to read the keys that they find.
What they want is the residual stream below them, at a token that the target has not computed. The
best linear guess of it, from the state at the token before and the token's embedding, is a least
squares problem whose normal equations are small and solved at once.
"""

import torch
from torch import Tensor, nn

from mini_infer.kernels.reference import rms_norm
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.decoder_layer import DecoderLayer
from mini_infer.modeling.proposers.head import DraftHead, LaterDrafts
from mini_infer.modeling.training.target_pass import TargetTexts

RIDGE = 1e-3
"""Of the mean square of the inputs: few texts say little about most directions."""


def new_head(
    model: CausalLM, token_ids: Tensor, num_layers: int = 1, *, parallel: bool = False
) -> DraftHead:
    """A head in float32 on the model's device that drafts ``token_ids [Vd]``, ascending.

    Its blocks are the target's last ones; its two inputs are still added up as they are.
    """
    with torch.device(model.embed_tokens.weight.device):
        head = DraftHead(model, len(token_ids), num_layers, parallel=parallel).float()
    head.layers.load_state_dict(model.layers[-num_layers:].state_dict())
    head.norm.load_state_dict(model.norm.state_dict())
    with torch.no_grad():
        head.lm_head.weight.copy_(model.lm_head.weight[token_ids])
        head.token_ids.copy_(token_ids)
        for norm in (head.hidden_norm, head.token_norm):
            norm.weight.fill_(1.0)
        for product in (head.hidden_proj, head.token_proj):
            torch.nn.init.eye_(product.weight)
        if head.later is not None:
            _identity(head.later, model.layers[-1])
    return head


def _identity(later: LaterDrafts, layer: nn.Module) -> None:
    """Corrects nothing yet, and has features to begin with: those of the last layer."""
    later.start.zero_()
    later.token_norm.weight.fill_(1.0)
    later.token_proj.weight.zero_()
    if isinstance(layer, DecoderLayer):
        later.norm.load_state_dict(layer.post_attention_layernorm.state_dict())
        later.mlp.gate_up_proj.weight.copy_(layer.mlp.gate_up_proj.weight)
    later.mlp.down_proj.weight.zero_()


class LeastSquares:
    """The normal equations of ``[norm(h), norm(e)] -> x``, summed over texts."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        size, device = model.config.hidden_size, model.embed_tokens.weight.device
        self._inputs = torch.zeros(2 * size, 2 * size, device=device)
        self._outputs = torch.zeros(2 * size, size, device=device)
        self._sum, self._count = torch.zeros(size, device=device), 0

    @torch.no_grad()
    def add(self, texts: TargetTexts, below: Tensor) -> None:
        """``below [B, L, hidden]`` is the residual stream that the blocks' originals read."""
        known = texts.wanted[:, 1:]
        embedded = self._model.embed_tokens(texts.token_ids[:, 1:][known])
        pairs = _rms(texts.hidden[:, :-1][known]), _rms(embedded)
        inputs = torch.cat(pairs, dim=-1)
        self._inputs += inputs.T @ inputs
        outputs = below[:, 1:][known].float()
        self._outputs += inputs.T @ outputs
        self._sum += outputs.sum(0)
        self._count += len(outputs)

    @torch.no_grad()
    def solve_into(self, head: DraftHead) -> None:
        """Sets the head's two projections, whose norms have weights of one; where a parallel head
        knows neither state nor token, the mean is the best guess."""
        size = len(self._inputs)
        ridge = RIDGE * self._inputs.diagonal().mean().double()
        eye = torch.eye(size, device=self._inputs.device, dtype=torch.float64)
        solved = torch.linalg.solve(self._inputs.double() + ridge * eye, self._outputs.double())
        for product, part in zip((head.hidden_proj, head.token_proj), solved.chunk(2), strict=True):
            product.weight.copy_(part.T)
        if head.later is not None:
            head.later.start.copy_(self._sum / self._count)


def _rms(x: Tensor) -> Tensor:
    x = x.float()
    return rms_norm(x, x.new_ones(x.shape[-1]), 1e-5)
