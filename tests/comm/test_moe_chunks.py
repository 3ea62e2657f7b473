"""The MoE chunk scheduler: all ranks make one plan, and every token is in it once."""

import random
from collections.abc import Iterator

import pytest

from dist_infer.comm.moe_chunks import ChunkPlan, plan_chunks

MAX_RANKS, MAX_TOKENS = 64, 20_000


def random_tables(num_tables: int) -> Iterator[tuple[list[int], int | None]]:
    """Rows by rank and a limit: even, skewed, sparse, empty, one token."""
    rng = random.Random(4)
    for _ in range(num_tables):
        num_ranks = rng.choice([1, 2, 3, 4, 7, 8, 64, rng.randint(1, MAX_RANKS)])
        most = rng.choice([1, 3, 100, MAX_TOKENS])
        zeros = rng.choice([0.0, 0.2, 0.9, 1.0])
        table = [0 if rng.random() < zeros else rng.randint(0, most) for _ in range(num_ranks)]
        # No more than about 200 chunks, unless there are few tokens.
        limit = rng.choice([None, 1, 7, 100, 4096, 30_000]) if sum(table) < 500 else rng.choice([None, 100, 4096])
        if limit is not None and sum(table) // limit > 200:
            limit = -(-sum(table) // rng.randint(1, 200))
        yield table, limit


def check_plan(table: list[int], limit: int | None) -> None:
    """Every property of a plan."""
    plans = [plan_chunks(list(table), limit) for _ in table]  # each rank makes its own
    plan = plans[0]
    vectors = [plan.sizes(chunk) for chunk in range(plan.num_chunks)]
    own = [[plan.own(rank, chunk) for chunk in range(plan.num_chunks)] for rank in range(len(table))]
    assert all(other == plan for other in plans)
    for rank, rows in enumerate(table):
        assert plan.rows(rank) == rows
        assert [row for part, _ in own[rank] for row in part] == list(range(rows)), "each row once, in order"
        lengths = [len(part) for part, _ in own[rank]]
        assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
        for chunk, (part, is_stand_in) in enumerate(own[rank]):
            assert is_stand_in == (len(part) == 0)
            assert vectors[chunk][rank] == (1 if is_stand_in else len(part))
    for chunk in range(plan.num_chunks):
        assert any(not parts[chunk][1] for parts in own) or sum(table) == 0, "a chunk of stand-ins only"
        if limit is not None:
            assert sum(vectors[chunk]) < limit + len(table)
    num_stand_ins = sum(is_stand_in for parts in own for _, is_stand_in in parts)
    assert sum(map(sum, vectors)) == sum(table) + num_stand_ins
    assert plan.num_chunks <= max(1, *table) and (limit is not None or plan.num_chunks == 1)


def test_random_tables() -> None:
    for table, limit in random_tables(300):
        check_plan(table, limit)


def test_tables_by_hypothesis() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    def check(table: list[int], limit: int | None) -> None:
        check_plan(table, None if limit is None else max(limit, sum(table) // 200))

    tables = st.lists(st.integers(0, MAX_TOKENS), min_size=1, max_size=MAX_RANKS)
    given = hypothesis.given(table=tables, limit=st.one_of(st.none(), st.integers(1, 10**6)))
    hypothesis.settings(max_examples=100, deadline=None, database=None)(given(check))()


def test_by_hand() -> None:
    plan = plan_chunks([5, 0, 1, 9], 4)
    assert plan.num_chunks == 4
    assert [plan.sizes(chunk) for chunk in range(4)] == [(2, 1, 1, 3), (1, 1, 1, 2), (1, 1, 1, 2), (1, 1, 1, 2)]
    assert [plan.own(0, chunk) for chunk in range(4)] == [
        (range(2), False),
        (range(2, 3), False),
        (range(3, 4), False),
        (range(4, 5), False),
    ]
    assert [plan.own(1, chunk)[1] for chunk in range(4)] == [True] * 4
    assert [plan.own(2, chunk)[1] for chunk in range(4)] == [False, True, True, True]
    assert plan.quotients == (1, 0, 0, 2) and plan.remainders == (1, 0, 1, 1)


def test_limits() -> None:
    assert plan_chunks([7, 3], None).num_chunks == 1
    assert plan_chunks([7, 3], 10).num_chunks == 1
    assert plan_chunks([7, 3], 9).num_chunks == 2
    assert plan_chunks([1, 1, 1, 1], 1).num_chunks == 1  # more chunks would hold nothing but stand-ins
    assert plan_chunks([0, 0], 1).sizes(0) == (1, 1)


def test_the_table_is_left_untouched() -> None:
    table = [0, 3, 1]
    plan = plan_chunks(table, 1)
    for chunk in range(plan.num_chunks):
        plan.sizes(chunk)
    assert table == [0, 3, 1]


def test_planted_fault_each_rank_patches_its_own_entry_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that this module exists to prevent."""

    def sizes(self: ChunkPlan, chunk: int) -> tuple[int, ...]:
        real = [q + (chunk < r) for q, r in zip(self.quotients, self.remainders, strict=True)]
        return tuple([rows or 1 if rank == 0 else rows for rank, rows in enumerate(real)])

    check_plan([5, 0, 1, 9], 4)
    monkeypatch.setattr(ChunkPlan, "sizes", sizes)  # as rank 0 would have it
    with pytest.raises(AssertionError):
        check_plan([5, 0, 1, 9], 4)


@pytest.mark.parametrize(("table", "limit"), [([], 1), ([1, -1], 1), ([1], 0), ([1], -5)])
def test_bad_tables_are_refused(table: list[int], limit: int | None) -> None:
    with pytest.raises(ValueError, match=r"plan_chunks: rows \["):
        plan_chunks(table, limit)


@pytest.mark.parametrize("chunk", [-1, 3])
def test_chunks_that_are_not_there_are_refused(chunk: int) -> None:
    plan = plan_chunks([3], 1)
    with pytest.raises(ValueError, match=f"chunk {chunk} is not one of 3"):
        plan.sizes(chunk)
    with pytest.raises(ValueError, match=f"chunk {chunk} is not one of 3"):
        plan.own(0, chunk)
