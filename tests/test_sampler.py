"""The sampler: exact distributions, one token for every number of ranks and any company, and its edge cases."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import Mesh, split_range
from dist_infer.kernels import sample as sample_op
from dist_infer.launch.world import World
from dist_infer.sampler import Sampler, nucleus_mask, prefix_sums
from dist_infer.types import Batch
from tests.batches import Part, make_batch
from tests.devices import DEVICES
from tests.fake_collectives import FakeCollectives, run_group

Row = tuple[float, int, float]  # temperature, top_k, top_p
GREEDY: Row = (0.0, 0, 1.0)
MIXED: list[Row] = [
    GREEDY,
    (0.7, 0, 1.0),
    (1.0, 4, 1.0),
    (1.3, 0, 0.8),
    (0.9, 6, 0.7),
    (2.0, 1, 1.0),
    (1.5, 10**6, 1.0),
    (1.5, 10**6, 0.5),
    (1.0, 2, 0.1),
    (0.0, 5, 0.5),
]


def make_rows(rows: Sequence[Row], seeds: Sequence[int] | None = None, positions: Sequence[int] | None = None) -> Batch:
    """A decode of one token a row."""
    batch = make_batch([Part(token_ids=[1], start=0, pages=[0]) for _ in rows], block_size=16)
    temperature, top_k, top_p = (np.array(column) for column in zip(*rows, strict=True))
    return replace(
        batch,
        temperature=temperature.astype(np.float64),
        top_k=top_k.astype(np.int32),
        top_p=top_p.astype(np.float64),
        seeds=np.array(range(len(rows)) if seeds is None else seeds, np.int64),
        draw_positions=np.array(range(len(rows)) if positions is None else positions, np.int64),
    )


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2).to(dtype)


def sample_alone(logits: Tensor, batch: Batch) -> list[int]:
    return whole(logits.shape[1]).sample(logits, batch).tolist()


def whole(vocab_size: int) -> Sampler:
    return Sampler(SingleCollectives(), range(vocab_size), vocab_size)


def sample_split(logits: Tensor, batch: Batch, size: int) -> list[list[int]]:
    """What each of `size` ranks gets."""

    def main(tp: Collectives) -> list[int]:
        held = split_range(logits.shape[1], size, tp.rank)
        sampler = Sampler(tp, held, logits.shape[1])
        return sampler.sample(logits[:, held.start : held.stop], batch).tolist()

    return run_group(size, main)


def exact(logits: Tensor, row: Row, min_p: float = 0.0) -> npt.NDArray[np.float64]:
    """The distribution by its definition: temperature, then min-p and top-k, then top-p over the rest."""
    temperature, top_k, top_p = row
    values = logits.double().numpy() / temperature
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = [token for token in order if math.exp(values[token] - values[order[0]]) >= min_p][: top_k or None]
    weights = {token: math.exp(values[token] - values[order[0]]) for token in order}
    total, sum_before, kept = sum(weights.values()), 0.0, list[int]()
    for token in order:
        if kept and sum_before >= top_p * total:
            break
        kept.append(token)
        sum_before += weights[token]
    result = np.zeros(len(values))
    result[kept] = [weights[token] / sum_before for token in kept]
    return result


def chi_square(token_ids: Tensor, expected: npt.NDArray[np.float64]) -> float:
    counts = np.bincount(token_ids.numpy(), minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a token that has no chance"
    possible = expected > 0
    due = expected[possible] * len(token_ids)
    return float(((counts[possible] - due) ** 2 / due).sum())


DISTRIBUTIONS: list[Row] = [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.75), (1.7, 7, 0.8), (2.0, 0, 0.999)]


@pytest.mark.parametrize("row", DISTRIBUTIONS)
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_draws_follow_the_exact_distribution(row: Row, along: str) -> None:
    num_draws, logits = 20_000, make_logits(1, 10)
    steps, still = range(num_draws), [11] * num_draws
    seeds, positions = (still, steps) if along == "positions" else (steps, still)
    drawn = whole(10).sample(logits.expand(num_draws, 10), make_rows([row] * num_draws, seeds, positions))
    limit = 45  # 9 degrees of freedom at most: exceeded once in a million
    assert chi_square(drawn, exact(logits[0], row)) < limit
    hotter = (row[0] * 1.2, 0, 1.0)
    assert chi_square(drawn, exact(logits[0], hotter)) > limit, "the test would not see another temperature"


@pytest.mark.parametrize("min_p", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("row", [(1.0, 0, 1.0), (1.5, 6, 1.0), (1.2, 0, 0.8), (1.0, 8, 0.9)])
def test_min_p_draws_follow_the_exact_distribution(row: Row, min_p: float) -> None:
    num_draws, logits = 20_000, make_logits(1, 10)
    batch = make_rows([row] * num_draws, [5] * num_draws, range(num_draws))
    batch = replace(batch, min_p=np.full(num_draws, min_p))
    drawn = whole(10).sample(logits.expand(num_draws, 10), batch)
    assert chi_square(drawn, exact(logits[0], row, min_p)) < 45
    assert len(set(drawn.tolist())) == (exact(logits[0], row, min_p) > 0).sum()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_min_p_of_a_row_is_its_own_for_every_split(size: int) -> None:
    """1 leaves the likeliest alone, also where it isn't the only one; other rows of the batch have none."""
    rows: list[Row] = [(1.5, 0, 1.0), (1.5, 0, 1.0), (1.5, 5, 1.0), (0.0, 0, 1.0), (1.5, 0, 0.9)] * 4
    logits, plain = make_logits(len(rows), 40), make_rows(rows)
    logits[0, 7] = logits[0, 20] = 9.0
    min_p = np.array([1.0, 0.0, 0.3, 1.0, 0.3] * 4)
    batch = replace(plain, min_p=min_p)
    alone = sample_alone(logits, batch)
    assert sample_split(logits, batch, size) == [alone] * size
    assert alone[0] in (7, 20)
    assert alone[5::5] == logits.argmax(1)[5::5].tolist()
    without = sample_alone(logits, plain)
    assert alone[1::5] == without[1::5] and alone[3::5] == without[3::5]


