"""What `dist-infer doctor` finds, one line each."""

from collections.abc import Sequence
from dataclasses import dataclass

import typer

AFTER_START = (
    "MPI library",
    "world size",
    "ranks a node",
)  # checks of preflight that can't be made before MPI has started


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    `wrong` says what is wrong and the fix, `note` what may be in the way of some jobs and the fix, else `detail` says
    what is there.
    """

    name: str
    detail: str = ""
    wrong: str = ""
    note: str = ""

    def __str__(self) -> str:
        if self.wrong:
            return f"WRONG  {self.name}: {self.wrong}"
        return f"note   {self.name}: {self.note}" if self.note else f"ok     {self.name}: {self.detail or 'fine'}"


def show(findings: Sequence[Finding]) -> None:
    """Print them, one line each."""
    for finding in findings:
        typer.echo(str(finding))
