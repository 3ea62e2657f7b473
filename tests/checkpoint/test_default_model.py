"""One conversion whoever asks, however the one before ended, and nothing from folders of others."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from dist_infer.checkpoint import default_model as module
from dist_infer.checkpoint import gguf
from dist_infer.checkpoint.default_model import INSTALL_LINE, converted_model_path, default_model_path
from dist_infer.checkpoint.gguf import partial_prefix
from dist_infer.checkpoint.safetensors import SafetensorsSource, write_safetensors
from dist_infer.errors import CheckpointError, PeerFailedError, UsageError
from tests.checkpoint.tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).parents[2]
CONVERT = """
import sys, time
from pathlib import Path
from dist_infer.checkpoint import gguf
from dist_infer.checkpoint.default_model import converted_model_path

convert_gguf = gguf.convert_gguf

def announced(*args, **kwargs):
    print("convert", flush=True)
    convert_gguf(*args, **kwargs)

def on_wait():
    print("wait", flush=True)
    while len(sys.argv) > 3 and not Path(sys.argv[3]).exists():
        time.sleep(0.01)

gguf.convert_gguf = announced
print(converted_model_path(Path(sys.argv[1]), Path(sys.argv[2]), on_wait=on_wait), flush=True)
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def start(tiny: Path, cache: Path, gate: Path | None = None) -> "subprocess.Popen[str]":
    """It stops after its first tensor until the gate is there."""
    command = [sys.executable, "-c", CONVERT, str(tiny), str(cache), *([str(gate)] if gate else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def partial(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if ".partial-" in path.name]


def test_model_is_converted_once(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    folder = converted_model_path(tiny, cache)
    assert folder.parent == cache and len(SafetensorsSource(folder).names()) > 0
    monkeypatch.setattr(gguf, "convert_gguf", None)  # calling it would be an error
    assert converted_model_path(tiny, cache) == folder


def test_key_is_the_content_and_the_version(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = converted_model_path(tiny, tmp_path / "cache")
    monkeypatch.setattr(module, "CONVERTER_VERSION", 99)
    second = converted_model_path(tiny, tmp_path / "cache")
    write_tiny_gguf(tiny, tied=False)
    third = converted_model_path(tiny, tmp_path / "cache")
    assert len({first, second, third}) == 3


def test_two_processes_convert_once(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = start(tiny, cache, tmp_path / "gate")
    assert first.stdout is not None and first.stdout.readline() == "convert\n"
    assert first.stdout.readline() == "wait\n"  # a tensor is converted
    (folder,) = partial(cache)
    second = start(tiny, cache)
    assert second.stdout is not None and second.stdout.readline() == "wait\n"  # it waits for the lock
    assert partial(cache) == [folder]
    (tmp_path / "gate").touch()
    lines = [process.communicate(timeout=60)[0].splitlines() for process in (first, second)]
    answers = [printed[-1] for printed in lines]
    assert "convert" not in lines[1]
    assert first.returncode == second.returncode == 0
    assert answers[0] == answers[1]
    assert len(list(Path(answers[0]).glob("*.safetensors"))) == 1
    assert partial(cache) == []


def test_conversion_goes_on_after_a_killed_one(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    killed = start(tiny, cache, tmp_path / "never")
    assert killed.stdout is not None and killed.stdout.readline() == "convert\n"
    assert killed.stdout.readline() == "wait\n"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(partial(cache)) == 1
    folder = converted_model_path(tiny, cache)
    assert partial(cache) == []
    assert len(SafetensorsSource(folder).names()) > 0


def test_partial_folder_of_another_model_is_left_alone(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    other = cache / f"{partial_prefix(cache / 'other-0123-v1')}x"
    other.mkdir()
    converted_model_path(tiny, cache)
    assert other.is_dir()


def test_waiting_can_be_ended(tiny: Path, tmp_path: Path) -> None:
    def give_up() -> None:
        raise PeerFailedError

    with pytest.raises(PeerFailedError):
        converted_model_path(tiny, tmp_path / "cache", on_wait=give_up)
    assert partial(tmp_path / "cache") == []


def test_cache_that_others_can_enter_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = converted_model_path(tiny, tmp_path / "cache")
    folder.parent.chmod(0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        converted_model_path(tiny, tmp_path / "cache")


def test_full_disk_is_one_message(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "write_safetensors", full)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf can't be converted into .*cache: .*No space left"):
        converted_model_path(tiny, tmp_path / "cache")
    assert partial(tmp_path / "cache") == []


def test_folder_that_another_host_made_meanwhile(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network file system it may show up only when ours is renamed onto it."""

    def late(path: Path, *args: Any) -> None:
        write_safetensors(path, *args)
        target = path.parent.parent / path.parent.name.removeprefix(".").split(".partial-")[0]
        shutil.copytree(path.parent, target)

    monkeypatch.setattr(gguf, "write_safetensors", late)
    folder = converted_model_path(tiny, tmp_path / "cache")
    assert len(SafetensorsSource(folder).names()) > 0 and partial(tmp_path / "cache") == []


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.gguf: can't be read: No such file"):
        converted_model_path(tmp_path / "none.gguf", tmp_path / "cache")


def test_absent_package_gives_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGE", "llm_that_is_not_there")
    with pytest.raises(UsageError, match=f"isn't installed; run: {INSTALL_LINE} "):
        default_model_path(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("num_files", [0, 2])
def test_package_without_one_model(num_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_other").mkdir()
    for i in range(num_files):
        (tmp_path / "llm_other" / f"{i}.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "PACKAGE", "llm_other")
    with pytest.raises(UsageError, match=f"has {num_files} .gguf files instead of one; run: {INSTALL_LINE} "):
        default_model_path(tmp_path / "cache")


def test_package_is_found_without_importing_it(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_tiny").mkdir()
    (tmp_path / "llm_tiny" / "__init__.py").write_text("raise SystemExit('was imported')")
    tiny.rename(tmp_path / "llm_tiny" / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "PACKAGE", "llm_tiny")
    assert default_model_path(tmp_path / "cache").name.startswith("tiny-")


def test_installed_package_holds_the_model(default_model: tuple[Path, int]) -> None:
    folder, waits = default_model
    source = SafetensorsSource(folder)
    assert waits == len(source.names()) == 272
    assert source.shape("model.embed_tokens.weight") == (49152, 576)