def test_transformers_keeps_the_same_tokens() -> None:
    """Its warpers one after another, in the order of ours."""
    transformers = pytest.importorskip("transformers")
    logits = make_logits(200, 60)
    for temperature, top_k, top_p, min_p in ((0.7, 0, 1.0, 0.1), (1.3, 20, 0.8, 0.05), (1.0, 9, 1.0, 0.0)):
        warpers = [transformers.TemperatureLogitsWarper(temperature), transformers.MinPLogitsWarper(min_p)]
        warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
        warpers += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
        due = logits
        for warper in warpers:
            due = warper(None, due)
        values, order = logits.sort(dim=1, descending=True, stable=True)
        columns = [torch.full((200,), value, dtype=torch.float64) for value in (temperature, top_p, min_p)]
        kept = nucleus_mask(values, columns[0], torch.full((200,), top_k), columns[1], columns[2])
        assert torch.equal(kept, due.gather(1, order) > -math.inf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "size"), [(97, 1), (97, 2), (97, 3), (10, 4), (3, 4), (1, 2)])
def test_every_split_gives_the_same_tokens(vocab_size: int, size: int, dtype: torch.dtype) -> None:
    rows = MIXED * 5
    logits, batch = make_logits(len(rows), vocab_size, dtype), make_rows(rows)
    expected = sample_alone(logits, batch)
    assert sample_split(logits, batch, size) == [expected] * size
    assert all(0 <= token < vocab_size for token in expected)


@pytest.mark.ranks(2, 3)
def test_every_split_gives_the_same_tokens_over_the_wire(world: World) -> None:
    mesh = Mesh.create(world=world.size, rank=world.rank)
    tp = world.communicators(mesh).tp
    for repeat in range(6):
        rows = MIXED * (repeat + 1)
        logits, batch = make_logits(len(rows), 97, torch.float32).to(world.device), make_rows(rows)
        held = split_range(97, world.size, world.rank)
        own = Sampler(tp, held, 97).sample(logits[:, held.start : held.stop].contiguous(), batch)
        assert own.tolist() == whole(97).sample(logits, batch).tolist()
        scores = Sampler(tp, held, 97).score(logits[:, held.start : held.stop].contiguous(), own, repeat)
        assert (scores - whole(97).score(logits, own, repeat)).abs().max() < 1e-12


