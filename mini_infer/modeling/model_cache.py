"""The user's cache folder, and folders in it that exist only when they are complete."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from mini_infer.core.errors import InvalidConfigError

CACHE_FORMAT = "v1"
"""Part of each path: raise it when what a conversion writes changes."""


def cache_folder() -> Path:
    """``$MINI_INFER_CACHE``, else ``$XDG_CACHE_HOME/mini-infer``, else ``~/.cache/mini-infer``."""
    if own := os.environ.get("MINI_INFER_CACHE"):
        return Path(own).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "mini-infer"
    return Path.home() / ".cache" / "mini-infer"


def write_folder_atomically(folder: Path, write: Callable[[Path], None]) -> Path:
    """Lets ``write`` fill a temporary folder beside ``folder``, then renames it into place.

    A run that is killed leaves no ``folder``. Of two that run at once the first to finish wins,
    and the other's copy is dropped. An existing ``folder`` is returned as it is.

    Raises:
        InvalidConfigError: the place can't be written, or the disk is full.
    """
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            write(temporary)
            temporary.chmod(0o755)
            _rename_unless_taken(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise InvalidConfigError(
            f"can't write {folder}: {error.strerror or error}; make room there, or name another "
            "folder in the environment variable MINI_INFER_CACHE"
        ) from None
    return folder


def _rename_unless_taken(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
