"""From a ``SpeculativeConfig`` to a proposer on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mini_infer.core.engine_config import EngineConfig
from mini_infer.core.errors import InvalidConfigError
from mini_infer.modeling.attention import KVCache
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.device_state import DeviceState
from mini_infer.modeling.proposers.early_exit import EarlyExitProposer

if TYPE_CHECKING:
    from mini_infer.modeling.proposers.proposer import DeviceProposer


def load_device_proposer(
    config: EngineConfig, model: CausalLM, caches: Sequence[KVCache], state: DeviceState
) -> DeviceProposer:
    """The proposer of ``config.speculative_config``, over the target model and its caches.

    Raises:
        InvalidConfigError: a user's class can't be built.
    """
    assert config.speculative_config is not None
    method = config.speculative_config.method
    if method == "early_exit":
        return EarlyExitProposer(config, model, caches, state)
    raise InvalidConfigError(f"speculative method {method!r} does not run on the device")
