"""Lines in, answers out. The reader never waits and holds one line; the writer writes whole lines only."""

import json
import os
import select
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from dist_infer.errors import DistInferError, RequestError, UsageError
from dist_infer.intake.records import Answer, Outcome, Refusal, encode_record

MAX_LINE_BYTES = 32 * 2**20  # a prompt of a million token ids takes 8 MB
PROMPT_MAX_TOKENS = 64  # of a prompt given on the command line
_CHUNK_BYTES = 2**18
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank: its text, or why it has none. Numbers count from 1, blank lines included."""

    number: int
    text: str = ""
    error: RequestError | None = None


class Lines(Protocol):
    """Where lines come from. Nothing here waits."""

    def ended(self) -> bool:
        """No line will come any more."""

    def ready(self) -> bool:
        """A line is there, or the end is known."""

    def take(self) -> Line | None:
        """The next line, None if none is there (now, or at the end)."""

    def close(self) -> None:
        """Give the file back."""


class Answers(Protocol):
    """Where answers go."""

    def write(self, outcome: Outcome, *, model: str) -> None:
        """Write one answer."""

    def close(self) -> None:
        """Make sure that all is written."""


class LineReader:
    """Lines of a file or pipe, read lazily: at most one line and one chunk are in memory."""

    def __init__(self, fd: int, *, name: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._fd = fd
        self._name = name
        self._max_line_bytes = max_line_bytes
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)  # a regular file is always readable
        self._buffer = bytearray()
        self._scanned_len = 0  # bytes of the buffer that hold no line end
        self._too_long = False  # inside a line whose beginning was dropped
        self._number = 0
        self._no_more_bytes = False
        self._next: Line | None = None

    def ended(self) -> bool:
        """All bytes were read and all lines taken."""
        self._look_ahead()
        return self._next is None and self._no_more_bytes

    def ready(self) -> bool:
        """A line is there, or the end is known."""
        self._look_ahead()
        return self._next is not None or self._no_more_bytes

    def take(self) -> Line | None:
        """The next line that is not blank, None if none is there."""
        self._look_ahead()
        line, self._next = self._next, None
        return line

    def close(self) -> None:
        """Close the file."""
        if self._fd > 2:
            os.close(self._fd)
        self._fd = -1

    def _look_ahead(self) -> None:
        while self._next is None:
            data = self._cut_line()
            if data is not None:
                self._number += 1
                self._next = self._line(data)
            elif self._no_more_bytes or not self._fill():
                return

    def _fill(self) -> bool:
        """Read a chunk if that needs no waiting."""
        if self._fd < 0 or not self._poll.poll(0):
            return False
        try:
            chunk = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DistInferError(f"can't read {self._name}: {error.strerror}") from error
        self._no_more_bytes = not chunk
        self._buffer += chunk
        return True

    def _cut_line(self) -> bytes | None:
        """The bytes before the next line end; what is left at the end of the file is a line too."""
        end = self._buffer.find(b"\n", self._scanned_len)
        if end < 0 and self._no_more_bytes and (self._buffer or self._too_long):
            end = len(self._buffer)
        if end >= 0:
            data = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned_len = 0
            return data
        if len(self._buffer) > self._max_line_bytes:
            self._too_long = True
            self._buffer.clear()
        self._scanned_len = len(self._buffer)
        return None

    def _line(self, data: bytes) -> Line | None:
        if self._too_long or len(data) > self._max_line_bytes:
            self._too_long = False
            return Line(
                self._number,
                error=RequestError(f"the line has more than {self._max_line_bytes} bytes", code="line_too_long"),
            )
        if self._number == 1:
            data = data.removeprefix(_BOM)
        data = data.strip()
        if not data:
            return None
        try:
            return Line(self._number, data.decode())
        except UnicodeDecodeError as error:
            return Line(
                self._number,
                error=RequestError(f"the line is not UTF-8 at byte {error.start + 1}", code="invalid_encoding"),
            )


class PromptLines:
    """Prompts of the command line as lines: completed greedily with at most PROMPT_MAX_TOKENS tokens."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self._texts = [
            json.dumps({"prompt": prompt, "temperature": 0, "max_tokens": PROMPT_MAX_TOKENS}) for prompt in prompts
        ]
        self._taken = 0

    def ended(self) -> bool:
        """All prompts were taken."""
        return self._taken == len(self._texts)

    def ready(self) -> bool:
        """Always: the prompts are there from the start."""
        return True

    def take(self) -> Line | None:
        """The next prompt."""
        if self.ended():
            return None
        self._taken += 1
        return Line(self._taken, self._texts[self._taken - 1])

    def close(self) -> None:
        """Nothing to give back."""


