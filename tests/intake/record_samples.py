"""Outcomes and records for the tests of output files."""

import hashlib
import json
from pathlib import Path
from typing import Any

from dist_infer.errors import RequestError
from dist_infer.intake.records import Answer, Choice, Failure, Refusal


def digest(text: str) -> str:
    """As a line of input has it."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def answer(line: int, text: str = "Hi", *, of: str = "") -> Answer:
    """An answer to line number `line`, which reads `of`."""
    return Answer(
        line=line,
        custom_id=f"line-{line}",
        endpoint="completion",
        choices=(Choice(text=text, finish_reason="stop"),),
        prompt_len=1,
        completion_len=1,
        created=0,
        digest=digest(of),
    )


def refusal(line: int, *, of: str = "") -> Refusal:
    """A bad line."""
    return Refusal(line=line, custom_id=f"line-{line}", error=RequestError("bad"), digest=digest(of))


def failure(line: int, *, of: str = "") -> Failure:
    """A request that died with its job."""
    return Failure(line=line, custom_id=f"line-{line}", message="rank 1 died", digest=digest(of))


def read_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file; half a line fails."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def line_numbers(path: Path) -> list[int]:
    """Which lines the records of a file answer."""
    return [int(record["id"].split("_")[2]) for record in read_records(path)]
