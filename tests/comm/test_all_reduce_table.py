"""The measured choice between strategies, and the choice where nothing was measured."""

import pytest

from dist_infer.comm.all_reduce_measured import TABLE
from dist_infer.comm.all_reduce_table import default_strategy, look_up, steps_of, table_source
from dist_infer.comm.strategy import Strategy, Table

MADE_UP: Table = {("gpu", 4, "norm", 7168): ((8, Strategy.ONE_SHOT), (128, Strategy.TWO_SHOT), (512, Strategy.GATHER))}


@pytest.mark.parametrize(
    ("num_tokens", "chosen"),
    [
        (1, Strategy.ONE_SHOT),
        (8, Strategy.ONE_SHOT),
        (9, Strategy.TWO_SHOT),
        (128, Strategy.TWO_SHOT),
        (512, Strategy.GATHER),
        (9999, Strategy.GATHER),
    ],
)
def test_the_first_limit_that_holds_decides(num_tokens: int, chosen: Strategy) -> None:
    found = look_up(device="gpu", num_ranks=4, op="norm", hidden=7168, num_tokens=num_tokens, table=MADE_UP)
    assert found is chosen


@pytest.mark.parametrize(
    ("device", "num_ranks", "op", "hidden"),
    [("cpu", 4, "norm", 7168), ("gpu", 2, "norm", 7168), ("gpu", 4, "none", 7168), ("gpu", 4, "norm", 6144)],
)
def test_what_was_not_measured_has_no_entry(device: str, num_ranks: int, op: str, hidden: int) -> None:
    assert look_up(device=device, num_ranks=num_ranks, op=op, hidden=hidden, num_tokens=1, table=MADE_UP) is None


@pytest.mark.parametrize(
    ("num_ranks", "num_bytes", "chosen"),
    [
        (2, 1 << 30, Strategy.ONE_SHOT),
        (3, 1 << 19, Strategy.ONE_SHOT),
        (3, (1 << 19) + 1, Strategy.TWO_SHOT),
        (8, 14336 * 10, Strategy.ONE_SHOT),
        (8, 14336 * 11, Strategy.TWO_SHOT),
    ],
)
def test_default(num_ranks: int, num_bytes: int, chosen: Strategy) -> None:
    assert default_strategy(num_ranks=num_ranks, num_bytes=num_bytes) is chosen


def test_the_table_holds_rising_limits_and_strategies_of_one_class() -> None:
    for (_, num_ranks, op, hidden), steps in TABLE.items():
        limits = [limit for limit, _ in steps]
        assert limits == sorted(set(limits)) and num_ranks > 1 and hidden > 0 and op in ("none", "norm", "quant")
        assert {strategy for _, strategy in steps} <= {Strategy.GATHER, Strategy.ONE_SHOT, Strategy.TWO_SHOT}


TIMES = [
    (1, {Strategy.ONE_SHOT: 5.0, Strategy.TWO_SHOT: 8.0}),
    (4, {Strategy.ONE_SHOT: 5.2, Strategy.TWO_SHOT: 8.0}),
    (16, {Strategy.ONE_SHOT: 9.0, Strategy.TWO_SHOT: 8.9}),
    (64, {Strategy.ONE_SHOT: 20.0, Strategy.TWO_SHOT: 12.0}),
    (256, {Strategy.ONE_SHOT: 90.0, Strategy.TWO_SHOT: 30.0}),
]


def test_steps_change_where_another_way_is_clearly_faster() -> None:
    assert steps_of(TIMES) == ((16, Strategy.ONE_SHOT), (256, Strategy.TWO_SHOT))
    assert steps_of(TIMES[:1]) == ((1, Strategy.ONE_SHOT),)


def test_a_way_that_was_not_measured_at_a_size_is_left_there() -> None:
    times = [TIMES[0], (9, {Strategy.TWO_SHOT: 100.0})]
    assert steps_of(times) == ((1, Strategy.ONE_SHOT), (9, Strategy.TWO_SHOT))


@pytest.mark.parametrize("table", [{}, MADE_UP, {**MADE_UP, ("a b", 2, "none", 64): ((1, Strategy.TWO_SHOT),)}])
def test_a_table_reads_back_from_its_source(table: Table) -> None:
    names: dict[str, object] = {}
    exec(table_source(table), names)
    assert names["TABLE"] == table
