from pathlib import Path

import pytest

from dist_infer.errors import DistInferError, UsageError
from dist_infer.intake.records import Outcome, encode_record
from dist_infer.intake.resume import AnsweredLines, EarlierOutput, cut_output, read_output
from tests.intake.record_samples import answer, digest, failure, line_numbers, refusal


def write(path: Path, *outcomes: Outcome | bytes) -> None:
    path.write_bytes(b"".join(o if isinstance(o, bytes) else encode_record(o, model="m") for o in outcomes))


def read(path: Path, *outcomes: Outcome | bytes) -> EarlierOutput:
    write(path, *outcomes)
    return read_output(path, max_line=100)


def cut(path: Path, found: EarlierOutput) -> list[int]:
    """Lines of the records that a resumed run starts with."""
    keep_bytes = cut_output(path, found)
    with path.open("r+b") as file:
        file.truncate(keep_bytes)
    return line_numbers(path)


def test_answered_lines() -> None:
    lines = AnsweredLines()
    assert not lines.holds(7, digest("x"))
    assert lines.add(7, digest("x")) and lines.add(2, digest("y")) and not lines.add(7, digest("x"))
    assert lines.holds(7, digest("x")) and lines.holds(2, digest("y")) and not lines.holds(3, digest("y"))
    assert lines.num_lines == 2
    with pytest.raises(DistInferError, match="line 7 of the input is not the one that was answered"):
        lines.holds(7, digest("z"))


def test_a_digest_of_zeros_counts() -> None:
    lines = AnsweredLines()
    assert lines.add(1, "0" * 16)
    assert lines.holds(1, "0" * 16) and not lines.holds(2, "0" * 16)


@pytest.mark.parametrize("torn", [b"", b"{", b'{"id": "batch_req_3_', b"\0\0\0", b'{"id": 5}'])
def test_whole_records_are_kept_and_a_torn_end_is_not(tmp_path: Path, torn: bytes) -> None:
    found = read(tmp_path / "out", answer(4, of="d"), refusal(2, of="b"), torn)
    assert (found.num_kept, found.num_failed, found.num_dropped) == (2, 1, 0)
    assert found.answered.holds(4, digest("d")) and found.answered.holds(2, digest("b"))
    assert cut(tmp_path / "out", found) == [4, 2]


def test_requests_that_died_with_the_job_are_answered_again(tmp_path: Path) -> None:
    found = read(tmp_path / "out", answer(1), failure(2), failure(3))
    assert (found.num_kept, found.num_dropped, found.num_failed) == (1, 2, 0)
    assert not found.answered.holds(2, digest(""))
    assert found.dropped == []
    assert cut(tmp_path / "out", found) == [1]


def test_records_inside_that_are_not_kept_are_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "out"
    outcomes: list[Outcome] = [
        failure(5),
        answer(1),
        failure(2),
        failure(3),
        answer(4, "x" * 3_000_000),
        answer(1),
        answer(3),
    ]
    found = read(path, *outcomes, failure(6), b"torn")
    assert found.num_dropped == 5  # one is a second answer
    assert cut(path, found) == [1, 4, 3]
    assert read_output(path, max_line=9).num_kept == 3
    assert list(tmp_path.iterdir()) == [path]


def test_an_empty_output(tmp_path: Path) -> None:
    found = read(tmp_path / "out")
    assert (found.num_kept, found.keep_bytes) == (0, 0)
    assert cut(tmp_path / "out", read(tmp_path / "out", failure(1))) == []


@pytest.mark.parametrize(
    "line",
    [
        b"mine\n",
        b"{}\n",
        b"[]\n",
        b"\n",
        b"\xff\n",
        b'{"id": "batch_req_3", "error": null}\n',
        b'{"id": "batch_req_0_0123456789abcdef", "error": null, "response": {"status_code": 200}}\n',
        b'{"id": "batch_req_3_0123456789abcdef", "error": null, "response": null}\n',
        b'{"id": "batch_req_3_0123456789abcdef"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_record_is_named_and_left_alone(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "out"
    with pytest.raises(UsageError, match=r"out: line 2 is no record of dist-infer.*--overwrite"):
        read(path, answer(1), line, answer(2))
    assert path.read_bytes().count(b"\n") == 3


def test_a_record_of_a_line_that_the_input_has_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1 answers line 101, which this input has not"):
        read(tmp_path / "out", answer(101))
