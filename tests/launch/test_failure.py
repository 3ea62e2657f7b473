"""Failure records, and the fault table: every way a rank can fail ends the whole job, soon and with a message."""

import pickle
from contextlib import nullcontext

import pytest

from dist_infer.errors import CheckpointError, ExitCode, PeerFailedError, UsageError
from dist_infer.launch import mpirun
from dist_infer.launch.failure import (
    MAX_TEXT_BYTES,
    MAX_TRACEBACK_BYTES,
    Alarm,
    FailureRecord,
    RemoteError,
    VotedError,
    death,
    decode,
    describe,
    encode,
    headline,
    render,
)
from tests.launch.fault_cells import Cell, by_mpirun, run_cells, table


def record_of(error: BaseException) -> FailureRecord:
    try:
        raise error
    except BaseException as raised:
        return describe(raised, rank=3, host="node7", where="step 5")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class TwoArgumentsError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_record_names_rank_host_process_place_type_and_text() -> None:
    record = record_of(ValueError("too big"))
    assert (record["rank"], record["host"], record["where"]) == (3, "node7", "step 5")
    assert headline(record) == f"rank 3 (host node7, pid {record['pid']}) failed in step 5: ValueError: too big"
    assert record["mro"] == "builtins.ValueError, builtins.Exception, builtins.BaseException"
    assert "raise error" in str(record["traceback"])


@pytest.mark.parametrize(
    "error",
    [
        UnprintableError(),
        TwoArgumentsError(1, 2),
        ExceptionGroup("several", [ValueError("a"), OSError(2, "b")]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ValueError("lone surrogate \udc80"),
        SystemExit(0),
        KeyboardInterrupt(),
        AttributeError("x", obj=lambda: None),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_error_becomes_a_flat_record_that_survives_json(error: BaseException) -> None:
    record = record_of(error)
    assert all(isinstance(value, str | int) for value in record.values())
    assert decode(encode(record)) == record
    assert encode(record).isascii()
    assert type(error).__name__ in render(record)


def test_early_exit_says_so() -> None:
    assert "left early by sys.exit(0)" in headline(record_of(SystemExit(0)))


def test_long_text_and_traceback_keep_head_and_tail() -> None:
    record = record_of(ValueError("head " + "x" * 10_000_000 + " tail"))
    text, trace = str(record["text"]), str(record["traceback"])
    assert len(text.encode()) <= MAX_TEXT_BYTES
    assert len(trace.encode()) <= MAX_TRACEBACK_BYTES
    assert text.startswith("head ") and text.endswith(" tail")
    assert trace.startswith("Traceback") and trace.rstrip().endswith(" tail")
    assert "bytes left out" in text


def test_curable_error_is_shown_without_a_traceback() -> None:
    assert render(record_of(UsageError("--tp 3: use 1 or 2"))).count("\n") == 1
    assert "Traceback" in render(record_of(ValueError("ours")))
    assert record_of(UsageError("x"))["exit_code"] == ExitCode.USAGE
    assert record_of(CheckpointError("x"))["exit_code"] == ExitCode.ERROR


def test_unreadable_record_is_shown_as_it_is() -> None:
    assert "garbage" in headline(decode(b"garbage"))
    assert "[1]" in headline(decode(b"[1]"))


def test_alarm_rings_as_a_failed_peer() -> None:
    alarm = Alarm()
    alarm.record = death("no sign of life for 15 s", rank=2)
    with pytest.raises(PeerFailedError, match=r"rank 2 failed: no sign of life for 15 s"):
        alarm.ring()


def test_remote_error_pickles_and_names_the_ranks() -> None:
    error = RemoteError([record_of(ValueError("first")), death("gone", rank=5)])
    again = pickle.loads(pickle.dumps(error))
    assert again.records == error.records
    assert "ValueError: first" in str(again) and "rank 5 failed too" in str(again)
    assert describe(error, rank=0, host="h") == error.records[0]


def test_voted_error_has_the_exit_code_of_the_vote() -> None:
    assert VotedError("x", ExitCode.USAGE).exit_code == ExitCode.USAGE
    assert VotedError("x").exit_code == ExitCode.ERROR


EXCEPTION = ("rank 1", "ValueError: broken on purpose", "Traceback")
EXIT = ("rank 1", "left early by sys.exit(0)")
CELLS = {  # tests/test_faults.py has those of a job; here are the ways out of the waits
    ("exception", "load"): EXCEPTION,
    ("exit", "load"): EXIT,
    ("exception", "step"): (*EXCEPTION, "rank 0 has answered what was open"),
    ("exit", "step"): (*EXIT, "rank 0 has answered what was open"),
    ("exception", "pool"): EXCEPTION,
    ("kill", "pool"): ("rank 1", "signal 9"),
    ("SIGTERM", "load"): ("rank 0", "got SIGTERM"),
    ("SIGINT", "step"): ("rank 0", "got SIGTERM"),
    ("hard exit", "step"): ("rank 1", "exiting"),
    ("exception", "blocked"): ("rank 1", "ValueError: broken on purpose"),
    ("stall", "blocked"): ("no progress for 3 s", "stacks of rank 0", "stacks of rank 1", "in blocked_peer"),
    ("exit", "before MPI"): ("is not there for 10 s: it ended before the others, or never started",),
    ("SIGKILL launcher", "step"): (),
}


@pytest.fixture(scope="module")
def cells(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Cell]:
    """All cells, run to their end; prints the table."""
    launcher = mpirun.find_launcher()
    if launcher.family != "openmpi":
        pytest.skip("the messages expected of the launcher are Open MPI's")
    made = {key: Cell(*key, launcher="openmpi") for key in CELLS}
    folder = tmp_path_factory.mktemp("cells")
    run_cells(list(reversed(made.values())), folder, lambda cell: by_mpirun(launcher))  # the long ones first
    capture = pytestconfig.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        print("\n" + table(list(made.values())))
    return made


@pytest.mark.parametrize(("fault", "phase"), CELLS)
def test_fault_ends_the_job(cells: dict[tuple[str, str], Cell], fault: str, phase: str) -> None:
    cell = cells[fault, phase]
    assert cell.met_at is not None, f"the fault was never met:\n{cell.output}"
    assert cell.gone_s is not None, f"processes were left:\n{cell.output}"
    assert cell.gone_s < 20
    assert cell.returncode != 0
    for text in CELLS[fault, phase]:
        assert text in cell.output
