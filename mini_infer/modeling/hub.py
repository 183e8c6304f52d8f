"""Models of the Hugging Face Hub, through its own client and its own cache."""

import json
from pathlib import Path

from mini_infer.core.errors import ModelNotFoundError, WeightsError

FILE_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""No pickles, no other framework's weights, no code."""


def fetch_hub_model(repo_id: str) -> Path:
    """The local snapshot of ``org/name``: a complete one in the Hub's cache, else a download.

    Raises:
        ModelNotFoundError: no such repository, no access to it, no network, or offline mode.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.constants import HF_HUB_OFFLINE
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise ModelNotFoundError(
            f"{repo_id} is fetched with the package huggingface-hub, which is not installed: "
            "pip install huggingface-hub, or give a folder as the model"
        ) from None
    patterns = list(FILE_PATTERNS)
    try:
        folder = Path(snapshot_download(repo_id, allow_patterns=patterns, local_files_only=True))
        if is_complete(folder):
            return folder
    except HFValidationError:
        raise ModelNotFoundError(f"{repo_id!r} is no valid hub id") from None
    except LocalEntryNotFoundError:
        pass  # Not in the Hub's cache: download it.
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except GatedRepoError:
        reason = "access to it must be granted on its page; then log in with 'hf auth login'"
    except RepositoryNotFoundError:
        reason = "the Hub has no such repository, or it is private and you are not logged in"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        obstacle = "the Hub can't be reached: check the network"
        if HF_HUB_OFFLINE:
            obstacle = "HF_HUB_OFFLINE forbids downloading it"
        reason = f"it is not in the local cache, and {obstacle}"
    except Exception as error:  # the Hub's HTTP client has a hierarchy of its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ModelNotFoundError(f"can't fetch {repo_id} from the Hugging Face Hub: {reason}")


def is_complete(folder: Path) -> bool:
    """Does the folder hold a configuration, a tokenizer and every safetensors shard?"""
    if not all((folder / name).exists() for name in ("config.json", "tokenizer.json")):
        return False
    try:
        require_safetensors(folder)
    except WeightsError:
        return False
    return True


def require_safetensors(folder: Path) -> None:
    """
    Raises:
        WeightsError: the folder holds no safetensors, or its index names a shard that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if any(folder.glob("*.safetensors")):
            return
        found = sorted(path.name for path in folder.glob("*.bin"))
        pickles = f"; {found[0]} is a pickle, which mini-infer does not open" if found else ""
        raise WeightsError(f"{folder} holds no safetensors{pickles}")
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        raise WeightsError(f"{index} is not a valid index of shards") from None
    missing = sorted(name for name in shards if not (folder / name).exists())
    if missing:
        raise WeightsError(f"{folder} lacks the shard {missing[0]} that its index names")
