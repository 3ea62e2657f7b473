"""The rank-test launcher is itself under test: a launcher that lost a failure would make every rank test worthless."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SAMPLES = Path("tests", "data", "rank_samples", "mixed.py")


@dataclass(frozen=True)
class Session:
    returncode: int
    output: str
    outcomes: dict[str, str]  # by test name
    texts: dict[str, str]


def run_pytest(folder: Path, *args: str, **env: str) -> Session:
    """pytest in a process of its own; outcomes from its junit file."""
    junit = folder / "junit.xml"
    command = [sys.executable, "-P", "-m", "pytest", f"--junitxml={junit}", "-p", "no:cacheprovider", *args]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CI": "false", **env}, capture_output=True, text=True, timeout=240
    )
    outcomes, texts = {}, {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcomes[case.attrib["name"]] = "passed" if bad is None else bad.tag
        texts[case.attrib["name"]] = "" if bad is None else f"{bad.attrib.get('message', '')}\n{bad.text}"
    return Session(done.returncode, done.stdout + done.stderr, outcomes, texts)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return run_pytest(tmp_path_factory.mktemp("mixed"), str(SAMPLES))


def test_each_test_gets_its_own_outcome(mixed: Session) -> None:
    assert mixed.returncode == 1
    assert mixed.outcomes == {
        "test_passes[1 rank]": "passed",
        "test_passes[2 ranks]": "passed",
        "test_fails_on_rank_1[2 ranks]": "failure",
        "test_hangs_on_rank_0[2 ranks]": "failure",
        "test_is_killed_on_rank_1[2 ranks]": "failure",
        "test_skips_on_rank_1_only[2 ranks]": "failure",
        "test_skips_on_all[2 ranks]": "skipped",
        "test_passes_after_the_others[2 ranks-0]": "passed",
        "test_passes_after_the_others[2 ranks-63]": "passed",
    }


def test_a_failure_shows_the_rank_and_its_own_assertion(mixed: Session) -> None:
    assert "the planted failure" in mixed.texts["test_fails_on_rank_1[2 ranks]"]
    assert "on rank 1 of 2" in mixed.output


def test_a_hang_shows_the_stack_of_the_rank_that_hangs(mixed: Session) -> None:
    text = mixed.texts["test_hangs_on_rank_0[2 ranks]"]
    assert "the deadline was over" in text
    assert "stacks of rank 0" in text
    assert "in test_hangs_on_rank_0" in text


def test_a_killed_rank_is_a_failure_that_says_how_the_launch_ended(mixed: Session) -> None:
    text = mixed.texts["test_is_killed_on_rank_1[2 ranks]"]
    assert "before all ranks had finished" in text or "launcher ended with code" in text
    assert "rank 1 was in" in text


def test_a_skip_on_some_ranks_is_a_failure(mixed: Session) -> None:
    assert "the ranks differ" in mixed.texts["test_skips_on_rank_1_only[2 ranks]"]


def test_seconds_and_reasons_are_printed(mixed: Session) -> None:
    assert "seconds a file" in mixed.output
    assert "1  host: nobody wants to" in mixed.output


def test_one_rank_test_can_be_selected(tmp_path: Path) -> None:
    found = run_pytest(tmp_path, f"{SAMPLES}::test_passes[1 rank]")
    assert (found.returncode, found.outcomes) == (0, {"test_passes[1 rank]": "passed"})


def test_without_mpirun_rank_tests_are_skipped_and_in_ci_they_fail(tmp_path: Path) -> None:
    select = f"{SAMPLES}::test_passes[2 ranks]"
    no_launcher = {"DIST_INFER_TESTS_MPIRUN": "/nowhere/mpirun"}
    assert run_pytest(tmp_path, select, **no_launcher).outcomes == {"test_passes[2 ranks]": "skipped"}
    strict = run_pytest(tmp_path, select, CI="true", **no_launcher)
    assert (strict.returncode, strict.outcomes["test_passes[2 ranks]"]) == (1, "error")
