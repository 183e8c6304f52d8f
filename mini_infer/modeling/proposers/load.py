"""From a ``SpeculativeConfig`` to a proposer on the device."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError, MiniInferError
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState

if TYPE_CHECKING:
    from mini_infer.modeling.proposers.proposer import DeviceProposer


def load_device_proposer(
    config: EngineConfig,
    model: CausalLM,
    caches: Sequence[KVCache],
    state: DeviceState,
    draft_model: CausalLM | None,
) -> DeviceProposer:
    """The proposer of ``config.speculative_config``, over the target model and its caches.

    ``draft_model`` is there for the method of that name: its weights are loaded before the memory
    for caches is known.

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
    if method == "head":
        from mini_infer.modeling.proposers.head_proposer import HeadProposer

        return HeadProposer(*target)
    if draft_model is not None:
        from mini_infer.modeling.proposers.draft_model import DraftModelProposer

        return DraftModelProposer(config, draft_model, len(caches[0][0]), state)
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
    return cast("DeviceProposer", proposer)
