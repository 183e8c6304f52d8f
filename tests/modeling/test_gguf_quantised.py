"""A quantised file answers exactly as its dequantised weights do in float32, to the last token."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from mini_infer import LLM, SamplingParams
from tests.modeling.gguf_files import (
    model_metadata,
    model_tensors,
    tiny_model,
    tokenizer_metadata,
    write_gguf,
)

Kind = gguf.GGMLQuantizationType
PROMPTS = [[5, 6, 7, 8], [9] * 20, [40, 41, 42], list(range(30, 60))]
NUM_TOKENS = 24


def quantise(model: Any, kind: Kind) -> dict[str, Any]:
    """Tensors for a GGUF with its matrices in blocks, and the model given what they hold."""
    tensors: dict[str, Any] = model_tensors(model)
    for name, array in tensors.items():
        if array.ndim == 2:
            tensors[name] = (gguf.quants.quantize(array, kind), kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # rows are quantised one by one, so their order is no matter
                blocks = gguf.quants.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
    return tensors


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_regression_20_quantised_weights_are_dequantised_and_computed_in_float32(
    family: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINI_INFER_CACHE", str(tmp_path / "cache"))
    model = tiny_model(family)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    metadata = model_metadata(model) | tokenizer_metadata()
    path = write_gguf(tmp_path / "q.gguf", model.config.model_type, metadata, quantise(model, kind))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(path), dtype="float32", device="cpu", num_kv_blocks=40) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)

    def agreeing() -> int:
        count = 0
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            token_ids = output.outputs[0].token_ids
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + token_ids[:-1]])).logits[0]
            expected = logits[-NUM_TOKENS:].argmax(-1)
            count += int((expected == torch.tensor(token_ids)).sum())
        return count

    assert agreeing() == len(PROMPTS) * NUM_TOKENS
    model.load_state_dict(plain)
    if kind != Kind.Q8_0:  # the weights before quantisation say something else: no oracle
        assert agreeing() < len(PROMPTS) * NUM_TOKENS
