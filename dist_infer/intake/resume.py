"""What an earlier run has left in an output: which lines it answered, and how much of the file is worth keeping.

A resumed run keeps every whole record but those of requests that died with a job (code job_failed): it answers these
again. A record names its request by line number and digest of the line.
"""

import json
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dist_infer.errors import DistInferError, UsageError
from dist_infer.intake.record_file import sync_folder
from dist_infer.intake.records import JOB_FAILED

_ID = re.compile(r"batch_req_([1-9]\d{0,15})_([0-9a-f]{16})")
_NO_RECORD = "is no record of dist-infer: give another output, or --overwrite to replace it"


class AnsweredLines:
    """Digests of the lines that have been answered, 8 bytes a line of input."""

    def __init__(self) -> None:
        self._digests = array("Q")  # by line number; 0: not answered
        self.num_lines = 0

    def add(self, line: int, digest: str) -> bool:
        """False where the line has been answered already."""
        if line >= len(self._digests):
            self._digests.frombytes(bytes(8 * (line + 1 - len(self._digests))))
        if self._digests[line]:
            return False
        self._digests[line] = _number(digest)
        self.num_lines += 1
        return True

    def holds(self, line: int, digest: str) -> bool:
        """The line has been answered.

        Errors: DistInferError when another line stood there.
        """
        known = self._digests[line] if line < len(self._digests) else 0
        if known and known != _number(digest):
            raise DistInferError(
                f"line {line} of the input is not the one that was answered: the input has changed since; "
                "start anew with --overwrite or another output"
            )
        return bool(known)


@dataclass(slots=True)
class EarlierOutput:
    """What is in an output file. `dropped` are the parts that a resumed run doesn't keep, as (start, end) bytes."""

    answered: AnsweredLines = field(default_factory=AnsweredLines)
    num_failed: int = 0  # of those that are kept: answered with an error
    num_dropped: int = 0
    keep_bytes: int = 0  # up to the end of the last record that is kept
    dropped: list[tuple[int, int]] = field(default_factory=list)  # before keep_bytes

    @property
    def num_kept(self) -> int:
        """Records that stay."""
        return self.answered.num_lines


def read_output(path: Path, *, max_line: int) -> EarlierOutput:
    """Reads an output record by record; what follows the last line end is torn and not kept.

    Errors: UsageError naming the line that is no record of a request of this input.
    """
    found = EarlierOutput()
    pending: list[tuple[int, int]] = []  # not kept, and nothing kept behind it so far
    for number, start, data in _whole_lines(path):
        line, digest, outcome = _read_record(path, number, data, max_line)
        end = start + len(data)
        if outcome == "died" or not found.answered.add(line, digest):
            found.num_dropped += 1
            pending.append((start, end))
            continue
        found.num_failed += outcome == "failed"
        found.dropped += pending
        found.keep_bytes = end
        pending.clear()
    return found


def cut_output(path: Path, found: EarlierOutput) -> int:
    """Take out the records inside that are not kept, all or none; gives back the bytes that are worth keeping.

    Errors: DistInferError.
    """
    if not found.dropped:
        return found.keep_bytes  # the rest is at the end, where a cut is enough
    partial = path.with_name(f"{path.name}.partial")
    try:
        with path.open("rb") as source, partial.open("wb") as target:
            start = 0
            for gap, end in [*found.dropped, (found.keep_bytes, 0)]:
                source.seek(start)
                _copy(source, target, gap - start)
                start = end
            target.flush()
            os.fsync(target.fileno())
            num_bytes = os.fstat(target.fileno()).st_size
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise DistInferError(f"can't write {path}: {error.strerror}") from error
    return num_bytes


def _whole_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    start = 0
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if data.endswith(b"\n"):
                    yield number, start, data
                start += len(data)
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error


def _read_record(path: Path, number: int, data: bytes, max_line: int) -> tuple[int, str, str]:
    """Line, digest, and what became of the request: answered, failed, died."""
    try:
        record = json.loads(data)
        match = _ID.fullmatch(record["id"])
        if match is None:
            raise ValueError
        line, digest = int(match[1]), match[2]
        if record["error"] is not None:
            outcome = "died" if record["error"]["code"] == JOB_FAILED else "failed"
        else:
            outcome = "answered" if record["response"]["status_code"] == 200 else "failed"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path}: line {number} {_NO_RECORD}") from error
    if line > max_line:
        raise UsageError(f"{path}: line {number} answers line {line}, which this input has not")
    return line, digest, outcome


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    while num_bytes:
        data = source.read(min(num_bytes, 2**20))
        if not data:
            raise OSError(0, "it became shorter while it was read")
        target.write(data)
        num_bytes -= len(data)


def _number(digest: str) -> int:
    return int(digest, 16) or 1  # 0 means: not answered
