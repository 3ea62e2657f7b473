"""Which way of an all-reduce is taken: the fastest where it was measured, else a default.

All ways but the library's give the same bytes, so this decides about time only. It is the same on all ranks.
"""

from collections.abc import Sequence

from dist_infer.comm.strategy import Strategy, Table

_ONE_SHOT_BYTES = 1 << 20  # that one rank gets, up to which one shot is the default
_WORTHWHILE = 0.97  # a way other than the one before must take at most this part of its time

_HEAD = '''"""The fastest way of an all-reduce, as measured by `dist-infer tune`: data."""

from dist_infer.comm.strategy import Strategy, Table

'''


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


def steps_of(times_us: Sequence[tuple[int, dict[Strategy, float]]]) -> tuple[tuple[int, Strategy], ...]:
    """A table's entry from the times of each way at rising numbers of tokens."""
    steps: list[tuple[int, Strategy]] = []
    chosen: Strategy | None = None
    for num_tokens, of_strategy in times_us:
        best = min(of_strategy, key=lambda strategy: of_strategy[strategy])
        if chosen is None or of_strategy[best] < _WORTHWHILE * of_strategy.get(chosen, float("inf")):
            chosen = best
        if steps and steps[-1][1] is chosen:
            steps.pop()
        steps.append((num_tokens, chosen))
    return tuple(steps)


def table_source(table: Table) -> str:
    """The text of comm/all_reduce_measured.py with this table."""
    if not table:
        return f"{_HEAD}TABLE: Table = {{}}\n"
    lines = []
    for device, num_ranks, op, hidden in sorted(table):
        steps = table[device, num_ranks, op, hidden]
        shown = ", ".join(f"({limit}, Strategy.{strategy.name})" for limit, strategy in steps)
        comma = "," if len(steps) == 1 else ""
        lines.append(f'    ("{device}", {num_ranks}, "{op}", {hidden}): ({shown}{comma}),\n')
    return f"{_HEAD}TABLE: Table = {{\n{''.join(lines)}}}\n"
