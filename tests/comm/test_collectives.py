"""Collectives against their oracles, bit for bit, on 1, 2 and 4 ranks.

Every rank makes the inputs of all ranks from one seed, so it can compute what it must get without asking.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from dist_infer.comm import collectives
from dist_infer.comm.bootstrap import Backend, open_process_groups
from dist_infer.comm.collectives import Collectives, SingleCollectives, TorchCollectives, ordered_sum
from dist_infer.comm.mesh import Mesh, split_sizes
from dist_infer.comm.reference import collectives as reference
from dist_infer.errors import PeerFailedError
from dist_infer.launch.world import World

SUM_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WIRE_DTYPES = [*SUM_DTYPES, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn]
LENGTHS = [0, 1, 63, 129, 5000]
REPEATS = 6
WAYS = {"whole": 1 << 40, "sliced": 0}  # max_whole_bytes that forces one of the two ways


@pytest.fixture(scope="module")
def group(world: World) -> Collectives:
    """All ranks on one axis."""
    return world.communicators(Mesh.create(world=world.size, rank=world.rank)).world


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """One of the two ways of an all-reduce."""
    return str(request.param)


@pytest.fixture
def forced(way: str, group: Collectives, monkeypatch: pytest.MonkeyPatch) -> Collectives:
    """The same group, made to reduce that way."""
    if isinstance(group, TorchCollectives):
        monkeypatch.setattr(group, "max_whole_bytes", WAYS[way])
    return group


def _inputs(size: int, shape: Sequence[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """A tensor for each rank. From three ranks on, two of them cancel, and what is lost below them tells the order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((size, *shape), generator=generator, dtype=torch.float64)
    if not dtype.is_floating_point:
        return list((x * 50).abs().to(dtype))
    if size > 2:
        large = 2.0**12 if dtype == torch.float16 else 2.0**20
        place = torch.rand((size, *shape), generator=generator).argsort(dim=0)
        x = x.masked_fill(place == 0, large).masked_fill(place == 1, -large)
    return list(x.to(dtype))


def _assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bytes; NaN equals NaN. Names the first difference."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if actual.dtype in SUM_DTYPES:
        nan = actual.isnan()
        assert torch.equal(nan, expected.isnan()), "NaN in other places"
        actual, expected = actual.masked_fill(nan, 0), expected.masked_fill(nan, 0)
    actual_bytes, expected_bytes = (x.contiguous().view(-1).view(torch.uint8) for x in (actual, expected))
    differs = (actual_bytes != expected_bytes).nonzero()
    if len(differs):
        idx = int(differs[0]) // actual.element_size()
        values = f"{actual.reshape(-1)[idx]} for {expected.reshape(-1)[idx]}"
        raise AssertionError(f"{len(differs)} bytes differ, first in element {idx}: {values}")


def _assert_same_on_all(group: Collectives, x: Tensor) -> None:
    """Every rank holds the bits of rank 0."""
    own = x.reshape(-1).view(torch.uint8)
    for row in group.all_gather(own).view(group.size, -1):
        assert torch.equal(row, own)


def _lag(group: Collectives, turn: int) -> None:
    """One rank, another each time, comes late."""
    if turn % group.size == group.rank:
        time.sleep(0.01)


def _check_all_reduce(group: Collectives, dtype: torch.dtype, shape: Sequence[int], seed: int) -> None:
    inputs = _inputs(group.size, shape, dtype, seed)
    before = inputs[group.rank].clone()
    result = group.all_reduce(inputs[group.rank])
    _assert_same_bits(result, reference.all_reduce(inputs)[group.rank])
    _assert_same_on_all(group, result)
    _assert_same_bits(inputs[group.rank], before)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_all_reduce(world: World, forced: Collectives, dtype: torch.dtype) -> None:
    for turn in range(REPEATS):
        _lag(forced, turn)
        for num in LENGTHS:
            _check_all_reduce(forced, dtype, (num,), seed=100 * turn + num)
    _check_all_reduce(forced, dtype, (), seed=1)
    _check_all_reduce(forced, dtype, (3, 5, 7), seed=2)