def test_company_and_order_do_not_matter() -> None:
    rows = MIXED * 3
    logits, batch = make_logits(len(rows), 300), make_rows(rows)
    together = sample_alone(logits, batch)
    order = np.random.default_rng(0).permutation(len(rows))
    mixed_up = make_rows([rows[row] for row in order], seeds=order.tolist(), positions=order.tolist())
    assert sample_alone(logits[order], mixed_up) == [together[row] for row in order]
    for row in range(len(rows)):
        assert sample_alone(logits[row : row + 1], make_rows([rows[row]], [row], [row])) == [together[row]]


def test_seed_and_position_key_the_noise_and_nothing_else_does() -> None:
    logits = torch.zeros(1, 1000).expand(4, 1000)
    rows = [(1.0, 0, 1.0)] * 4
    one, other_seed, other_position, again = sample_alone(logits, make_rows(rows, [5, 6, 5, 5], [9, 9, 10, 9]))
    assert one == again and len({one, other_seed, other_position}) == 3
    nucleus_row = sample_alone(logits[:1], make_rows([(1.0, 0, 0.9999)], [5], [9]))
    assert nucleus_row == [one]  # the same noise, whatever way the row goes


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_whatever_is_nearly_greedy_is_the_argmax(size: int, dtype: torch.dtype) -> None:
    """Known fault B38: nothing overflows, and rows next to them with a banned token are not disturbed."""
    near: list[Row] = [
        GREEDY,
        (1e-5, 0, 1.0),
        (1e-12, 0, 1.0),
        (1e-300, 0, 0.9),
        (1e-5, 3, 1.0),
        (1e-12, 3, 0.5),
        (1.0, 0, 1e-8),
        (1.0, 0, 0.0),
        (1.0, 5, 1e-8),
        (1.0, 1, 1.0),
    ]
    logits = torch.tensor([[-3.0, 896.0, -math.inf, 892.0, 0.0, -60000.0]]).to(dtype).repeat(len(near) + 5, 1)
    rows = [*near, *[(1.0, 0, 1.0)] * 5]
    logits[len(near) :, 1] = -math.inf
    tokens = sample_split(logits, make_rows(rows), size)
    assert tokens == [[1] * len(near) + [3] * 5] * size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_logits_go_to_the_smaller_id(size: int) -> None:
    logits = torch.tensor([[0.0, 7, 1, 7, 7, 2, 7, 1]]).repeat(3, 1)
    rows: list[Row] = [GREEDY, (1.0, 1, 1.0), (1.0, 0, 1e-9)]
    assert sample_split(logits, make_rows(rows), size) == [[1, 1, 1]] * size
    many = make_rows([(1.0, 2, 1.0)] * 50)
    assert set(sample_split(logits[:1].repeat(50, 1), many, size)[0]) == {1, 3}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("fill", [math.nan, -math.inf])
def test_rows_without_a_possible_token_give_the_first_one(size: int, fill: float) -> None:
    rows: list[Row] = [GREEDY, (1.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 3, 0.5), (1.0, 0, 0.5), (1e-12, 0, 0.5)]
    logits = torch.full((len(rows) * 2, 10), fill)
    logits[len(rows) :, 6] = -2.0  # the only possible one
    assert sample_split(logits, make_rows(rows * 2), size) == [[0] * 6 + [6] * 6] * size


@pytest.mark.parametrize("row", [GREEDY, (1.0, 0, 1.0), (1.0, 20, 1.0), (1.0, 9, 0.9), (1.0, 0, 0.9)])
def test_padding_never_wins(row: Row) -> None:
    """Known fault B41: a vocabulary of 10 padded to 16 on two ranks; the padding's zeros beat every real logit."""
    logits = torch.full((64, 16), -3.0)
    logits[:, 9] = -1.0
    logits[:, 10:] = 0.0
    batch = make_rows([row] * 64)

    def main(tp: Collectives) -> list[int]:
        held = range(8 * tp.rank, 8 * tp.rank + 8)
        return Sampler(tp, held, 10).sample(logits[:, held.start : held.stop], batch).tolist()

    first, second = run_group(2, main)
    assert first == second == sample_alone(logits[:, :10], batch)
    assert max(first) <= 9 and (row != GREEDY or set(first) == {9})


