"""How a finding reads."""

import pytest

from dist_infer.cli.findings import Finding, show


def test_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        [
            Finding("x"),
            Finding("memory", detail="3 GiB"),
            Finding("world", wrong="size 1: use --mpi=pmix"),
            Finding("ssh", note="none: install it"),
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "ok     x: fine",
        "ok     memory: 3 GiB",
        "WRONG  world: size 1: use --mpi=pmix",
        "note   ssh: none: install it",
    ]
