"""Fields of a request that no part of the server reads: refused, labels, or unknown."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from mini_infer.core.errors import InvalidRequestError

logger = logging.getLogger(__name__)

REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_obfuscation": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "request_id": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's and vLLM's that can't be honoured, each with the values (besides null) that
ask for nothing."""

LABELS = frozenset(
    ("user", "safety_identifier", "metadata", "prompt_cache_key", "session_id", "return_mm_kwargs")
)
"""What changes no answer: the caller's own books, hints for routing, and a switch of images."""

MAX_TOLD = 256
"""Unknown names that the log has: who sends a new one with each request must not fill it."""
_told: set[str] = set()


def refuse_fields(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for a field of ``REFUSED`` that asks for something."""
    for name, value in given.items():
        if name in REFUSED and value is not None and value not in REFUSED[name]:
            instead = "use structured_outputs" if name.startswith("guided_") else "leave it out"
            if name == "request_id":
                instead = "send it as the header X-Request-Id"
            raise InvalidRequestError(f"{name} is not supported by mini-infer; {instead}", name)


def tell_unknown(names: Iterable[str]) -> None:
    """Logs the names that nobody here knows, each once: often they are misspelled."""
    new = {name for name in names if name not in REFUSED and name not in LABELS} - _told
    for name in sorted(new)[: MAX_TOLD - len(_told)]:
        _told.add(name)
        logger.warning("requests have a field %.80r, which is unknown and ignored", name)