class RecordWriter:
    """Records to a file or to standard output, each in one write of a whole line.

    The file is created at the first record, or at close: a job that fails before leaves none behind.
    """

    def __init__(self, path: Path | None, *, overwrite: bool = False) -> None:
        self._path = path  # None: standard output
        self._overwrite = overwrite
        self._fd: int | None = None if path is not None else 1

    def write(self, outcome: Outcome, *, model: str) -> None:
        """Write one record; it is with the operating system when this returns."""
        fd = self._open()
        try:
            _write_all(fd, encode_record(outcome, model=model))
        except OSError as error:
            raise DistInferError(f"can't write {self._path or 'standard output'}: {error.strerror}") from error

    def close(self) -> None:
        """Bring a file to the disk and close it. A second call does nothing."""
        if self._path is None or self._fd == -1:
            return
        fd = self._open()
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.fsync(fd)
        os.close(fd)
        self._fd = -1

    def _open(self) -> int:
        if self._fd is None and self._path is not None:
            replace = os.O_TRUNC if self._overwrite or not _is_regular(self._path) else os.O_EXCL
            try:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | replace, 0o666)
            except OSError as error:
                raise DistInferError(f"can't write {self._path}: {error.strerror}") from error
        if self._fd is None or self._fd < 0:
            raise ValueError("write after close")
        return self._fd


class ReadableWriter:
    """Answers to prompts of the command line, readable, in the order of the prompts."""

    def __init__(self, prompts: Sequence[str], out: TextIO) -> None:
        self._prompts = prompts
        self._out = out
        self._waiting: dict[int, Outcome] = {}
        self._next = 1

    def write(self, outcome: Outcome, *, model: str) -> None:
        """Print the answer once those of the prompts before it are printed."""
        self._waiting[outcome.line] = outcome
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._print(ready)

    def close(self) -> None:
        """Print what waits for an answer that never came."""
        for line in sorted(self._waiting):
            self._print(self._waiting.pop(line))

    def _print(self, outcome: Outcome) -> None:
        self._next = outcome.line + 1
        if isinstance(outcome, Answer):
            answer = outcome.choices[0].text
        else:
            answer = f"error: {outcome.error if isinstance(outcome, Refusal) else outcome.message}"
        text = f"> {self._prompts[outcome.line - 1]}\n{answer}\n\n"
        encoding = self._out.encoding or "utf-8"
        try:
            self._out.write(text.encode(encoding, "replace").decode(encoding))
            self._out.flush()
        except OSError as error:
            raise DistInferError(f"can't write standard output: {error.strerror}") from error


def open_lines(path: str) -> LineReader:
    """Lines of a file, or of standard input for "-".

    Errors: UsageError naming the file.
    """
    if path == "-":
        return LineReader(0, name="standard input")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"can't read input {path}: {error.strerror}") from error
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"input {path} is a folder; give a JSONL file")
    return LineReader(fd, name=path)


def open_answers(path: str, *, overwrite: bool, input_path: str | None = None) -> RecordWriter:
    """Records to a file, or to standard output for "-". Nothing is created or emptied yet.

    Errors: UsageError for a file that exists, that is the input, or that can't be made.
    """
    if path == "-":
        return RecordWriter(None)
    output = Path(path)
    if output.is_dir():
        raise UsageError(f"output {path} is a folder; give a file")
    if not output.parent.is_dir():
        raise UsageError(f"output {path}: the folder {output.parent} does not exist")
    if output.exists():
        if input_path not in (None, "-") and os.path.samefile(path, str(input_path)):
            raise UsageError(f"input and output are one file, {path}: give another output")
        if _is_regular(output) and not overwrite:
            raise UsageError(f"output {path} exists: give another file, or --overwrite to replace it")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise UsageError(f"output {path} can't be written: permission denied")
    return RecordWriter(output, overwrite=overwrite)


def open_files(
    *, input_path: str | None, prompts: Sequence[str], output_path: str | None, overwrite: bool
) -> tuple[Lines, Answers]:
    """Input and output of a job, checked before anything is loaded. Prompts without an output are answered readably.

    Errors: UsageError naming the file.
    """
    lines: Lines = open_lines(input_path) if input_path is not None else PromptLines(prompts)
    if output_path is None:
        return lines, ReadableWriter(prompts, sys.stdout)
    return lines, open_answers(output_path, overwrite=overwrite, input_path=input_path)


def _is_regular(path: Path) -> bool:
    return not path.exists() or path.is_file()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # a terminal or pipe that somebody else made non-blocking
            select.select([], [fd], [])
