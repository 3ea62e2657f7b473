import sys
from pathlib import Path

import pytest

from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.checkpoint.model_path import FoundModel, find_model
from dist_infer.errors import UsageError

hub_constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add_to_hub_cache(cache: Path, owner: str, name: str) -> Path:
    """As huggingface_hub lays it out: a ref names the snapshot, its files are links to blobs."""
    repo = cache / f"models--{owner}--{name}"
    snapshot = repo / "snapshots" / ("a" * 40)
    for folder in (snapshot, repo / "refs", repo / "blobs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    for number, (file, text) in enumerate((("config.json", '{"model_type": "llama"}'), ("model.safetensors", ""))):
        (repo / "blobs" / str(number)).write_text(text)
        (snapshot / file).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    assert find_model(str(folder), tmp_path) == FoundModel(folder, "model")
    monkeypatch.chdir(tmp_path)
    assert find_model("org/model", tmp_path) == FoundModel(Path("org/model"), "model")  # not the one of the Hub
    monkeypatch.chdir(folder)
    assert find_model(".", tmp_path).name == "model"


def test_a_hub_model_comes_from_the_local_cache(hub_cache: Path, tmp_path: Path) -> None:
    snapshot = add_to_hub_cache(hub_cache, "some-org", "model_1.5")
    found = find_model("some-org/model_1.5", tmp_path)
    assert found == FoundModel(snapshot, "some-org/model_1.5")
    assert open_model_folder(found.path).config == {"model_type": "llama"}


@pytest.mark.parametrize("name", ["some-org/model_1.5", "some-org/a..b", "-x/y"])
def test_a_hub_model_that_is_not_there_is_not_downloaded(hub_cache: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: .*not in the Hugging Face cache .*hub, .*hf download {name}"):
        find_model(name, tmp_path)


def test_anything_else_is_no_hub_model(tmp_path: Path) -> None:
    for name in ("nothing", "a/b/c", str(tmp_path / "nothing")):
        with pytest.raises(UsageError, match="there is no such folder$"):
            open_model_folder(find_model(name, tmp_path).path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UsageError, match="is a file; --model takes"):
        open_model_folder(find_model(str(tmp_path / "weights.bin"), tmp_path).path)


def test_a_gguf_file_is_converted_once(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.checkpoint.tiny_gguf import write_tiny_gguf

    write_tiny_gguf(tmp_path / "tiny.GGUF")
    waits: list[None] = []
    found = find_model(str(tmp_path / "tiny.GGUF"), tmp_path / "cache", on_wait=lambda: waits.append(None))
    assert found.name == "tiny" and waits
    assert open_model_folder(found.path).config["model_type"] == "llama"
    num_waits = len(waits)
    assert find_model(str(tmp_path / "tiny.GGUF"), tmp_path / "cache", on_wait=lambda: waits.append(None)) == found
    assert len(waits) == num_waits


def test_the_default_model_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install"):
        find_model(None, tmp_path)


def test_hub_code_is_not_loaded_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert find_model(str(tmp_path), tmp_path).path == tmp_path
