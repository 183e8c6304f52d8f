"""Small stand-ins for checkpoints and configs."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.weights import WeightSource, checkpoint_shapes


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "architectures": [architecture],
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            **changes,
        }
    )


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint of ``config``."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.1
        for name, shape in checkpoint_shapes(config).items()
    }


class MemorySource(WeightSource):
    """A weight source over tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name].clone()


def write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], count: int) -> list[Path]:
    """Spreads tensors over ``count`` safetensors files and writes their index."""
    weight_map: dict[str, str] = {}
    paths = []
    for shard in range(count):
        part = {name: tensors[name] for name in list(tensors)[shard::count]}
        paths.append(folder / f"model-{shard + 1:05}-of-{count:05}.safetensors")
        save_file(part, paths[-1])
        weight_map.update(dict.fromkeys(part, paths[-1].name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return paths
