"""Whether a folder is a whole model in Hugging Face format, told from its files alone, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("spiece.model",))
_HEADER = 8


def check_folder(folder: Path) -> None:
    """Raise UserError(MODEL_INVALID) unless config, weights, tokenizer and chat template are there and whole."""
    if not folder.is_dir():
        raise invalid(
            "the model's folder does not exist" if not folder.exists() else "the model is a file, not a folder",
            folder,
            remedy="Give a folder in Hugging Face format (for a .gguf file, use gguf instead of path).",
        )
    if "model_type" not in _read_json(folder / "config.json"):
        raise invalid("config.json names no model_type", folder / "config.json", remedy="Export the model again.")
    _check_weights(folder)
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        raise invalid(
            "the model has no tokenizer", folder, remedy="Save the tokenizer there too: tokenizer.save_pretrained(...)."
        )
    if not _has_chat_template(folder):
        raise invalid(
            "the tokenizer has no chat template, so no prompt can be built",
            folder,
            remedy="Put a chat_template.jinja there, for example that of the model's instruct version.",
        )


def invalid(what: str, where: Path, *, value: Any = None, remedy: str) -> UserError:
    return UserError(ErrorCode.MODEL_INVALID, what, where=str(where), value=value, remedy=remedy)


def _check_weights(folder: Path) -> None:
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            _check_shards(folder, index)
            return
        if (folder / name).is_file():
            _check_file(folder / name)
            return
    raise invalid(
        "the model has no weights",
        folder,
        value=sorted(entry.name for entry in folder.iterdir())[:10],
        remedy=f"One of {', '.join(_WEIGHTS)}, or an index with its shards, must be there.",
    )


def _check_shards(folder: Path, index: Path) -> None:
    weights = _read_json(index).get("weight_map")
    if not isinstance(weights, Mapping) or not weights:
        raise invalid("the index names no weights", index, remedy="Export the model again.")
    shards = sorted({str(name) for name in weights.values()})
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise invalid(
            f"{len(missing)} of {len(shards)} files of weights are missing",
            index,
            value=missing,
            remedy="Copy the folder again, whole.",
        )
    for name in shards:
        _check_file(folder / name)


def _check_file(file: Path) -> None:
    size = file.stat().st_size
    if size == 0:
        raise invalid("the file of weights is empty", file, remedy="Copy it again.")
    if file.suffix != ".safetensors":
        return
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER), "little")
            if not 2 <= length <= size - _HEADER:
                raise ValueError("its header is cut off")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise invalid(f"the file is not safetensors: {error}", file, remedy="Copy it again.") from error
    expected = _HEADER + length + max(ends, default=0)
    if size != expected:
        raise invalid(
            f"the file of weights has {size} bytes where its header asks for {expected}",
            file,
            remedy="It was cut off: copy it again.",
        )


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(_read_json(config).get("chat_template"))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise invalid(
            f"the model has no {file.name}", file.parent, remedy="Give a folder in Hugging Face format."
        ) from error
    except ValueError as error:
        raise invalid(f"the file is not JSON: {error}", file, remedy="Copy it again.") from error
    if not isinstance(content, dict):
        raise invalid("the file holds no JSON object", file, remedy="Copy it again.")
    return content