@pytest.mark.ranks(2, 4)
def test_both_ways_are_taken_and_agree(world: World, group: Collectives) -> None:
    """Just up to the limit whole, just beyond it sliced: told by the bytes that are sent."""
    assert isinstance(group, TorchCollectives)
    for num in (group.max_whole_bytes // 4, group.max_whole_bytes // 4 + 1):
        sent = group.wire_bytes["all_reduce"]
        x = _inputs(1, (num,), torch.float32, seed=num)[0]
        group.all_reduce(x)
        sliced = num * 4 > group.max_whole_bytes
        sizes = split_sizes(num, group.size)
        own = sizes[group.rank]
        expected = (num - own) + (group.size - 1) * own if sliced else (group.size - 1) * num
        assert group.wire_bytes["all_reduce"] - sent == 4 * expected
        _check_all_reduce(group, torch.bfloat16, (2 * num,), seed=num)


@pytest.mark.ranks(1, 2, 4)
def test_sum_is_never_minus_zero_and_keeps_nan_and_inf(world: World, forced: Collectives) -> None:
    for dtype in SUM_DTYPES:
        x = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -1.5], dtype=dtype)
        result = forced.all_reduce(x)
        _assert_same_bits(result, torch.tensor([0.0, 0.0, float("nan"), float("inf"), -1.5 * world.size], dtype=dtype))
        signs = torch.tensor([1.0 if world.rank % 2 else -1.0] * 5, dtype=dtype)
        if world.size % 2 == 0:
            _assert_same_bits(forced.all_reduce(signs), torch.zeros(5, dtype=dtype))


@pytest.mark.ranks(4)
def test_sum_is_rounded_once(world: World, forced: Collectives) -> None:
    """1 + 4 small parts: each is lost when every hop rounds to bfloat16, all together they count."""
    x = torch.tensor([1.0 if world.rank == 0 else 2.0**-9], dtype=torch.bfloat16)
    assert forced.all_reduce(x).item() == 1.0 + 2.0**-7
    big_first = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])[world.rank]
    assert forced.all_reduce(big_first).item() == 1.0, "not the order of the ranks, in float32"


def _reversed_sum(parts: Sequence[Tensor]) -> Tensor:
    return ordered_sum(parts[::-1])


