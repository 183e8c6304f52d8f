"""From a ``SpeculativeConfig`` to a proposer on the device."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError, MiniInferError
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.guarded import guarded

if TYPE_CHECKING:
    from mini_infer.modeling.proposers.head import DraftHead
    from mini_infer.modeling.proposers.proposer import DeviceProposer


def load_draft(config: EngineConfig, model: CausalLM) -> nn.Module | None:
    """What makes drafts with weights of its own, a draft model or a head; None where nothing does.

    Loaded before the memory for caches is known, once for all proposers that a start-up builds.

    Raises:
        MiniInferError: they are not there, do not fit the target, or the memory.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.method not in ("draft_model", "head"):
        return None
    if speculation.method == "draft_model":
        from mini_infer.modeling.proposers.draft_model import load_draft_model

        return load_draft_model(config)
    assert speculation.model is not None, "the resolver asks for it"
    from mini_infer.modeling.proposers.head_files import load_draft_head

    dtype: torch.dtype = getattr(torch, config.dtype)
    return load_draft_head(Path(speculation.model).expanduser(), model, dtype)


def load_device_proposer(
    config: EngineConfig,
    model: CausalLM,
    caches: Sequence[KVCache],
    state: DeviceState,
    draft: nn.Module | None,
) -> DeviceProposer:
    """The proposer of ``config.speculative_config``, over the target model and its caches.

    ``draft`` is what ``load_draft`` gave.

    A user's own raises ``ProposerError`` where it does not propose.

    Raises:
        InvalidConfigError: a user's class can't be built.
        OutOfMemoryError: what it keeps does not fit the memory.
    """
    assert config.speculative_config is not None
    method = config.speculative_config.method
    target = config, model, caches, state
    if method == "early_exit":
        from mini_infer.modeling.proposers.early_exit import EarlyExitProposer

        return EarlyExitProposer(*target)
    if isinstance(draft, CausalLM):
        from mini_infer.modeling.proposers.draft_model import DraftModelProposer

        return DraftModelProposer(config, draft, len(caches[0][0]), state)
    if draft is not None:
        from mini_infer.modeling.proposers.head_proposer import HeadProposer

        return HeadProposer(cast("DraftHead", draft), model, caches, state)
    module, _, name = method.partition(":")
    try:
        proposer = getattr(importlib.import_module(module), name)(*target)
    except MiniInferError:
        raise
    except Exception as error:  # it is the user's code, and may raise anything
        raise InvalidConfigError(
            f"speculative_config: {method} can't be built: {type(error).__name__}: {error}; it is "
            f"given the EngineConfig, the target model, its caches and the device state"
        ) from error
    return guarded(proposer, method, config.model_config.vocab_size)
