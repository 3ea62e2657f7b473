"""Which way of an all-reduce is the fastest, as measured: from benchmarks/bench_all_reduce.py by `dist-infer tune`.

All ways but the library's give the same bytes, so the table decides about time only, and it is the same on all ranks.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeAlias


class Strategy(Enum):
    """How the parts of all ranks become their sum."""

    AUTO = "auto"  # one of those below, by the table
    GATHER = "gather"  # comm/collectives: any size, any wire
    ONE_SHOT = "one_shot"  # kernels/all_reduce, through peer memory
    TWO_SHOT = "two_shot"
    LIBRARY = "library"  # NCCL's or gloo's own sum; its bytes may differ


# (device, ranks, what follows the sum, hidden) -> (tokens up to which, strategy), rising; the last also holds beyond.
Table: TypeAlias = Mapping[tuple[str, int, str, int], Sequence[tuple[int, Strategy]]]

TABLE: Table = {}

_ONE_SHOT_BYTES = 1 << 20  # that one rank gets, up to which one shot is the default


def look_up(*, device: str, num_ranks: int, op: str, hidden: int, num_tokens: int, table: Table) -> Strategy | None:
    """The measured choice, None where nothing was measured."""
    steps = table.get((device, num_ranks, op, hidden))
    if not steps:
        return None
    return next((strategy for limit, strategy in steps if num_tokens <= limit), steps[-1][1])


def default_strategy(*, num_ranks: int, num_bytes: int) -> Strategy:
    """The choice where nothing was measured: one shot sends more bytes from three ranks on, two shots wait twice."""
    if num_ranks == 2 or (num_ranks - 1) * num_bytes <= _ONE_SHOT_BYTES:
        return Strategy.ONE_SHOT
    return Strategy.TWO_SHOT
