"""The user's cache folder, and folders in it that exist only when they are complete."""

import errno
import glob
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mini_infer.core.errors import InvalidConfigError

CACHE_FORMAT = "v1"
"""Part of each path: raise it when what a conversion writes changes."""

ABANDONED_AFTER = 24 * 3600.0
"""Seconds."""


def cache_folder() -> Path:
    """``$MINI_INFER_CACHE``, else ``$XDG_CACHE_HOME/mini-infer``, else ``~/.cache/mini-infer``."""
    if own := os.environ.get("MINI_INFER_CACHE"):
        return Path(own).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "mini-infer"
    return Path.home() / ".cache" / "mini-infer"


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """A temporary folder in ``parent``, on whose file system renames are atomic; removed at exit.

    What killed runs of the same name left behind is removed once it is a day old.

    Raises:
        InvalidConfigError: ``parent`` can't be written, or the disk is full.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for abandoned in parent.glob(f".{glob.escape(name)}.*"):
            if time.time() - abandoned.stat().st_mtime > ABANDONED_AFTER:
                shutil.rmtree(abandoned, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise InvalidConfigError(
            f"can't write to {parent}: {error.strerror or error}; make room there, or name another "
            "folder in the environment variable MINI_INFER_CACHE"
        ) from None


def write_folder_atomically(
    folder: Path, write: Callable[[Path], None], is_complete: Callable[[Path], bool]
) -> Path:
    """Lets ``write`` fill a temporary folder beside ``folder``, then renames it into place.

    A run that is killed leaves no ``folder``. Of two that run at once the first to finish wins,
    and the other's copy is dropped. An existing ``folder`` is returned as it is, unless it is not
    complete (a machine lost power before the files reached its disk): then it is made again.

    Raises:
        InvalidConfigError: the place can't be written, or the disk is full.
    """
    if is_complete(folder):
        return folder
    with scratch_folder(folder.parent, folder.name) as scratch:
        write(scratch)
        scratch.chmod(0o755)
        for path in scratch.iterdir():
            path.chmod(0o644)
        _move_damaged(folder, scratch, is_complete)
        try:
            scratch.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    return folder


def _move_damaged(folder: Path, scratch: Path, is_complete: Callable[[Path], bool]) -> None:
    """Makes room for what was written; what a run beside this one finished stays."""
    if not folder.exists() or is_complete(folder):
        return
    print(f"{folder} is damaged: it was made again", file=sys.stderr)
    with scratch_folder(scratch.parent, "damaged") as grave, suppress(FileNotFoundError):
        folder.rename(grave / folder.name)
