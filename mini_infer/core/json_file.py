"""The JSON files that come with a model."""

import json
from pathlib import Path
from typing import Any

from mini_infer.core.errors import UnsupportedModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        UnsupportedModelError: the file can't be read or does not hold a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModelError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content
