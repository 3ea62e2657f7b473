import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dist_infer.errors import DistInferError, RequestError, UsageError
from dist_infer.intake.batch_file import (
    Line,
    LineReader,
    Lines,
    PromptLines,
    ReadableWriter,
    open_answers,
    open_files,
    open_lines,
)
from dist_infer.intake.protocol import ParsedRequest, parse_line
from dist_infer.intake.records import Answer, Choice, Failure, Outcome, Refusal


def answer(line: int, text: str = "Hi") -> Answer:
    return Answer(
        line=line,
        custom_id=f"line-{line}",
        endpoint="completion",
        choices=(Choice(text=text, finish_reason="stop"),),
        prompt_len=1,
        completion_len=1,
        created=0,
    )


def read_all(lines: Lines) -> list[Line]:
    taken = []
    while not lines.ended():
        assert lines.ready()
        line = lines.take()
        assert line is not None
        taken.append(line)
    assert lines.take() is None and lines.ready()
    lines.close()
    return taken


def lines_of(tmp_path: Path, data: bytes) -> list[tuple[int, str]]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    return [(line.number, line.text) for line in read_all(open_lines(str(path)))]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n\r\n  \n\t", []),
        (b"a", [(1, "a")]),
        (b"a\n", [(1, "a")]),
        (b"a\r\n\r\nb\r\n", [(1, "a"), (3, "b")]),
        (b"\n\n a b \n\nc", [(3, "a b"), (5, "c")]),
        (b"\xef\xbb\xbfa\nb", [(1, "a"), (2, "b")]),
        ("é🙂\u2028x\x85y\n".encode(), [(1, "é🙂\u2028x\x85y")]),
    ],
)
def test_lines(tmp_path: Path, data: bytes, lines: list[tuple[int, str]]) -> None:
    assert lines_of(tmp_path, data) == lines


def test_many_lines_over_many_chunks(tmp_path: Path) -> None:
    texts = [f"{number} " + "x" * (number % 5000) for number in range(1, 1000)]
    read = lines_of(tmp_path, "\n".join(texts).encode())
    assert [number for number, _ in read] == list(range(1, 1000))
    assert [text.split()[0] for _, text in read] == [str(number) for number in range(1, 1000)]
    assert [len(text) for _, text in read] == [len(text.strip()) for text in texts]


def test_a_line_that_is_not_utf8_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\nb\xff\nc\n")
    lines = read_all(open_lines(str(path)))
    assert [line.text for line in lines] == ["a", "", "c"]
    assert isinstance(lines[1].error, RequestError)
    assert "not UTF-8 at byte 2" in str(lines[1].error)


@pytest.mark.parametrize("length", [11, 600_000, 3_000_000])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_that_is_too_long_costs_only_itself(tmp_path: Path, length: int, end: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"0123456789\n" + b"x" * length + b"\nab\n" + b"y" * length + end)
    reader = LineReader(os.open(path, os.O_RDONLY), name="in", max_line_bytes=10)
    lines = read_all(reader)
    assert [line.text for line in lines] == ["0123456789", "", "ab", ""]
    assert [line.number for line in lines] == [1, 2, 3, 4]
    assert "more than 10 bytes" in str(lines[1].error)
    assert "more than 10 bytes" in str(lines[3].error)


