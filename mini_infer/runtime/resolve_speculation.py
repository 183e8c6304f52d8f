"""From what a user says about speculative decoding to a ``SpeculativeConfig``.

Spellings of vLLM's that mean the same are understood: ``eagle`` and ``mtp`` for a ``head``, and a
configuration of a model alone, which is that of a draft model.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_infer.core.errors import InvalidConfigError, UnsupportedModelError
from mini_infer.core.json_file import read_json_object
from mini_infer.core.model_config import ModelConfig
from mini_infer.core.speculative_config import BUILT_IN_METHODS, SpeculativeConfig

KINDS: dict[str, type] = {
    "method": str,
    "num_speculative_tokens": int,
    "adaptive": bool,
    "model": str,
    "num_layers": int,
    "prompt_lookup_min": int,
    "prompt_lookup_max": int,
}
"""What a user may say. The rest of a ``SpeculativeConfig`` follows from it."""
KEYS_OF_METHODS: dict[str, tuple[str, ...]] = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("model",),
    "early_exit": ("num_layers",),
    "head": ("model",),
}
"""Keys that not every built-in method has. A user's own class may read all of them."""
OTHER_SPELLINGS = {"eagle": "head", "mtp": "head"}
NGRAM_MODELS = ("ngram", "[ngram]")
"""What older configurations of vLLM's have as ``model`` where they mean the method."""
DRAFT_SHARE = 3
"""``early_exit`` drafts with one in so many of the target's layers."""
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


def parse_speculation(value: Any) -> dict[str, Any] | None:
    """Names and kinds of a JSON text, a mapping or a ``SpeculativeConfig``, in our spelling and
    with its method; None for None.

    Raises:
        InvalidConfigError: an unknown key or method, a value of the wrong kind, or a key that the
            method does not have.
    """
    if value is None:
        return None
    if isinstance(value, SpeculativeConfig):
        value = str(value)
    if isinstance(value, str):
        value = _read_json(value)
    if not isinstance(value, Mapping):
        raise InvalidConfigError(
            f"speculative_config must be a JSON object such as {EXAMPLE}, got {value!r:.80}"
        )
    said = {key: _checked(key, item) for key, item in value.items() if item is not None}
    said["method"] = method = _method(said)
    if method == "ngram" and said.get("model") in NGRAM_MODELS:
        del said["model"]
    for key in said:
        owners = [owner for owner, keys in KEYS_OF_METHODS.items() if key in keys]
        if owners and method in BUILT_IN_METHODS and method not in owners:
            raise InvalidConfigError(
                f"speculative_config: {key} is of {' and '.join(owners)}, not of {method}"
            )
    return said


def resolve_speculation(
    said: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    model_config: ModelConfig,
    folder: Path | None = None,
) -> SpeculativeConfig | None:
    """Decides what ``parse_speculation`` left open.

    Args:
        said: what ``parse_speculation`` returned.
        given: the engine's other options, their lengths resolved.
        model_config: the target's.
        folder: where the target's tokenizer is, if it has one.

    Raises:
        InvalidConfigError: a value out of range, a draft model that does not fit its target, or a
            proposer that the engine can't run.
        ModelNotFoundError, UnsupportedModelError: the draft model can't be used.
    """
    if said is None:
        return None
    values = dict(said)
    method = values["method"]
    values["on_device"] = _runs_on_device(method)
    if given["dry_run"] and values["on_device"]:
        raise InvalidConfigError(
            f"speculative_config: {method} needs a model's weights, and a dry run has none; "
            f"there ngram speculates, or a class of yours on the host"
        )
    if method in ("draft_model", "head") and "model" not in values:
        raise InvalidConfigError(
            f"speculative_config: {method} needs a model: the weights that draft"
        )
    if method == "ngram":
        values |= _lookup_lengths(values)
    elif method == "early_exit":
        values["num_layers"] = _exit_layer(values.get("num_layers"), model_config.num_layers)
    elif method == "draft_model":
        values["model_config"] = _draft_config(values["model"], given, model_config, folder)
    return SpeculativeConfig(**values)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfigError(
            f"speculative_config is not valid JSON ({error}): it must be like {EXAMPLE}"
        ) from None


def _checked(key: Any, value: Any) -> Any:
    if key not in KINDS:
        near = difflib.get_close_matches(str(key), KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KINDS)}"
        raise InvalidConfigError(f"speculative_config has no key {key!r:.80}: {hint}")
    kind = KINDS[key]
    if kind is str and isinstance(value, Path):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {str: "a string", int: "an integer", bool: "true or false"}
        raise InvalidConfigError(
            f"speculative_config: {key} must be {names[kind]}, got {value!r:.80}"
        )
    return value


