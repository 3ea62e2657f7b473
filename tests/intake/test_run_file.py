import json
from pathlib import Path

import pytest

from dist_infer.errors import DistInferError, UsageError
from dist_infer.intake.run_file import Identity, RunFile, write_run_file

IDENTITY: Identity = {"input": "abc", "seed": 2**62 + 1, "shard": None, "dtype": "float64"}


def written(folder: Path) -> RunFile:
    write_run_file(folder / "out.jsonl", IDENTITY, {"hosts": ["a", "b"]})
    run = RunFile.read(folder / "out.jsonl")
    assert run is not None
    return run


def test_what_is_written_is_read(tmp_path: Path) -> None:
    run = written(tmp_path)
    assert run.identity == IDENTITY
    run.check(IDENTITY)
    fields = json.loads((tmp_path / "out.jsonl.run.json").read_text())
    assert fields == {"schema": 1, "identity": IDENTITY, "hosts": ["a", "b"]}


def test_a_run_without_an_end_is_known(tmp_path: Path) -> None:
    assert not written(tmp_path).has_ended
    write_run_file(tmp_path / "out.jsonl", IDENTITY, {"ended": {"exit_code": 75}})
    run = RunFile.read(tmp_path / "out.jsonl")
    assert run is not None and run.has_ended


def test_there_may_be_none(tmp_path: Path) -> None:
    assert RunFile.read(tmp_path / "out") is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input", "xyz", r"input is xyz, in out\.jsonl\.run\.json it is abc; give the input of that run"),
        ("seed", 5, rf"seed is 5.*{2**62 + 1}; leave --seed out, or give --seed {2**62 + 1}"),
        ("shard", "2/3", "shard is 2/3, .* it is none"),
        ("dtype", "float32", "give --dtype float64, or start anew with --overwrite"),
        ("brand_new", 1, "brand_new is 1"),
    ],
)
def test_a_field_that_differs_is_named(tmp_path: Path, name: str, value: str | int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        written(tmp_path).check({**IDENTITY, name: value})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1, "identity": 5}'])
def test_another_file_of_that_name_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "out.run.json").write_text(text)
    with pytest.raises(UsageError, match=r"out\.run\.json does not describe a run"):
        RunFile.read(tmp_path / "out")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.run.json").write_text('{"schema": 2, "identity": {}}')
    with pytest.raises(UsageError, match="schema 2, this version reads 1"):
        RunFile.read(tmp_path / "out")


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(DistInferError, match=r"can't write .*out\.run\.json"):
        write_run_file(tmp_path / "no" / "out", {}, {})