def test_collectives_follow_from_the_batch_and_only_nucleus_rows_gather_logits() -> None:
    logits = make_logits(4, 10)
    steps: list[list[Row]] = [
        [GREEDY] * 4,
        [GREEDY, (1.0, 0, 1.0)] * 2,
        [GREEDY, (1.0, 3, 0.9)] * 2,
        [(1.0, 0, 0.5)] * 4,
    ]

    def main(tp: Collectives) -> list[tuple[str, tuple[int, ...]]]:
        assert isinstance(tp, FakeCollectives)
        held = split_range(10, 2, tp.rank)
        sampler = Sampler(tp, held, 10)
        for rows in (*steps, steps[-1]):
            sampler.sample(logits[:, held.start : held.stop], make_rows(rows))
        return tp.calls

    first, second = run_group(2, main)
    candidates = [("all_gather", (8,)), ("all_gather", (8,)), ("all_gather", (16,))]
    full = [("all_gather", (1,)), ("all_gather", (5, 4)), ("all_gather", (5, 4))]
    assert first == second == [*candidates, *full]


def test_no_rows_need_no_collective() -> None:
    batch = make_batch([Part(token_ids=[1, 2], start=0, pages=[0], wants_logits=False)], block_size=16)

    def main(tp: Collectives) -> int:
        assert isinstance(tp, FakeCollectives)
        tokens = Sampler(tp, range(5 * tp.rank, 5 * tp.rank + 5), 10).sample(torch.zeros(0, 5), batch)
        assert tokens.shape == (0,) and tokens.dtype == torch.int64
        return len(tp.calls)

    assert run_group(2, main) == [0, 0]


def test_a_dummy_batch_is_sampled() -> None:
    assert sample_alone(make_logits(1, 10), Batch.dummy()) == [make_logits(1, 10).argmax().item()]


@pytest.mark.gpu
def test_tokens_on_a_gpu_are_those_of_the_cpu() -> None:
    rows = MIXED * 20
    logits, batch = make_logits(len(rows), 1000, torch.float32), make_rows(rows)
    assert whole(1000).sample(logits.cuda(), batch).tolist() == sample_alone(logits, batch)


@pytest.mark.parametrize("device", DEVICES)
def test_prefix_sums_do_not_depend_on_what_follows(device: str) -> None:
    x = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    sums = prefix_sums(x)
    assert torch.allclose(sums, x.cumsum(1), rtol=1e-13)
    for width in (1, 2, 63, 129, 999):
        assert torch.equal(prefix_sums(x[:, :width]), sums[:, :width])
    assert torch.equal(sums.cpu(), prefix_sums(x.cpu()))


def test_the_nucleus_is_the_smallest_prefix_that_is_enough() -> None:
    values = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log().repeat(6, 1)
    top_p = torch.tensor([0.0, 0.4 - 1e-9, 0.4 + 1e-9, 0.89, 1.0, 0.7], dtype=torch.float64)
    top_k = torch.tensor([0, 0, 0, 0, 9, 2])
    kept = nucleus_mask(values, torch.ones(6, dtype=torch.float64), top_k, top_p, torch.zeros(6, dtype=torch.float64))
    assert kept.sum(1).tolist() == [1, 1, 2, 3, 4, 2]
    assert bool((kept.long().diff(dim=1) <= 0).all())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="1 rows of 10 logits are due, not"):
        whole(10).sample(torch.zeros(2, 10), make_rows([GREEDY]))
    with pytest.raises(ValueError, match="a vocabulary of 0"):
        Sampler(SingleCollectives(), range(1), 0)


def test_keys_on_the_host_are_those_on_a_device() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (200,), generator=generator)
    positions = torch.arange(200) * 977
    expected = sample_op.row_keys(seeds, positions)
    assert np.array_equal(sample_op.host_row_keys(seeds.numpy(), positions.numpy()), expected.numpy())


def test_a_plan_keeps_rows_of_one_way_in_order_and_sorts_others() -> None:
    sampler = Sampler(SingleCollectives(), range(50), 50)
    plan = sampler.plan(make_rows([(0.7, 0, 1.0)] * 5))
    assert plan.columns["rows"].tolist() == [0, 1, 2, 3, 4] and plan.sizes == (0, 5, 0, 0)
    mixed = sampler.plan(make_rows(MIXED))
    assert mixed.columns["rows"].tolist() == [0, 5, 9, 1, 6, 2, 4, 8, 3, 7] and mixed.sizes == (3, 2, 3, 2)
    assert mixed.num_candidates == 6
    assert mixed.columns["top_k"].tolist() == [[row[1] for row in MIXED][idx] for idx in mixed.columns["rows"]]
    greedy = sampler.plan(make_rows([GREEDY] * 3))
    assert greedy.columns["keys"].tolist() == [0, 0, 0]