def _method(said: Mapping[str, Any]) -> str:
    """The method that was said or meant, in our spelling."""
    if "method" not in said and "model" in said:
        return "ngram" if said["model"] in NGRAM_MODELS else "draft_model"
    known = f"{', '.join(BUILT_IN_METHODS)}, or your own as module:Class"
    if "method" not in said:
        raise InvalidConfigError(f"speculative_config needs a method: {known}")
    method: str = OTHER_SPELLINGS.get(said["method"], said["method"])
    if method in BUILT_IN_METHODS or ":" in method:
        return method
    near = difflib.get_close_matches(method, BUILT_IN_METHODS, n=1)
    hint = f"did you mean {near[0]!r}? There are" if near else "there are"
    raise InvalidConfigError(f"speculative_config has no method {method!r:.80}: {hint} {known}")


def _runs_on_device(method: str) -> bool:
    if method in BUILT_IN_METHODS:
        return method != "ngram"
    from mini_infer.runtime.speculation.load import load_proposer_class

    return bool(getattr(load_proposer_class(method), "on_device", False))


def _lookup_lengths(values: Mapping[str, Any]) -> dict[str, int]:
    """One length that is given moves the other's default along."""
    least, most = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if least is None:
        least = min(
            SpeculativeConfig.prompt_lookup_min, most or SpeculativeConfig.prompt_lookup_min
        )
    if most is None:
        most = max(SpeculativeConfig.prompt_lookup_max, least)
    return {"prompt_lookup_min": least, "prompt_lookup_max": most}


def _exit_layer(asked: int | None, num_layers: int) -> int:
    if num_layers == 1:
        raise InvalidConfigError(
            "speculative_config: early_exit needs a model of two layers or more, this has one"
        )
    if asked is None:
        return max(1, num_layers // DRAFT_SHARE)
    if asked >= num_layers:
        raise InvalidConfigError(
            f"speculative_config: num_layers ({asked}) must be below the model's own "
            f"({num_layers}): the draft leaves it early"
        )
    return asked


def _draft_config(
    model: str, given: Mapping[str, Any], target: ModelConfig, folder: Path | None
) -> ModelConfig:
    """The draft model's configuration, once it is clear that it can draft for the target."""
    from mini_infer.modeling.model_files import load_model_config, locate_model

    files = locate_model(model)
    draft = load_model_config(files)
    _check_vocabulary(model, files.folder, draft, folder, target)
    if draft.max_context < given["max_model_len"]:
        raise InvalidConfigError(
            f"speculative_config: the draft model {model} has a context of {draft.max_context} "
            f"tokens, max_model_len is {given['max_model_len']}: lower max_model_len, or use "
            f"another draft model"
        )
    return draft


def _check_vocabulary(
    model: str, folder: Path, draft: ModelConfig, target_folder: Path | None, target: ModelConfig
) -> None:
    """A draft model that spells otherwise would be right by chance only.

    Where both have a tokenizer, sizes may differ: models of one tokenizer pad their tables
    differently (Qwen 2.5 of 0.5 and of 7 billion parameters do). Neither matter added tokens, which
    fine-tuning renames: no text needs them.
    """
    pieces, added = _pieces(folder)
    wanted, added_there = _pieces(target_folder)
    if not pieces or not wanted:
        if draft.vocab_size != target.vocab_size:
            raise InvalidConfigError(
                f"speculative_config: the draft model {model} has {draft.vocab_size} tokens, the "
                f"target {target.vocab_size}: use a draft model of the target's vocabulary"
            )
        return
    learnt = (pieces.keys() | wanted.keys()) - added - added_there
    differing = [token_id for token_id in learnt if pieces.get(token_id) != wanted.get(token_id)]
    if differing:
        first = min(differing)
        raise InvalidConfigError(
            f"speculative_config: the draft model {model} has another vocabulary than the target: "
            f"{len(differing)} tokens differ, the first of them is {first}, "
            f"{_shown(pieces.get(first))} in the draft's tokenizer.json and "
            f"{_shown(wanted.get(first))} in the target's; use a draft model of the same tokenizer"
        )


def _pieces(folder: Path | None) -> tuple[dict[int, str], set[int]]:
    """Id to piece of what a tokenizer knows, and which ids were added to what it learnt; nothing
    where there is no ``tokenizer.json``."""
    if folder is None or not (path := folder / "tokenizer.json").is_file():
        return {}, set()
    content = read_json_object(path)
    try:
        vocabulary = content["model"]["vocab"]
        # A unigram model has a list of pieces with their scores, the others a map.
        if isinstance(vocabulary, list):
            pieces = {token_id: str(piece) for token_id, (piece, _) in enumerate(vocabulary)}
        else:
            pieces = {int(token_id): piece for piece, token_id in vocabulary.items()}
        return pieces, {int(token["id"]) for token in content.get("added_tokens") or ()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{path} has no vocabulary that can be compared: {error!r}"
        ) from None


def _shown(piece: str | None) -> str:
    return "none" if piece is None else repr(piece)
