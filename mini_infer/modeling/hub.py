"""Models of the Hugging Face Hub, through its own client and its own cache."""

from functools import partial
from pathlib import Path

from mini_infer.core.errors import ModelNotFoundError, WeightsError

FILE_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "model.safetensors.index.json",
    "*.safetensors",
)
"""What mini-infer reads. No pickles, no other framework's weights, no code."""
CONFIG_PATTERNS = ("config.json", "generation_config.json", "tokenizer.json")
"""What there is to know of a model before its weights are fetched."""
IGNORED_PATTERNS = ("*/*.safetensors", "consolidated*")
"""Weights of subfolders, and Mistral's second copy under other names."""


def fetch_hub_model(repo_id: str, config_only: bool = False) -> Path:
    """The local snapshot of ``org/name``: a complete one in the Hub's cache, else a download; with
    ``config_only`` one that need not hold weights.

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
    download = partial(
        snapshot_download,
        repo_id,
        allow_patterns=list(CONFIG_PATTERNS if config_only else FILE_PATTERNS),
        ignore_patterns=list(IGNORED_PATTERNS),
    )
    try:
        folder = Path(download(local_files_only=True))
        if (folder / "config.json").is_file() if config_only else is_complete(folder):
            return folder
    except HFValidationError:
        raise ModelNotFoundError(f"{repo_id!r} is no valid hub id") from None
    except LocalEntryNotFoundError:
        pass  # Not in the Hub's cache: download it.
    try:
        return Path(download())
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
    """Does the folder hold a configuration, a tokenizer and every safetensors shard, undamaged?"""
    from mini_infer.modeling.safetensors_source import SafetensorsSource

    if not has_config_and_tokenizer(folder):
        return False
    try:
        SafetensorsSource(folder)
    except WeightsError:
        return False
    return True


def has_config_and_tokenizer(folder: Path) -> bool:
    """Are both files there, and not empty, as a loss of power may leave them?"""
    files = [folder / name for name in ("config.json", "tokenizer.json")]
    return all(file.is_file() and file.stat().st_size > 0 for file in files)
