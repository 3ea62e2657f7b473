"""Lines in, answers out. The reader never waits and holds one line; the writer writes whole lines only."""

import hashlib
import json
import os
import select
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    digest: str = field(default="", compare=False)  # of its bytes without blanks at either end


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
    """Lines of a file or pipe, read lazily: at most one line and one chunk are in memory.

    Of a regular file it reads what was there when it was opened: lines that are added later are not, and a file that
    has become shorter is an error.
    """

    def __init__(self, fd: int, *, name: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._fd = fd
        self._name = name
        self._max_line_bytes = max_line_bytes
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)  # a regular file is always readable
        self._buffer = bytearray()
        self._scanned_len = 0  # bytes of the buffer that hold no line end
        self._too_long = False  # inside a line whose beginning was dropped
        self._dropped = _line_hash()  # of that beginning
        self._bytes_left = _regular_size(fd)  # None: until the end, wherever it is
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
        left = self._bytes_left
        try:
            chunk = os.read(self._fd, _CHUNK_BYTES if left is None else min(left, _CHUNK_BYTES))
        except BlockingIOError:
            return False
        except OSError as error:
            raise DistInferError(f"can't read {self._name}: {error.strerror}") from error
        if left is not None:
            if left and not chunk:
                raise DistInferError(f"{self._name} was cut while it was read: {left} bytes are missing")
            self._bytes_left = left - len(chunk)
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
            self._dropped.update(self._buffer)
            self._buffer.clear()
        self._scanned_len = len(self._buffer)
        return None

    def _line(self, data: bytes) -> Line | None:
        if self._too_long or len(data) > self._max_line_bytes:
            self._too_long = False
            self._dropped.update(data)
            digest, self._dropped = self._dropped.hexdigest(), _line_hash()
            return Line(
                self._number,
                error=RequestError(f"the line has more than {self._max_line_bytes} bytes", code="line_too_long"),
                digest=digest,
            )
        if self._number == 1:
            data = data.removeprefix(_BOM)
        data = data.strip()
        if not data:
            return None
        digest = _line_hash(data).hexdigest()
        try:
            return Line(self._number, data.decode(), digest=digest)
        except UnicodeDecodeError as error:
            return Line(
                self._number,
                error=RequestError(f"the line is not UTF-8 at byte {error.start + 1}", code="invalid_encoding"),
                digest=digest,
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
        text = self._texts[self._taken - 1]
        return Line(self._taken, text, digest=_line_hash(text.encode()).hexdigest())

    def close(self) -> None:
        """Nothing to give back."""


class RecordStream:
    """Records to standard output, a pipe or a device, each in one write of a whole line."""

    def __init__(self, fd: int, *, name: str) -> None:
        self._fd = fd
        self._name = name

    def write(self, outcome: Outcome, *, model: str) -> None:
        """Write one record; it is with the operating system when this returns."""
        if self._fd < 0:
            raise ValueError("write after close")
        try:
            _write_all(self._fd, encode_record(outcome, model=model))
        except OSError as error:
            raise DistInferError(f"can't write {self._name}: {error.strerror}") from error

    def close(self) -> None:
        """Close it, standard output apart. A second call does nothing."""
        if self._fd > 2:
            os.close(self._fd)
        self._fd = -1


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


def _line_hash(data: bytes = b"") -> "hashlib.blake2b":
    return hashlib.blake2b(data, digest_size=8)


def _regular_size(fd: int) -> int | None:
    """Of a regular file that has a size; files that the kernel makes up as they are read have none."""
    found = os.fstat(fd)
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_size else None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # a terminal or pipe that somebody else made non-blocking
            select.select([], [fd], [])
