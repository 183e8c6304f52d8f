"""Hugging Face transformers' ``generate``, as its users call it: static batches, padded left."""

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from client import Job

try:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging
except ModuleNotFoundError:
    raise SystemExit(
        "error: this benchmark has Hugging Face as its peer: pip install transformers"
    ) from None

PAD_TOKEN_ID = 0
"""Any will do: the mask hides it, and no output ends early."""


class HuggingFace:
    """One model in one dtype, with scaled-dot-product attention. Free it before the next."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        device: str,
        *,
        random_weights: bool = False,
        temperature: float = 0.0,
    ) -> None:
        """``folder`` needs only a config.json with ``random_weights``; temperature 0 is greedy."""
        quiet: Any = logging
        quiet.disable_progress_bar()
        self._device = device
        options: dict[str, Any] = {
            "dtype": getattr(torch, dtype),
            "attn_implementation": "sdpa",
        }
        model: Any
        if random_weights:
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(folder), **options
                )
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
        # Not min_new_tokens: that forbids the token, where ignore_eos only goes on after it.
        model.generation_config.eos_token_id = None
        self._sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            self._sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
        self._model = model.to(device).eval()

    def close(self) -> None:
        del self._model
        gc.collect()

    @torch.inference_mode()
    def generate(self, jobs: Sequence[Job]) -> tuple[float, list[list[int]]]:
        """One batch, which runs until its longest output is done.

        Returns seconds and each job's own output tokens, cut to the length that it asked for.
        """
        width = max(len(job.prompt_token_ids) for job in jobs)
        num_output_tokens = max(job.num_output_tokens for job in jobs)
        started = time.perf_counter()
        token_ids = torch.full((len(jobs), width), PAD_TOKEN_ID, device=self._device)
        mask = torch.zeros_like(token_ids)
        for row, job in enumerate(jobs):
            start = width - len(job.prompt_token_ids)
            token_ids[row, start:] = torch.tensor(job.prompt_token_ids)
            mask[row, start:] = 1
        output = self._model.generate(
            token_ids,
            attention_mask=mask,
            **self._sampling,
            max_new_tokens=num_output_tokens,
            pad_token_id=PAD_TOKEN_ID,
        )
        rows = output[:, width:].tolist()  # waits for a GPU, too
        seconds = time.perf_counter() - started
        return seconds, [row[: job.num_output_tokens] for row, job in zip(rows, jobs, strict=True)]

    def generate_in_batches(self, jobs: Sequence[Job], size: int) -> float:
        """Seconds for all jobs, in static batches in the order in which they came."""
        return sum(
            self.generate(jobs[start : start + size])[0] for start in range(0, len(jobs), size)
        )
