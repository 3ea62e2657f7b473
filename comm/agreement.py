"""The agreement: one fixed-size record a rank and a step, all-gathered, and the decisions that follow from the table.

Every decision that changes which collective runs, or its size, is `decide(table, ...)`: a pure function of what all
ranks hold alike, so no two ranks can disagree. Rule numbers are those of docs/protocol.md.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dist_infer.comm.mesh import Mesh
from dist_infer.types import BatchKind, Int64Array

NO_TOKENS = -1
"""Graph bucket wanted by a rank that has nothing to run: any bucket will do."""
EAGER = 0
"""Graph bucket wanted by a rank that can't replay a graph."""


class ControlPlane(Protocol):
    """Small messages between ranks. Every wait polls, and raises PeerFailedError once the watch has seen a failure."""

    rank: int
    size: int

    def broadcast_news(self, data: bytes) -> None:
        """Rank 0: send the news of a step, exactly one a step (rule 1)."""

    def receive_news(self, on_poll: Callable[[], None], *, idle: bool) -> bytes:
        """Other ranks: wait for the news; `on_poll` runs at every turn of the poll, which sleeps longer when `idle`."""

    def post_record(self, record: Int64Array) -> None:
        """Start the all-gather of the records; non-blocking."""

    def wait_table(self) -> Int64Array:
        """Wait for the records of all ranks. Shapes: [size, fields]."""

    def send_outputs(self, step: int, data: bytes) -> None:
        """A group's root: send rank 0 the outputs of a step; non-blocking."""

    def take_outputs(self) -> list[tuple[int, int, bytes]]:
        """Rank 0: what has arrived, as (source rank, step, data), in order a source; never waits."""

    def wake_root(self) -> None:
        """A sleeping worker: send rank 0 one empty wake-up (rule 13)."""

    def woken(self) -> bool:
        """Rank 0: a wake-up is there. Probes, does not take it."""

    def take_wake(self, rank: int) -> None:
        """Rank 0: take exactly one wake-up of `rank`."""

    def wait(self, ready: Callable[[], bool], *, idle: bool) -> None:
        """Poll `ready` until it is true."""

    def farewell(self, code: int) -> list[int]:
        """The last all-gather: exit codes by rank (rule 15)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one rank tells all others in a step (rule 9)."""

    step: int
    kind: BatchKind
    tokens: int
    sequences: int
    live: int
    graph_bucket: int
    error: bool
    stop: bool
    woke: bool
    schedule_digest: int
    decision_digest: int

    def encode(self) -> Int64Array:
        """Shapes: [fields]."""
        return np.array([int(getattr(self, name)) for name in FIELDS], np.int64)


