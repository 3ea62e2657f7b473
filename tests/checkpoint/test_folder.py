"""What a model folder gives, and each way to be told that it isn't one."""

import json
import re
import sys
from pathlib import Path

import pytest

from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.errors import CheckpointError, UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").touch()
    return model


def test_folder_with_everything(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    model = open_model_folder(str(folder))
    assert (model.path, model.name) == (folder, "model")
    assert open_model_folder(folder, name="org/model").name == "org/model"
    assert model.config == {"model_type": "llama"}
    assert model.generation_config == {"eos_token_id": [1, 2]}


def test_folder_with_the_least(folder: Path) -> None:
    model = open_model_folder(folder)
    assert model.generation_config == {}


@pytest.mark.parametrize(
    ("tokenizer", "count"),
    [
        ({"model": {"vocab": {"a": 0, "b": 4}}}, 5),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7, "content": "x"}]}, 8),
        ({"model": {"vocab": [["a", -1.5], ["b", -2.0]]}, "added_tokens": [{"id": 1, "content": "b"}]}, 2),
    ],
)
def test_the_tokenizer_says_how_many_ids_there_are(folder: Path, tokenizer: dict[str, object], count: int) -> None:
    assert open_model_folder(folder).num_token_ids is None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_model_folder(folder).num_token_ids == count


@pytest.mark.parametrize("text", ["{", '{"model": {}}', '{"model": 5}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_tokenizer_without_a_vocabulary_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        open_model_folder(folder)


def test_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such folder$"):
        open_model_folder(tmp_path / "nothing")


def test_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json: is a file; --model takes a folder"):
        open_model_folder(folder / "config.json")


def test_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert open_model_folder("~/model").path == folder


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=f"{re.escape(str(folder))}: no config.json"):
        open_model_folder(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"no \.safetensors file"):
        open_model_folder(folder)
    assert open_model_folder(folder, weights=False).config == {"model_type": "llama"}
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match=r"pytorch_model\.bin: pickled weights are never loaded"):
        open_model_folder(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "[1]", '{"a": ', "\ud800"])
def test_corrupt_json(name: str, text: str, folder: Path) -> None:
    (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        open_model_folder(folder)


def test_code_of_the_folder_is_not_run(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text("raise SystemExit('was run')")
    (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "modeling_evil.Evil"}, "model_type": "evil"}')
    before = set(sys.modules)
    assert open_model_folder(folder).config["model_type"] == "evil"
    assert not any("modeling_evil" in name for name in set(sys.modules) - before)
