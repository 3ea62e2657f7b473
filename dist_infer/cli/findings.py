"""What `dist-infer doctor` finds, one line each."""

from collections.abc import Sequence
from dataclasses import dataclass

import typer

AFTER_START = ("MPI library", "world size")  # checks of preflight that can't be made before MPI has started


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: `wrong` says what is wrong and the fix, else `detail` says what is there."""

    name: str
    detail: str = ""
    wrong: str = ""

    def __str__(self) -> str:
        return f"WRONG  {self.name}: {self.wrong}" if self.wrong else f"ok     {self.name}: {self.detail or 'fine'}"


def show(findings: Sequence[Finding]) -> None:
    """Print them, one line each."""
    for finding in findings:
        typer.echo(str(finding))
