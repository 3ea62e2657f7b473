"""Decisions are a pure function of the table."""

import numpy as np
import pytest

from dist_infer.comm.agreement import EAGER, FIELDS, NO_TOKENS, Decision, Record, decide, find_fault, groups_with_tokens
from dist_infer.comm.mesh import Mesh
from dist_infer.types import BatchKind, Int64Array

MESH = Mesh.create(world=4, rank=0, dp=2)  # groups (0, 1) and (2, 3)


def record(**changes: object) -> Record:
    values: dict[str, object] = {
        "step": 5,
        "kind": BatchKind.DECODE,
        "tokens": 3,
        "sequences": 3,
        "live": 4,
        "graph_bucket": 4,
        "error": False,
        "stop": False,
        "woke": False,
        "schedule_digest": 77,
        "decision_digest": 99,
    }
    return Record(**(values | changes))  # type: ignore[arg-type]


IDLE = record(kind=BatchKind.NONE, tokens=0, sequences=0, live=0, graph_bucket=NO_TOKENS, schedule_digest=0)


def table(*records: Record) -> Int64Array:
    return np.stack([r.encode() for r in records])


def decision(*records: Record, depth: int = 0, was: bool = False, drain: bool = False, end: bool = False) -> Decision:
    return decide(table(*records), mesh=MESH, depth=depth, was_launched=was, drain=drain, end_of_input=end)


def test_a_record_keeps_every_field_in_its_column() -> None:
    encoded = record(step=2**40, error=True).encode()
    assert encoded.dtype == np.int64
    assert dict(zip(FIELDS, encoded.tolist(), strict=True))["step"] == 2**40
    assert encoded[FIELDS.index("error")] == 1


def test_tokens_of_every_rank_come_from_the_table() -> None:
    d = decision(record(), record(), IDLE, IDLE)
    assert d.launched and not d.quiet and not d.leave_now
    assert d.rank_tokens == (3, 3, 0, 0)
    assert groups_with_tokens(d, MESH) == [0]


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [((4, 8), 8), ((4, EAGER), EAGER), ((EAGER, EAGER), EAGER), ((4, NO_TOKENS), 4)],
)
def test_graph_bucket_is_the_largest_wanted_or_eager(buckets: tuple[int, int], expected: int) -> None:
    first, second = (record(graph_bucket=b) if b != NO_TOKENS else IDLE for b in buckets)
    assert decision(first, first, second, second).graph_bucket == expected


def test_quiet_needs_no_tokens_no_live_request_and_nothing_in_flight() -> None:
    waiting = record(kind=BatchKind.NONE, tokens=0, sequences=0, live=1, graph_bucket=NO_TOKENS, schedule_digest=0)
    assert decision(IDLE, IDLE, IDLE, IDLE).quiet
    assert not decision(waiting, waiting, IDLE, IDLE).quiet
    assert not decision(IDLE, IDLE, IDLE, IDLE, depth=1, was=True).quiet
    assert decision(IDLE, IDLE, IDLE, IDLE, depth=0, was=True).quiet


def test_over_is_quiet_after_end_of_input_or_stop() -> None:
    stop = record(kind=BatchKind.NONE, tokens=0, sequences=0, live=0, graph_bucket=-1, schedule_digest=0, stop=True)
    assert not decision(IDLE, IDLE, IDLE, IDLE).over
    assert decision(IDLE, IDLE, IDLE, IDLE, end=True).over
    assert decision(IDLE, IDLE, IDLE, stop).drain
    assert decision(IDLE, IDLE, IDLE, stop).over
    assert not decision(record(), record(), IDLE, IDLE, end=True, drain=True).over


def test_an_error_makes_all_leave() -> None:
    failed = record(error=True, tokens=0, sequences=0, kind=BatchKind.NONE, graph_bucket=NO_TOKENS, schedule_digest=0)
    d = decision(record(), failed, IDLE, IDLE)
    assert d.failed_ranks == (1,)
    assert d.leave_now
    assert d.fault is None  # a failed rank schedules nothing and is not held against its group


@pytest.mark.parametrize("name", ["tokens", "sequences", "live", "graph_bucket", "schedule_digest", "kind"])
def test_ranks_of_one_group_that_differ_are_named(name: str) -> None:
    value = BatchKind.PREFILL if name == "kind" else 2
    fault = find_fault(table(record(), record(**{name: value}), IDLE, IDLE), MESH)
    assert fault is not None
    assert f"rank 1 has {name} {int(value)}" in fault


@pytest.mark.parametrize("name", ["step", "decision_digest"])
def test_what_must_be_equal_everywhere(name: str) -> None:
    fault = find_fault(table(record(), record(), record(), record(**{name: 6})), MESH)
    assert fault is not None
    assert f"rank 3 has {name} 6" in fault


def test_groups_may_differ() -> None:
    assert find_fault(table(record(), record(), record(tokens=1), record(tokens=1)), MESH) is None
