"""A draft head's folder: ``model.safetensors`` and a ``config.json`` that says for which target."""

import json
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mini_infer.core.errors import InvalidConfigError, ModelNotFoundError, WeightsError
from mini_infer.core.json_file import read_json_object
from mini_infer.core.model_config import ModelConfig
from mini_infer.modeling.causal_lm import CausalLM
from mini_infer.modeling.layers import Layer
from mini_infer.modeling.proposers.head import DraftHead
from mini_infer.modeling.safetensors_source import SINGLE_FILE, SafetensorsSource
from mini_infer.modeling.sharded_source import ShardedSource
from mini_infer.modeling.sharding import add_up_products, shard_of
from mini_infer.modeling.weights import WeightSource, checkpoint_places, empty_model

CONFIG_FILE = "config.json"
NEW = ".new-"
"""How a folder within a head's is called where the next one is written."""
KIND = "MiniInferDraftHead"
TARGET_FIELDS = (
    "architecture",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
TOKEN_IDS, FINGERPRINT = "token_ids", "target_fingerprint"
FINGERPRINT_ROWS, FINGERPRINT_COLUMNS = 32, 16
FINGERPRINT_TOLERANCE = 0.02
"""A target is recognised in any dtype: bfloat16 has an error of 0.4 %."""
TRAIN_ONE = "train one for this model with 'mini-infer train-draft'"


def fingerprint(model: CausalLM) -> Tensor:
    """A sample of the target's embeddings, in float32: of a shape that the model's gives."""
    device, last = model.embed_tokens.weight.device, model.config.vocab_size - 1
    rows = torch.linspace(0, last, FINGERPRINT_ROWS, device=device).long()
    embedded: Tensor = model.embed_tokens(rows)
    return embedded[:, :FINGERPRINT_COLUMNS].float().cpu().contiguous()


def save_draft_head(folder: Path, head: DraftHead, model: CausalLM, dtype: torch.dtype) -> None:
    """Writes a head for ``model`` in ``dtype``; the folder is made if it is not there.

    A head that is there is replaced once the new one is written whole.

    Raises:
        OSError: the folder can't be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{NEW}*"):  # by one that was killed
        rmtree(left)
    tensors = {
        name: value.to("cpu", dtype).contiguous() for name, value in checkpoint_places(head).items()
    }
    tensors |= {TOKEN_IDS: head.token_ids.cpu(), FINGERPRINT: fingerprint(model)}
    config = {
        "architectures": [KIND],
        "num_hidden_layers": len(head.layers),
        "num_draft_tokens": len(head.token_ids),
        "parallel_drafting": head.later is not None,
        "target": {name: getattr(model.config, name) for name in TARGET_FIELDS},
    }
    with TemporaryDirectory(dir=folder, prefix=NEW) as name:
        new = Path(name)
        try:
            save_file(tensors, new / SINGLE_FILE)
        except SafetensorError as error:  # the system's, such as a full disk
            raise OSError(f"{folder / SINGLE_FILE}: {error}") from error
        (new / SINGLE_FILE).chmod(0o644)  # safetensors keeps it from all but its owner
        (new / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in (SINGLE_FILE, CONFIG_FILE):
            (new / file).replace(folder / file)


def load_draft_head(folder: Path, model: CausalLM, dtype: torch.dtype) -> DraftHead:
    """The head that was trained for ``model``, on its device and ready for inference.

    Raises:
        ModelNotFoundError: no such folder, or it has no ``config.json``.
        InvalidConfigError: it holds something else, or the head of another target.
        WeightsError: a file is damaged.
        UnsupportedModelError: so is ``config.json``.
    """
    shape = _check_config(folder, model.whole_config)
    with torch.device(model.embed_tokens.weight.device):
        head = shape.build(model).to(dtype)
    source: WeightSource = SafetensorsSource(folder)
    if model.group.size > 1:  # it attends to this rank's keys only, as the target's layers do
        source = ShardedSource(source, shard_of(model).cut)
        add_up_products(head, model.group)
    places = checkpoint_places(head)
    places |= {TOKEN_IDS: head.token_ids, FINGERPRINT: torch.empty_like(fingerprint(model))}
    expected = {name: tuple(place.shape) for name, place in places.items()}
    found = {name: tuple(source.shape(name)) for name in source.names()}
    if found != expected:
        wrong = sorted({name for name, _ in found.items() ^ expected.items()})
        raise WeightsError(
            f"{folder / SINGLE_FILE} does not fit its {CONFIG_FILE} ({', '.join(wrong)}): "
            f"{TRAIN_ONE}"
        )
    for name, place in places.items():
        place.copy_(source.get(name))
        _check_finite(name, place, folder)
    ours = fingerprint(model)
    if not torch.allclose(places[FINGERPRINT], ours, rtol=FINGERPRINT_TOLERANCE, atol=1e-3):
        raise InvalidConfigError(
            f"the draft head in {folder} was trained for another model of the same shape: its "
            f"embeddings differ; {TRAIN_ONE}"
        )
    _check_token_ids(head.token_ids, model.whole_config.vocab_size, folder)
    for module in reversed(list(head.modules())):
        if isinstance(module, Layer):
            module.finish_loading()
    if head.later is not None:
        head.later.prepare(model.embed_tokens(head.token_ids))
    return head.eval()


def head_bytes(folder: Path, target: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights of the whole head in ``folder``, from its ``config.json`` alone.

    Raises:
        ModelNotFoundError, InvalidConfigError, WeightsError, UnsupportedModelError: see
            ``load_draft_head``.
    """
    shape = _check_config(folder, target)
    model = empty_model(target, dtype, "meta", max_model_len=1)
    with torch.device("meta"):
        head = shape.build(model).to(dtype)
    size = sum(place.nbytes for place in checkpoint_places(head).values()) + head.token_ids.nbytes
    return size if head.later is None else size + head.lm_head.weight.nbytes  # ``by_draft``


class _HeadShape(NamedTuple):
    num_layers: int
    num_tokens: int
    parallel: bool

    def build(self, target: CausalLM) -> DraftHead:
        return DraftHead(target, self.num_tokens, self.num_layers, parallel=self.parallel)


def _check_config(folder: Path, target: ModelConfig) -> _HeadShape:
    """What the head in ``folder`` is like, once it is clear that it fits ``target``."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelNotFoundError(f"no draft head in {folder}: it has no {CONFIG_FILE}; {TRAIN_ONE}")
    config = read_json_object(path)
    if config.get("architectures") != [KIND]:
        raise InvalidConfigError(
            f"{folder} holds no draft head, but {config.get('architectures')}: {TRAIN_ONE}, or use "
            "a whole model as draft_model"
        )
    made_for: Any = config.get("target")
    made_for = made_for if isinstance(made_for, dict) else {}
    for name in TARGET_FIELDS:
        ours = getattr(target, name)
        if made_for.get(name) != ours:
            raise InvalidConfigError(
                f"the draft head in {folder} is for a target with {name} {made_for.get(name)}, "
                f"this one has {ours}: {TRAIN_ONE}"
            )
    limits = {"num_hidden_layers": target.num_layers, "num_draft_tokens": target.vocab_size}
    sizes = {name: config.get(name) for name in limits}
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size <= limits[name]:
            raise WeightsError(f"{path}: {name} must be from 1 to {limits[name]}: {TRAIN_ONE}")
    parallel = config.get("parallel_drafting", False)
    if not isinstance(parallel, bool):
        raise WeightsError(f"{path}: parallel_drafting must be true or false: {TRAIN_ONE}")
    return _HeadShape(config["num_hidden_layers"], config["num_draft_tokens"], parallel)


def _check_finite(name: str, place: Tensor, folder: Path) -> None:
    """A draft's keys and values stand in the target's cache, where whoever has the block next masks
    what it has not written: but a NaN times nothing is a NaN, and the answer another one."""
    if not bool(torch.isfinite(torch.stack(place.aminmax())).all()):
        raise WeightsError(
            f"{folder / SINGLE_FILE}: {name} has values that are no finite numbers in "
            f"{str(place.dtype).removeprefix('torch.')}: {TRAIN_ONE}"
        )


def _check_token_ids(token_ids: Tensor, vocab_size: int, folder: Path) -> None:
    """A device would not say that an id is out of range, but end."""
    rises = bool((token_ids[1:] > token_ids[:-1]).all())
    if not rises:
        raise WeightsError(f"{folder / SINGLE_FILE}: token_ids must ascend")
    if int(token_ids[0]) < 0 or int(token_ids[-1]) >= vocab_size:
        raise WeightsError(f"{folder / SINGLE_FILE}: token_ids are outside the vocabulary")