def test_the_reader_is_lazy(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse file: reading it to the end would not end
        file.seek(0)
        file.write(b"a\nb\n")
    reader = open_lines(str(path))
    assert [reader.take(), reader.take()] == [Line(1, "a"), Line(2, "b")]
    reader.close()


def test_a_pipe_is_never_waited_for() -> None:
    read_end, write_end = os.pipe()
    reader = LineReader(read_end, name="pipe")
    assert not reader.ready() and reader.take() is None and not reader.ended()
    os.write(write_end, b"half")
    assert not reader.ready() and reader.take() is None
    os.write(write_end, b" a line\nrest")
    assert reader.ready() and reader.take() == Line(1, "half a line")
    assert not reader.ready() and not reader.ended()
    os.close(write_end)
    assert reader.take() == Line(2, "rest")
    assert reader.ended() and reader.ready()
    reader.close()


def test_a_closed_reader_reads_nothing_more() -> None:
    read_end, write_end = os.pipe()
    reader = LineReader(read_end, name="pipe")
    reader.close()
    assert not reader.ready() and not reader.ended() and reader.take() is None
    os.close(write_end)


def test_an_input_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.jsonl: No such file"):
        open_lines(str(tmp_path / "missing.jsonl"))
    with pytest.raises(UsageError, match="folder"):
        open_lines(str(tmp_path))


def test_a_read_error_is_named(tmp_path: Path) -> None:
    reader = LineReader(os.open(tmp_path, os.O_RDONLY), name="broken.jsonl")
    with pytest.raises(DistInferError, match=r"can't read broken\.jsonl"):
        reader.ready()
    reader.close()


def test_prompts_are_lines_that_the_parser_takes() -> None:
    lines = read_all(PromptLines(['say "hi"\n', "é"]))
    parsed = [parse_line(line.number, line.text) for line in lines]
    assert [p.prompt for p in parsed if isinstance(p, ParsedRequest)] == ['say "hi"\n', "é"]
    assert [p.sampling.temperature for p in parsed if isinstance(p, ParsedRequest)] == [0, 0]


def records(path: Path) -> list[int]:
    return [int(json.loads(line)["id"].removeprefix("batch_req_")) for line in path.read_text().splitlines()]


def test_records_are_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = open_answers(str(path), overwrite=False)
    assert not path.exists()
    writer.write(answer(2), model="m")
    assert records(path) == [2]
    writer.write(answer(1), model="m")
    assert records(path) == [2, 1]
    writer.close()
    writer.close()
    assert records(path) == [2, 1]
    with pytest.raises(ValueError, match="after close"):
        writer.write(answer(3), model="m")


def test_an_empty_job_leaves_an_empty_file(tmp_path: Path) -> None:
    writer = open_answers(str(tmp_path / "out.jsonl"), overwrite=False)
    writer.close()
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_an_output_that_exists_is_replaced_only_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with pytest.raises(UsageError, match="--overwrite"):
        open_answers(str(path), overwrite=False)
    assert path.read_text() == "old\n"
    writer = open_answers(str(path), overwrite=True)
    assert path.read_text() == "old\n"
    writer.write(answer(1), model="m")
    writer.close()
    assert records(path) == [1]


def test_an_output_made_by_another_process_meanwhile_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = open_answers(str(path), overwrite=False)
    path.write_text("theirs\n")
    with pytest.raises(DistInferError, match="File exists"):
        writer.write(answer(1), model="m")
    assert path.read_text() == "theirs\n"


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_input_and_output_must_differ(tmp_path: Path, link: object) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("mine\n")
    output = path
    if callable(link):
        output = tmp_path / "out.jsonl"
        link(path, output)
    with pytest.raises(UsageError, match="one file"):
        open_answers(str(output), overwrite=True, input_path=str(path))
    assert path.read_text() == "mine\n"


def test_an_output_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no does not exist"):
        open_answers(str(tmp_path / "no" / "out.jsonl"), overwrite=False)
    with pytest.raises(UsageError, match="folder"):
        open_answers(str(tmp_path), overwrite=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    writer = open_answers("/dev/full", overwrite=False)
    with pytest.raises(DistInferError, match="/dev/full: No space left"):
        writer.write(answer(1), model="m")
    writer.close()


@contextmanager
def stdout_to_pipe() -> Iterator[int]:
    """Reading end of a pipe that is standard output."""
    read_end, write_end = os.pipe()
    saved = os.dup(1)
    os.dup2(write_end, 1)
    os.close(write_end)
    try:
        yield read_end
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(read_end)


def test_records_on_standard_output_are_whole_even_if_the_pipe_is_full() -> None:
    got = bytearray()

    def drain(pipe: int) -> None:
        while got.count(b"\n") < 2:
            got.extend(os.read(pipe, 1000))

    with stdout_to_pipe() as pipe:  # in the test's body: pytest swaps standard output between its phases
        os.set_blocking(1, False)
        reader = threading.Thread(target=drain, args=(pipe,))
        reader.start()
        writer = open_answers("-", overwrite=False)
        writer.write(answer(1, "x" * 500_000), model="m")
        writer.write(answer(2), model="m")
        writer.close()
        reader.join(30)
    assert [json.loads(line)["id"] for line in got.splitlines()] == ["batch_req_1", "batch_req_2"]


def test_readable_answers_come_in_the_order_of_the_prompts() -> None:
    out = io.StringIO()
    writer = ReadableWriter(["one", "two", "three"], out)
    writer.write(answer(2, " second"), model="m")
    assert out.getvalue() == ""
    writer.write(Refusal(line=1, custom_id="line-1", error=RequestError("bad")), model="m")
    assert out.getvalue() == "> one\nerror: bad\n\n> two\n second\n\n"
    writer.write(Failure(line=3, custom_id="line-3", message="rank 1 died"), model="m")
    assert out.getvalue().endswith("> three\nerror: rank 1 died\n\n")


def test_readable_answers_behind_one_that_never_came_are_printed_at_close() -> None:
    out = io.StringIO()
    writer = ReadableWriter(["one", "two", "three"], out)
    writer.write(answer(3, "third"), model="m")
    writer.write(answer(2, "second"), model="m")
    writer.close()
    assert out.getvalue() == "> two\nsecond\n\n> three\nthird\n\n"


def test_a_character_that_the_terminal_lacks_does_not_end_the_job() -> None:
    raw = io.BytesIO()
    writer = ReadableWriter(["\udce9"], io.TextIOWrapper(raw, encoding="ascii"))
    writer.write(answer(1, "é🙂"), model="m")
    assert raw.getvalue() == b"> ?\n??\n\n"


def test_files_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome: Outcome = answer(1)
    lines, answers = open_files(input_path=None, prompts=["one"], output_path=None, overwrite=False)
    assert [line.number for line in read_all(lines)] == [1]
    answers.write(outcome, model="m")
    assert capsys.readouterr().out == "> one\nHi\n\n"
    (tmp_path / "in").write_text("a\n")
    lines, answers = open_files(
        input_path=str(tmp_path / "in"), prompts=(), output_path=str(tmp_path / "out"), overwrite=False
    )
    assert [line.text for line in read_all(lines)] == ["a"]
    answers.write(outcome, model="m")
    assert records(tmp_path / "out") == [1]
