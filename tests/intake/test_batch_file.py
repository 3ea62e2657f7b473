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
    RecordStream,
    open_lines,
)
from dist_infer.intake.protocol import ParsedRequest, parse_line
from dist_infer.intake.records import Answer, Choice, Failure, Refusal


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


def test_a_line_is_known_by_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n  {"a": 1}\r\n{"a": 2}\n\xff\n' + b"x" * 100 + b"\n" + b"x" * 101)
    reader = LineReader(os.open(path, os.O_RDONLY), name="in", max_line_bytes=50)
    digests = [line.digest for line in read_all(reader)]
    assert digests[0] == digests[1] and len(set(digests)) == 5 and {len(digest) for digest in digests} == {16}


def test_a_line_that_is_too_long_has_one_digest_however_it_was_read(tmp_path: Path) -> None:
    data = os.urandom(3_000_000).replace(b"\n", b"x")
    digests = set()
    for prefix in (0, 7, 300_000):
        path = tmp_path / str(prefix)
        path.write_bytes(b"y" * prefix + b"\n" + data)
        digests.add(read_all(LineReader(os.open(path, os.O_RDONLY), name="in", max_line_bytes=10))[-1].digest)
    assert len(digests) == 1


def test_an_input_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n" * 500_000)
    reader = open_lines(str(path))
    assert reader.take() == Line(1, "a")
    os.truncate(path, 300_000)
    with pytest.raises(DistInferError, match=r"in\.jsonl was cut while it was read: 700000 bytes"):
        read_all(reader)
    reader.close()


def test_what_is_added_to_an_input_later_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n")
    reader = open_lines(str(path))
    path.write_bytes(b"a\nb\n")
    assert [line.text for line in read_all(reader)] == ["a"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="host: no /proc")
def test_a_file_without_a_size_is_read_to_its_end() -> None:
    lines = read_all(open_lines("/proc/self/status"))
    assert lines[0].text.startswith("Name:") and len(lines) > 10


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="host: no /dev/full")
def test_a_device_that_is_full_is_named() -> None:
    writer = RecordStream(os.open("/dev/full", os.O_WRONLY), name="/dev/full")
    with pytest.raises(DistInferError, match="/dev/full: No space left"):
        writer.write(answer(1), model="m")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="after close"):
        writer.write(answer(1), model="m")


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
        writer = RecordStream(1, name="standard output")
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
