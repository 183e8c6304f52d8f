"""Where a model's files are: folder, ``.gguf`` file, built-in alias or hub id.

Nothing here imports torch: the dry run looks at configurations too.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from mini_infer.core.errors import ModelNotFoundError, UnsupportedModelError
from mini_infer.core.json_file import read_json_object
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.hub import fetch_hub_model
from mini_infer.modeling.model_cache import CACHE_FORMAT, cache_folder
from mini_infer.modeling.packaged import ALIASES, pull_alias
from mini_infer.modeling.registry import check_supported

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine."""

    folder: Path
    """Holds config.json and the tokenizer files."""
    weights: Path
    """The same folder, for safetensors; or the ``.gguf`` file."""


def locate_model(model: str, config_only: bool = False) -> ModelFiles:
    """Finds a model, fetching an alias or a hub id the first time; with ``config_only`` no weights
    are fetched, and so no alias.

    A path that exists wins over an alias or a hub id of the same name. For a ``.gguf`` file a
    folder with configuration and tokenizer is written to the cache; its weights stay where they
    are.

    Raises:
        ModelNotFoundError: no such path, alias or hub id, no network, or a folder without
            config.json.
        UnsupportedModelError: a file that is not a GGUF, or a GGUF that is not supported.
        WeightsError: a damaged GGUF or download.
        InvalidConfigError: the cache folder can't be written.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _hugging_face_folder(path)
    if path.is_file():
        return _gguf_file(path)
    if model in ALIASES:
        folder = cache_folder() / CACHE_FORMAT / model if config_only else pull_alias(model)
        if not folder.exists():
            raise ModelNotFoundError(f"{model} is not here yet: mini-infer pull {model} fetches it")
    elif HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        folder = fetch_hub_model(model, config_only)
    else:
        raise ModelNotFoundError(
            f"no model {model!r}: give a folder in Hugging Face format, a .gguf file, a hub id "
            f"(org/name), or one of the aliases: {', '.join(ALIASES)}"
        )
    return _hugging_face_folder(folder)


def load_model_config(files: ModelFiles) -> ModelConfig:
    """The architecture's shape, from ``config.json`` and ``generation_config.json``.

    Raises:
        UnsupportedModelError: a file that is no JSON object, or asks for what isn't implemented.
    """
    generation_config = files.folder / "generation_config.json"
    config = read_json_object(files.folder / "config.json")
    architectures = config.get("architectures")
    # First, or an unknown architecture would be told which fields it lacks.
    for architecture in architectures if isinstance(architectures, list) else ():
        check_supported(str(architecture))
    return ModelConfig.from_dict(
        config,
        read_json_object(generation_config) if generation_config.exists() else None,
    )


def gguf_cache_folder(gguf: Path, kind: str) -> Path:
    """Where what was made from this file is kept; a file that changed gets another place."""
    state = gguf.stat()
    identity = f"{gguf.resolve()}|{state.st_size}|{state.st_mtime_ns}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    return cache_folder() / CACHE_FORMAT / kind / f"{gguf.stem}-{digest}"


def _hugging_face_folder(folder: Path) -> ModelFiles:
    if not (folder / "config.json").is_file():
        inside = sorted(folder.glob("*.gguf"))
        hint = f"; to use {inside[0].name}, give that file itself" if inside else ""
        raise ModelNotFoundError(
            f"{folder} has no config.json, so it is not a model in Hugging Face format{hint}"
        )
    return ModelFiles(folder, folder)


def _gguf_file(path: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise UnsupportedModelError(
            f"{path} is neither a .gguf file nor a folder in Hugging Face format (for safetensors "
            "give their folder; pickle checkpoints are not opened)"
        )
    from mini_infer.modeling.gguf_convert import write_config_folder

    folder = write_config_folder(path, gguf_cache_folder(path, "gguf"))
    return ModelFiles(folder, path)
