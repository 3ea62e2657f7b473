import shutil
from pathlib import Path

import pytest

from dist_infer.errors import UsageError
from dist_infer.intake.fingerprint import digest_file, digest_model, digest_texts


def make_model(folder: Path, *, num_bytes: int = 5_000_000) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(num_bytes))
    (folder / "README.md").write_text("about")
    return folder


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 40_000_000)
    (tmp_path / "b").write_bytes(b"x" * 39_999_999 + b"y")
    calls: list[None] = []
    assert digest_file(tmp_path / "a", on_progress=lambda: calls.append(None)) != digest_file(tmp_path / "b")
    assert len(calls) == 3
    with pytest.raises(UsageError, match="missing"):
        digest_file(tmp_path / "missing")


def test_texts_and_their_borders() -> None:
    assert len({digest_texts(texts) for texts in (["ab"], ["a", "b"], ["ab", ""], [], ["\ud800"])}) == 5


def test_a_model_is_known_wherever_it_lies(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a")
    shutil.copytree(model, tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("other")
    assert digest_model(model) == digest_model(tmp_path / "b")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_a_small_file_counts(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "a")
    before = digest_model(model)
    (model / name).write_text('{"a": 1}')
    assert digest_model(model) != before


@pytest.mark.parametrize("at", [8, 10, 2_500_000, 5_000_009])
def test_weights_count(tmp_path: Path, at: int) -> None:
    model = make_model(tmp_path / "a")
    before, before_dummy = digest_model(model), digest_model(model, weights=False)
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(at)
        file.write(b"\x01" * (300_000 if at == 2_500_000 else 1))
    assert digest_model(model) != before
    assert digest_model(model, weights=False) == before_dummy


def test_size_and_name_of_weights_count(tmp_path: Path) -> None:
    digests = {digest_model(make_model(tmp_path / str(size), num_bytes=size)) for size in (0, 1, 100_000)}
    model = make_model(tmp_path / "renamed", num_bytes=1)
    (model / "model.safetensors").rename(model / "other.safetensors")
    assert len(digests | {digest_model(model)}) == 4