FIELDS: tuple[str, ...] = tuple(Record.__dataclass_fields__)
_COLUMN = {name: idx for idx, name in enumerate(FIELDS)}
_EQUAL_EVERYWHERE = ("step", "decision_digest")
_EQUAL_IN_A_GROUP = ("kind", "tokens", "sequences", "live", "graph_bucket", "schedule_digest")
_IS_EQUAL_EVERYWHERE = np.array([name in _EQUAL_EVERYWHERE for name in FIELDS])
_IS_EQUAL_IN_A_GROUP = _IS_EQUAL_EVERYWHERE | np.array([name in _EQUAL_IN_A_GROUP for name in FIELDS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What all ranks do in a step, equal on all of them."""

    step: int
    failed_ranks: tuple[int, ...]  # ranks that voted an error
    fault: str | None  # ranks that must hold the same state do not
    drain: bool
    launched: bool
    quiet: bool
    over: bool
    kind: BatchKind  # the kind that needs most of a step, over all groups
    rank_tokens: tuple[int, ...]  # real tokens of every rank; 0: it runs a dummy
    graph_bucket: int  # rows of the graph to replay; EAGER: none
    woke: tuple[int, ...]  # ranks whose wake-up rank 0 takes now

    @property
    def leave_now(self) -> bool:
        """All ranks leave at this table, nothing of the step is launched (rule 16)."""
        return bool(self.failed_ranks) or self.fault is not None

    def digest(self) -> int:
        """Compared in the next table: equal on all ranks."""
        words = (
            self.step,
            self.drain,
            self.launched,
            self.quiet,
            self.over,
            self.kind,
            self.graph_bucket,
            *self.rank_tokens,
        )
        return zlib.crc32(np.array(words, np.int64).tobytes())


def find_fault(table: Int64Array, mesh: Mesh) -> str | None:
    """The first field in which two ranks differ that must not, in words; None where all is well.

    A rank with an error has scheduled nothing and is left out of the comparison inside its group.
    """
    if _agrees(table, mesh):
        return None
    for name in _EQUAL_EVERYWHERE:
        column = table[:, _COLUMN[name]]
        differs = np.flatnonzero(column != column[0])
        if len(differs):
            return f"rank {differs[0]} has {name} {column[differs[0]]}, rank 0 has {column[0]}"
    sound = table[:, _COLUMN["error"]] == 0
    for group in range(mesh.dp):
        ranks = [rank for rank in mesh.group_ranks(group) if sound[rank]]
        for name in _EQUAL_IN_A_GROUP:
            column = table[ranks, _COLUMN[name]]
            differs = np.flatnonzero(column != column[:1])
            if len(differs):
                other = int(differs[0])
                return (
                    f"rank {ranks[other]} has {name} {column[other]}, rank {ranks[0]} of the same group has {column[0]}"
                )
    return None


def _agrees(table: Int64Array, mesh: Mesh) -> bool:
    """All that must be equal is, at a glance."""
    if mesh.world == 1:
        return True
    groups = table.reshape(mesh.dp, mesh.tp, -1)
    in_groups = (groups != groups[:, :1]) & _IS_EQUAL_IN_A_GROUP
    everywhere = (groups[:, 0] != groups[0, 0]) & _IS_EQUAL_EVERYWHERE
    return not (in_groups.any() or everywhere.any())


def decide(
    table: Int64Array, *, mesh: Mesh, depth: int, was_launched: bool, drain: bool, end_of_input: bool
) -> Decision:
    """Rule 5: everything that follows from a table. `was_launched` and `drain` are those of the step before.

    Shapes: table [world, fields].
    """
    # A few numbers: plain Python is faster on them than numpy.
    columns = dict(zip(FIELDS, zip(*table.tolist(), strict=True), strict=True))
    tokens = columns["tokens"]
    wanted = [bucket for bucket, count in zip(columns["graph_bucket"], tokens, strict=True) if count > 0]
    drain = drain or any(columns["stop"])
    launched = any(tokens)
    quiet = not launched and not any(columns["live"]) and not (depth == 1 and was_launched)
    return Decision(
        step=columns["step"][0],
        failed_ranks=_ranks_with(columns["error"]),
        fault=find_fault(table, mesh),
        drain=drain,
        launched=launched,
        quiet=quiet,
        over=quiet and (end_of_input or drain),
        kind=BatchKind(max(columns["kind"])),
        rank_tokens=tokens,
        graph_bucket=max(wanted) if wanted and EAGER not in wanted else EAGER,
        woke=_ranks_with(columns["woke"]),
    )


def _ranks_with(flags: Sequence[int]) -> tuple[int, ...]:
    return tuple(rank for rank, flag in enumerate(flags) if flag)


class Agreement:
    """The agreement of a rank, step after step.

    Ranks: collective over the world. Errors: PeerFailedError out of a wait.
    """

    def __init__(self, mesh: Mesh, control: ControlPlane, depth: int) -> None:
        self._mesh = mesh
        self._control = control
        self._depth = depth
        self.last = Decision(
            step=0,
            failed_ranks=(),
            fault=None,
            drain=False,
            launched=False,
            quiet=True,  # before step 1 nothing is live and nothing is in flight
            over=False,
            kind=BatchKind.NONE,
            rank_tokens=(0,) * mesh.world,
            graph_bucket=EAGER,
            woke=(),
        )

    def post(self, record: Record) -> None:
        """Rule 3: start the exchange, after everything that may fail and be voted on."""
        self._control.post_record(record.encode())

    def wait(self, *, end_of_input: bool) -> Decision:
        """The table of the step, turned into its decision."""
        self.last = decide(
            self._control.wait_table(),
            mesh=self._mesh,
            depth=self._depth,
            was_launched=self.last.launched,
            drain=self.last.drain,
            end_of_input=end_of_input,
        )
        return self.last


def groups_with_tokens(decision: Decision, mesh: Mesh) -> Sequence[int]:
    """The groups that send outputs for this step (rule 8)."""
    return [group for group in range(mesh.dp) if decision.rank_tokens[mesh.root_of(group)] > 0]
