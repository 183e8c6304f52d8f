"""A mixture of experts as DeepSeek-V2 has it (arXiv 2405.04434), as simple as can be: an
architecture for tests of what its ranks share."""

import torch
from torch import Tensor, nn

from mini_infer.core.model_config import ExpertsConfig, ModelConfig
from mini_infer.modeling.attention import GroupedQueryAttention
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.decoder_layer import DecoderLayer
from mini_infer.modeling.experts import ExpertSum
from mini_infer.modeling.layers import GatedMLP, Linear, RMSNorm

ARCHITECTURE = "TinyMixtureForCausalLM"
PLACE = f"{__name__}:{ARCHITECTURE}"
"""For ``registry.ARCHITECTURES``."""
NUM_CHOSEN = 2


class MixtureOfExperts(nn.Module):
    """Each token goes to the likeliest routed experts, and to the shared ones."""

    def __init__(self, hidden_size: int, experts: ExpertsConfig) -> None:
        super().__init__()
        self.gate = Linear(hidden_size, experts.num_experts)
        self.experts = nn.ModuleDict(
            {str(number): GatedMLP(hidden_size, experts.expert_size) for number in experts.here}
        )
        self.shared_experts = GatedMLP(hidden_size, experts.shared_size)
        self.end = ExpertSum()

    def add_to(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        x = norm(residual)
        weights, chosen = self.gate(x).softmax(-1).topk(NUM_CHOSEN)
        part = self.shared_experts(x)
        for number, expert in self.experts.items():
            rows, places = (chosen == int(number)).nonzero(as_tuple=True)
            if len(rows):
                part.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return self.end.add_to(residual, part)


class TinyMixtureForCausalLM(CausalLM):
    """Its first block is dense."""

    def build_layer(self, config: ModelConfig, layer: int) -> DecoderLayer:
        assert config.experts is not None
        if layer == 0:
            mlp: nn.Module = GatedMLP(config.hidden_size, config.intermediate_size)
        else:
            mlp = MixtureOfExperts(config.hidden_size, config.experts)
        return DecoderLayer(config, GroupedQueryAttention(config, layer), mlp)  # type: ignore[arg-type]


def by_hand(x: Tensor, tensors: dict[str, Tensor], num_experts: int) -> Tensor:
    """What the mixture with these ``tensors`` says of ``x [T, hidden]``, token by token."""

    def mlp(name: str, token: Tensor) -> Tensor:
        gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        said: Tensor = down @ (torch.nn.functional.silu(gate @ token) * (up @ token))
        return said

    said = []
    for token in x:
        odds = (tensors["gate.weight"] @ token).softmax(0)
        routed = sum(
            odds[number] * mlp(f"experts.{number}", token)
            for number in sorted(range(num_experts), key=lambda one: -odds[one])[:NUM_CHOSEN]
        )
        said.append(routed + mlp("shared_experts", token))
    return torch.stack(said)
