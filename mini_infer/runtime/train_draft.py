"""A draft head from nothing but a model: it writes texts, and a head learns to foresee them."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from mini_infer.core.errors import OutOfMemoryError
from mini_infer.modeling.model_files import locate_model
from mini_infer.modeling.proposers.head_files import save_draft_head
from mini_infer.modeling.training.head_trainer import HeadTrainer, HeadTraining, TrainingRecord
from mini_infer.modeling.training.target_pass import load_plain_target
from mini_infer.runtime.llm import LLM
from mini_infer.runtime.resolve import resolve_core
from mini_infer.runtime.self_generated import read_conversations, write_texts


def train(
    output: Path,
    options: Mapping[str, Any],
    training: Mapping[str, Any],
    num_tokens: int,
    prompts: Path | None = None,
) -> TrainingRecord:
    """Trains a head for the engine of ``options`` and saves it, with the record, in ``output``.

    Args:
        options: the engine's: which model, where, and its longest text as ``max_model_len``.
        training: fields of ``HeadTraining``.
        num_tokens: how many the model shall write.
        prompts: a file for ``read_conversations``; without one the model makes them up.

    Raises:
        MiniInferError: an option, the model or a prompt can't be used.
        OutOfMemoryError: there is too much to keep on the GPU.
        OSError: ``output`` can't be written to.
    """
    how = HeadTraining(**training)
    conversations = read_conversations(prompts) if prompts is not None else ()
    output.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=output).close()  # what can't be written says so before all the work
    with LLM(**options) as llm:
        how.check_fits(llm.engine.config.model_config)  # before the texts, which take long
        texts = write_texts(llm, num_tokens, conversations, how.seed)
        device = llm.engine.config.device
    config, _ = resolve_core({**options, "dtype": _training_dtype(device)})
    model = load_plain_target(config, locate_model(config.model))
    trainer = HeadTrainer(config, model, texts, how)
    try:
        head = trainer.train()
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            "the texts' states and the training do not fit the GPU's memory: lower num_tokens, "
            "max_length, num_layers or num_draft_tokens"
        ) from error
    save_draft_head(output, head, model, torch.bfloat16)
    trainer.record.save(output)
    return trainer.record


def _training_dtype(device: str) -> str:
    """Of the target's states and of all products; a head's own weights are trained in float32."""
    if device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "float32"
    return "bfloat16"