def _sum_from_first(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].to(torch.float64 if parts[0].dtype == torch.float64 else torch.float32)
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def _rounded_sum(parts: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def _own_first_sum(parts: Sequence[Tensor], rank: int) -> Tensor:
    return ordered_sum([parts[rank], *parts[:rank], *parts[rank + 1 :]])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("fault", ["reversed", "rounded each time", "own part first", "from the first part"])
def test_planted_fault_is_found(
    world: World, forced: Collectives, way: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
        "reversed": _reversed_sum,
        "rounded each time": _rounded_sum,
        "own part first": lambda parts: _own_first_sum(parts, world.rank),
        "from the first part": _sum_from_first,
    }
    monkeypatch.setattr(collectives, "ordered_sum", faults[fault])
    if fault == "from the first part":
        result = forced.all_reduce(torch.full((63,), -0.0, dtype=torch.bfloat16))
        with pytest.raises(AssertionError, match="bytes differ, first in element 0"):
            _assert_same_bits(result, torch.zeros(63, dtype=torch.bfloat16))
        return
    inputs = _inputs(4, (5000,), torch.bfloat16, seed=3)
    result = forced.all_reduce(inputs[world.rank])
    if fault == "own part first" and world.rank < 2 and way == "whole":
        _assert_same_bits(result, reference.all_reduce(inputs)[world.rank])  # parts 0 and 1 commute
        return
    with pytest.raises(AssertionError, match="bytes differ"):
        _assert_same_bits(result, reference.all_reduce(inputs)[world.rank])


def _row_counts(size: int, turn: int) -> Iterator[list[int]]:
    """Equal, ceil and floor, skewed, and with ranks that have nothing."""
    yield [63] * size
    yield split_sizes(129, size)
    yield [(rank + turn) % size * 129 for rank in range(size)]
    yield [5000 if rank == turn % size else 0 for rank in range(size)]
    yield [0] * size


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", WIRE_DTYPES, ids=str)
def test_all_gather(world: World, group: Collectives, dtype: torch.dtype) -> None:
    for turn in range(REPEATS):
        _lag(group, turn)
        for sizes, row in product(_row_counts(world.size, turn), [(), (3,)]):
            inputs = [_inputs(1, (rows, *row), dtype, seed=rank + turn)[0] for rank, rows in enumerate(sizes)]
            expected = reference.all_gather(inputs)[world.rank]
            _assert_same_bits(group.all_gather(inputs[world.rank], sizes), expected)
            if len(set(sizes)) == 1:
                _assert_same_bits(group.all_gather(inputs[world.rank]), expected)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_reduce_scatter(world: World, group: Collectives, dtype: torch.dtype) -> None:
    for turn in range(REPEATS):
        _lag(group, turn)
        for sizes, row in product(_row_counts(world.size, turn), [(), (3,)]):
            inputs = _inputs(world.size, (sum(sizes), *row), dtype, seed=turn)
            expected = reference.reduce_scatter(inputs, sizes)[world.rank]
            _assert_same_bits(group.reduce_scatter(inputs[world.rank], sizes), expected)
            if sizes == split_sizes(sum(sizes), world.size):
                _assert_same_bits(group.reduce_scatter(inputs[world.rank]), expected)


@pytest.mark.ranks(1, 2, 4)
def test_scattered_sums_are_slices_of_the_whole_sum(world: World, group: Collectives) -> None:
    x = _inputs(world.size, (129, 3), torch.bfloat16, seed=5)[world.rank]
    sizes = split_sizes(129, world.size)
    _assert_same_bits(group.all_gather(group.reduce_scatter(x), sizes), group.all_reduce(x))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", WIRE_DTYPES, ids=str)
def test_broadcast(world: World, group: Collectives, dtype: torch.dtype) -> None:
    for turn in range(REPEATS):
        _lag(group, turn)
        for num, root in product(LENGTHS, range(world.size)):
            inputs = _inputs(world.size, (num,), dtype, seed=turn)
            before = inputs[world.rank].clone()
            result = group.broadcast(inputs[world.rank], root)
            _assert_same_bits(result, reference.broadcast(inputs, root)[world.rank])
            _assert_same_bits(inputs[world.rank], before)


def _size_tables(size: int, turn: int) -> Iterator[list[list[int]]]:
    """Rows from each rank to each: equal, skewed, one sender, one receiver, nothing."""
    yield [[5] * size] * size
    yield [[(3 * source + target + turn) % 4 * 43 for target in range(size)] for source in range(size)]
    yield [[63 if source == turn % size else 0 for _ in range(size)] for source in range(size)]
    yield [[129 if target == turn % size else 0 for target in range(size)]] * size
    yield [[0] * size] * size


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", WIRE_DTYPES, ids=str)
def test_all_to_all(world: World, group: Collectives, dtype: torch.dtype) -> None:
    for turn in range(REPEATS):
        _lag(group, turn)
        for sizes, row in product(_size_tables(world.size, turn), [(), (3,)]):
            inputs = [_inputs(1, (sum(rows), *row), dtype, seed=rank + turn)[0] for rank, rows in enumerate(sizes)]
            before = inputs[world.rank].clone()
            received = [rows[world.rank] for rows in sizes]
            result = group.all_to_all(inputs[world.rank], sizes[world.rank], received)
            _assert_same_bits(result, reference.all_to_all(inputs, sizes)[world.rank])
            _assert_same_bits(inputs[world.rank], before)


BAD_CALLS: dict[str, tuple[Callable[[Collectives], object], str]] = {
    "sum of bool": (lambda g: g.all_reduce(torch.ones(3, dtype=torch.bool)), "all_reduce: bool cannot be summed"),
    "sum of int64": (lambda g: g.all_reduce(torch.ones(3, dtype=torch.int64)), "all_reduce: int64 cannot be summed"),
    "sum of fp8": (
        lambda g: g.reduce_scatter(torch.ones(4).to(torch.float8_e4m3fn)),
        "reduce_scatter: float8_e4m3fn cannot be summed, only float64, float32, bfloat16, float16",
    ),
    "transposed sum": (
        lambda g: g.all_reduce(torch.ones(3, 2).t()),
        r"all_reduce: .* shape \[2, 3\] and strides \[1, 2\]",
    ),
    "strided gather": (lambda g: g.all_gather(torch.ones(6)[::2]), r"all_gather: .* not contiguous"),
    "strided scatter": (lambda g: g.reduce_scatter(torch.ones(6)[::2]), r"reduce_scatter: .* not contiguous"),
    "strided broadcast": (lambda g: g.broadcast(torch.ones(6)[::2], 0), r"broadcast: .* not contiguous"),
    "wrong own rows": (
        lambda g: g.all_gather(torch.ones(3), [2] * g.size),
        r"all_gather: rank \d has 3 rows, but sizes \[2.*\] give it 2",
    ),
    "too few sizes": (lambda g: g.all_gather(torch.ones(3), []), r"all_gather: sizes \[\] must be \d row counts"),
    "negative size": (
        lambda g: g.reduce_scatter(torch.ones(0), [-1] * g.size),
        r"reduce_scatter: sizes \[-1.*\] must be \d row counts >= 0",
    ),
    "wrong sum of sizes": (
        lambda g: g.reduce_scatter(torch.ones(5 * g.size), [4] * g.size),
        r"reduce_scatter: the tensor has \d+ rows, but sizes \[4.*\] are \d+ together",
    ),
    "gather of a scalar": (lambda g: g.all_gather(torch.tensor(1.0)), "all_gather: .* no rows"),
    "scatter of a scalar": (lambda g: g.reduce_scatter(torch.tensor(1.0)), "reduce_scatter: .* no rows"),
    "wrong sum of rows sent": (
        lambda g: g.all_to_all(torch.ones(3), [2] * g.size, [2] * g.size),
        r"all_to_all: rank \d has 3 rows to send as \[2.*\] and receives \[2.*\]: the sum or its own entry",
    ),
    "own rows kept": (
        lambda g: g.all_to_all(torch.ones(g.size), [1] * g.size, [0] * g.size),
        r"all_to_all: .* its own entry does not fit",
    ),
    "strided all-to-all": (
        lambda g: g.all_to_all(torch.ones(4 * g.size)[::2], [2] * g.size, [2] * g.size),
        "all_to_all: .* not contiguous",
    ),
    "root beyond": (lambda g: g.broadcast(torch.ones(3), g.size), r"broadcast: root \d is not one of \d ranks"),
    "root below": (lambda g: g.broadcast(torch.ones(3), -1), "broadcast: root -1 is not one of"),
}


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_call_is_refused_before_anything_is_sent(world: World, group: Collectives, name: str) -> None:
    """Only the last rank calls wrongly; had it sent something, the good calls that follow would be off."""
    call, message = BAD_CALLS[name]
    sent = dict(group.wire_bytes)
    if world.rank == world.size - 1:
        with pytest.raises(ValueError, match=message):
            call(group)
    assert group.wire_bytes == sent
    _check_all_reduce(group, torch.float32, (63,), seed=9)
    assert group.all_gather(torch.tensor([world.rank])).tolist() == list(range(world.size))


@pytest.mark.ranks(2)
def test_tensor_on_another_device_is_refused(world: World, group: Collectives) -> None:
    for call in (group.all_reduce, group.all_gather, group.reduce_scatter, lambda x: group.broadcast(x, 0)):
        with pytest.raises(ValueError, match="the tensor is on meta, the group of axis world works on cpu"):
            call(torch.ones(4, device="meta"))


@pytest.mark.ranks(1, 2, 4)
def test_wire_bytes_count_what_this_rank_sends(world: World, group: Collectives) -> None:
    sent = dict(group.wire_bytes)
    others = world.size - 1
    group.all_gather(torch.zeros(10, 3, dtype=torch.bfloat16))
    group.reduce_scatter(torch.zeros(10 * world.size, dtype=torch.float32))
    group.broadcast(torch.zeros(7, dtype=torch.int64), root=world.size - 1)
    group.all_reduce(torch.zeros(5, dtype=torch.float64))
    group.all_to_all(torch.zeros(3 * world.size, dtype=torch.float64), [3] * world.size, [3] * world.size)
    assert {name: count - sent[name] for name, count in group.wire_bytes.items()} == {
        "all_gather": others * 60,
        "reduce_scatter": others * 40,
        "broadcast": others * 56 if world.rank == world.size - 1 else 0,
        "all_reduce": others * 40,
        "all_to_all": others * 24,
    }


@pytest.mark.ranks(2, 4)
def test_both_wires_of_cpu_ranks_give_the_same_bytes(world: World, group: Collectives) -> None:
    gloo = world.communicators(Mesh.create(world=world.size, rank=world.rank), "gloo").world
    for dtype, num in product([torch.bfloat16, torch.float64], [1, 129, 300_001]):
        x = _inputs(world.size, (num,), dtype, seed=num)[world.rank]
        rows = split_sizes(num, world.size)
        for one, other in zip(_call_all(group, x, rows), _call_all(gloo, x, rows), strict=True):
            _assert_same_bits(one, other)
        table = [[(source + 2 * target) % 4 for target in range(world.size)] for source in range(world.size)]
        sent, received = table[world.rank], [row[world.rank] for row in table]
        x = x.new_ones((sum(sent), 3)).mul_(world.rank)
        _assert_same_bits(group.all_to_all(x, sent, received), gloo.all_to_all(x, sent, received))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("other", ["all_gather", "nothing"])
def test_rank_that_leaves_the_common_order_is_an_error_not_wrong_bytes(
    world: World, other: str, backend: Backend
) -> None:
    mesh = Mesh.create(world=world.size, rank=world.rank)
    own = open_process_groups(mesh=mesh, store=world.store, backend=backend, device=torch.device("cpu"), timeout_s=1.0)
    if world.rank == 1 and other == "nothing":
        world.store.wait([f"left/{backend}"])
        return
    with pytest.raises(PeerFailedError, match=r"all_(reduce|gather) over axis world failed on its rank \d of 2: "):
        own.world.all_reduce(torch.ones(4)) if world.rank == 0 else own.world.all_gather(torch.ones(4))
    if world.rank == 0:
        world.store.set(f"left/{backend}", "")


def _call_all(group: Collectives, x: Tensor, sizes: list[int]) -> list[Tensor]:
    rows = x[: sizes[group.rank]]
    return [group.all_reduce(x), group.all_gather(rows, sizes), group.reduce_scatter(x, sizes), group.broadcast(x, 1)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="gpu: needs two GPUs")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", SUM_DTYPES, ids=str)
def test_between_gpus(world: World, forced: Collectives, dtype: torch.dtype) -> None:
    """The same bytes by NCCL, eagerly and as a captured graph that runs again on other inputs."""
    for sizes in ([65, 64], [129, 0], [0, 1]):
        rows = sum(sizes)
        batches = [_inputs(2, (rows, 3), dtype, seed) for seed in range(REPEATS)]
        expected = [
            [
                reference.all_reduce(inputs)[world.rank],
                reference.all_gather([x[:n] for x, n in zip(inputs, sizes, strict=True)])[world.rank],
                reference.reduce_scatter(inputs, sizes)[world.rank],
                reference.broadcast(inputs, 1)[world.rank],
            ]
            for inputs in batches
        ]
        x = batches[0][world.rank].to(world.device)
        for inputs, results in zip(batches, expected, strict=True):
            for actual, wanted in zip(_call_all(forced, inputs[world.rank].to(x), sizes), results, strict=True):
                _assert_same_bits(actual.cpu(), wanted)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _call_all(forced, x, sizes)
        for inputs, results in zip(batches, expected, strict=True):
            x.copy_(inputs[world.rank])
            graph.replay()
            for actual, wanted in zip(captured, results, strict=True):
                _assert_same_bits(actual.cpu(), wanted)


def test_one_rank_rounds_and_copies_nothing_it_need_not() -> None:
    group = SingleCollectives()
    x = torch.tensor([-0.0, 1.5])
    assert str(group.all_reduce(x)[0].item()) == "0.0" and str(x[0].item()) == "-0.0"
    assert group.all_gather(x) is x and group.broadcast(x, 0) is x and group.all_to_all(x, [2], [2]) is x


def test_wide_groups_in_one_order() -> None:
    """The oracle itself, on numbers that can be added by hand."""
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    assert [x.item() for x in reference.all_reduce(parts)] == [1.0] * 4
    assert str(reference.all_reduce([torch.tensor([-0.0])])[0].item()) == "0.0"
    assert [x.tolist() for x in reference.reduce_scatter([torch.arange(3.0)] * 2, [2, 1])] == [[0.0, 2.0], [4.0]]
