"""A failure as data: a flat record of text and numbers that any rank can read, and the alarm that it sets off.

Errors never cross ranks as pickled exceptions: many of those don't load again, and a pickle that fails hides the true
cause. A record holds at most 4 kB of text and 64 kB of traceback.
"""

import json
import os
import traceback
from typing import NoReturn

from dist_infer.errors import DistInferError, ExitCode, PeerFailedError

FailureRecord = dict[str, str | int]

MAX_TEXT_BYTES = 4096
MAX_TRACEBACK_BYTES = 65536


class VotedError(DistInferError):
    """An error that all ranks raise together after a vote: they leave in an orderly way, through the farewell.

    `speaker`: this rank is the one that shows it.
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR, *, speaker: bool = True) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.speaker = speaker


class RemoteError(DistInferError):
    """A task of the rank pool failed on one or more ranks. `records`: a flat dict of text and numbers for each."""

    def __init__(self, records: list[FailureRecord]) -> None:
        others = [f"rank {record['rank']}" for record in records[1:]]
        more = f"\n({', '.join(others)} failed too)" if others else ""
        super().__init__(f"{headline(records[0])}\n{records[0]['traceback']}".rstrip() + more)
        self.records = records

    def __reduce__(self) -> tuple[type["RemoteError"], tuple[list[FailureRecord]]]:
        return RemoteError, (self.records,)


class Alarm:
    """Where the watch thread says what it has seen, and where every wait looks.

    `over` is set by a complete farewell: from then on nothing is a failure any more.
    """

    __slots__ = ("over", "record")

    def __init__(self) -> None:
        self.record: FailureRecord | None = None
        self.over = False

    def ring(self) -> NoReturn:
        """Raise what a wait raises once a failure is known."""
        raise PeerFailedError(headline(self.record or {}))


def describe(error: BaseException, *, rank: int, host: str, where: str = "") -> FailureRecord:
    """The record of an exception; never raises, whatever the exception does in its own methods."""
    if isinstance(error, RemoteError):
        return error.records[0]
    curable = isinstance(error, DistInferError)
    return {
        **_origin(rank, host, where),
        "pid": os.getpid(),
        "type": type(error).__name__,
        "mro": ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__[:-1]),
        "text": _head_and_tail(_guarded_text(error), MAX_TEXT_BYTES),
        "traceback": _head_and_tail(_guarded_traceback(error), MAX_TRACEBACK_BYTES),
        "curable": int(curable),
        "exit_code": int(error.exit_code) if isinstance(error, DistInferError) else int(ExitCode.ERROR),
    }


def death(
    text: str, *, rank: int, host: str = "", where: str = "", pid: int = 0, stacks: bool = False
) -> FailureRecord:
    """The record of a rank that can't speak for itself: it died, stalled or left without a word.

    `stacks`: a deadline is over, so every rank shows where its threads stand.
    """
    return {
        **_origin(rank, host, where),
        "pid": pid,
        "type": "",
        "mro": "",
        "text": text,
        "traceback": "",
        "curable": 0,
        "exit_code": int(ExitCode.ERROR),
        "stacks": int(stacks),
    }


def _origin(rank: int, host: str, where: str) -> FailureRecord:
    return {"rank": rank, "host": host, "where": where}


def encode(record: FailureRecord) -> str:
    """ASCII JSON, for the store and for messages."""
    return json.dumps(record)


def decode(text: str | bytes) -> FailureRecord:
    """The inverse of `encode`; text that is no record becomes one that shows it."""
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        return death(f"unreadable failure record {text[:200]!r}", rank=-1)
    return {key: value for key, value in record.items() if isinstance(value, str | int)}


def headline(record: FailureRecord) -> str:
    """One line: rank, host, process, place, type, text."""
    text = str(record.get("text", ""))
    if record.get("type") and not record.get("curable"):
        text = f"{record['type']}: {text}" if text else str(record["type"])
    at = [f"host {record['host']}"] if record.get("host") else []
    at += [f"pid {record['pid']}"] if record.get("pid") else []
    where = f" in {record['where']}" if record.get("where") else ""
    return f"rank {record.get('rank', '?')}{' (' + ', '.join(at) + ')' if at else ''} failed{where}: {text}"


def render(record: FailureRecord) -> str:
    """What the user sees: the headline, and the traceback unless the user can cure the error by its text."""
    shown = f"dist-infer: {headline(record)}\n"
    trace = str(record.get("traceback", ""))
    if trace and not record.get("curable"):
        shown += trace if trace.endswith("\n") else trace + "\n"
    return shown


def _guarded_text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"left early by sys.exit({error.code!r})"
    try:
        return str(error)
    except BaseException as second:  # a __str__ may do anything
        return f"(its text can't be shown: __str__ raised {type(second).__name__})"


def _guarded_traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # so may what format_exception calls
        return "".join(traceback.format_tb(error.__traceback__))


def _head_and_tail(text: str, max_bytes: int) -> str:
    """`text` cut in the middle to `max_bytes` of UTF-8: a quarter from its start, the rest from its end."""
    data = text.encode(errors="backslashreplace")
    if len(data) <= max_bytes:
        return data.decode()
    cut = f"\n... {len(data) - max_bytes} bytes left out ...\n".encode()
    head = max_bytes // 4
    tail = max_bytes - head - len(cut)
    return (data[:head] + cut + data[-tail:]).decode(errors="replace")
