"""Head split and mesh, over every small case."""

import pytest

from dist_infer.comm.mesh import Axis, HeadShard, Mesh, check_heads, split_heads, split_range, split_sizes
from dist_infer.errors import UsageError

HEADS = [(n * group, n) for n in range(1, 9) for group in range(1, 7)]
AXES: tuple[Axis, ...] = ("world", "tp", "dp", "ep")


def test_split_sizes_are_ceil_then_floor() -> None:
    assert split_sizes(5, 2) == [3, 2]
    assert split_sizes(3, 4) == [1, 1, 1, 0]
    for total in range(20):
        for parts in range(1, 9):
            sizes = split_sizes(total, parts)
            assert sum(sizes) == total and len(sizes) == parts
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_split_ranges_follow_each_other() -> None:
    for total in range(20):
        for parts in range(1, 9):
            ranges = [split_range(total, parts, idx) for idx in range(parts)]
            assert [i for part in ranges for i in part] == list(range(total))
            assert [len(part) for part in ranges] == split_sizes(total, parts)


@pytest.mark.parametrize(("total", "parts"), [(-1, 2), (4, 0)])
def test_impossible_splits_are_refused(total: int, parts: int) -> None:
    with pytest.raises(ValueError, match="split_sizes"):
        split_sizes(total, parts)


@pytest.mark.parametrize("idx", [-1, 2])
def test_part_outside_is_refused(idx: int) -> None:
    with pytest.raises(ValueError, match="not one of 2"):
        split_range(4, 2, idx)


def test_each_query_head_has_one_owner_and_its_kv_head() -> None:
    for num_heads, num_kv_heads in HEADS:
        group_len = num_heads // num_kv_heads
        for tp in range(1, num_heads + 1):
            shards = [split_heads(num_heads, num_kv_heads, tp, rank) for rank in range(tp)]
            assert [head for shard in shards for head in shard.heads] == list(range(num_heads))
            for shard in shards:
                assert len(shard.heads) >= 1 and len(shard.kv_heads) >= 1
                assert len(shard.heads) % len(shard.kv_heads) == 0, "not grouped-query attention again"
                local_group_len = len(shard.heads) // len(shard.kv_heads)
                owners = [shard.kv_heads[i // local_group_len] for i in range(len(shard.heads))]
                assert owners == [head // group_len for head in shard.heads]


def test_kv_heads_are_repeated_only_when_ranks_outnumber_them() -> None:
    for num_heads, num_kv_heads in HEADS:
        for tp in range(1, num_heads + 1):
            holders = [0] * num_kv_heads
            for rank in range(tp):
                for kv_head in split_heads(num_heads, num_kv_heads, tp, rank).kv_heads:
                    holders[kv_head] += 1
            assert holders == ([1] * num_kv_heads if tp <= num_kv_heads else split_sizes(tp, num_kv_heads))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp", "expected"),
    [
        (9, 3, 4, [((0, 2), (0, 1)), ((2, 3), (0, 1)), ((3, 6), (1, 2)), ((6, 9), (2, 3))]),
        (9, 3, 2, [((0, 6), (0, 2)), ((6, 9), (2, 3))]),
        (6, 1, 4, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 5), (0, 1)), ((5, 6), (0, 1))]),
        (8, 4, 8, [((i, i + 1), (i // 2, i // 2 + 1)) for i in range(8)]),
    ],
)
def test_worked_examples(
    num_heads: int, num_kv_heads: int, tp: int, expected: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    shards = [split_heads(num_heads, num_kv_heads, tp, rank) for rank in range(tp)]
    assert shards == [HeadShard(range(*heads), range(*kv_heads)) for heads, kv_heads in expected]


def test_more_ranks_than_heads_are_refused_with_the_nearest_choice() -> None:
    for num_heads, num_kv_heads in HEADS:
        check_heads(num_heads, num_kv_heads, num_heads)
        with pytest.raises(UsageError, match=rf"--tp {num_heads + 1} .* {num_heads} query heads .*--tp {num_heads};"):
            split_heads(num_heads, num_kv_heads, num_heads + 1, 0)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp", "message"),
    [
        (9, 2, 1, "9 attention heads and 2 KV heads"),
        (0, 1, 1, "0 attention heads"),
        (4, 0, 1, "0 KV heads"),
        (4, 2, 0, "--tp 0 is not possible"),
    ],
)
def test_impossible_heads_are_refused(num_heads: int, num_kv_heads: int, tp: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_heads(num_heads, num_kv_heads, tp, 0)


def test_tp_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="tp rank 2 is not one of 2"):
        split_heads(4, 2, 2, 2)


def _meshes(world: int) -> list[list[Mesh]]:
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    return [
        [Mesh.create(world=world, rank=rank, dp=dp, tp=world // dp, ep=ep) for rank in range(world)]
        for dp in divisors
        for ep in divisors
    ]


def test_ranks_of_a_mesh() -> None:
    for world in range(1, 13):
        for meshes in _meshes(world):
            for mesh in meshes:
                assert mesh.rank == mesh.dp_rank * mesh.tp + mesh.tp_rank
                assert mesh.expert_rank == mesh.rank and mesh.ep * mesh.moe_tp == world
                assert 0 <= mesh.ep_rank < mesh.ep and 0 <= mesh.moe_tp_rank < mesh.moe_tp
                assert mesh.rank in mesh.group_ranks(mesh.dp_rank)
                assert mesh.root_of(mesh.dp_rank) == mesh.rank - mesh.tp_rank
                for rank in range(world):
                    assert mesh.group_of(rank) == meshes[rank].dp_rank


def test_axes_of_a_mesh() -> None:
    for world in range(1, 13):
        for meshes in _meshes(world):
            for axis, size in zip(AXES, (world, meshes[0].tp, meshes[0].dp, meshes[0].ep), strict=True):
                partition = meshes[0].partition(axis)
                assert sorted(rank for ranks in partition for rank in ranks) == list(range(world))
                for mesh in meshes:
                    assert mesh.partition(axis) == partition, "ranks disagree on the groups"
                    assert [mesh.rank in ranks for ranks in partition].count(True) == 1
                    assert mesh.axis_ranks(axis) in partition and len(mesh.axis_ranks(axis)) == size
            for mesh in meshes:
                assert mesh.axis_ranks("tp").index(mesh.rank) == mesh.tp_rank
                assert mesh.axis_ranks("dp").index(mesh.rank) == mesh.dp_rank
                assert mesh.axis_ranks("ep").index(mesh.rank) == mesh.ep_rank


def test_defaults_are_one_group_and_experts_over_the_world() -> None:
    assert Mesh.create(world=4, rank=1) == Mesh(world=4, dp=1, tp=4, ep=4, rank=1)
    assert Mesh.create(world=4, rank=1, dp=2) == Mesh(world=4, dp=2, tp=2, ep=4, rank=1)
    assert Mesh.create(world=4, rank=1, dp=4, ep=2) == Mesh(world=4, dp=4, tp=1, ep=2, rank=1)


@pytest.mark.parametrize(
    ("world", "options", "message"),
    [
        (6, {"dp": 4}, r"--dp 4 does not divide the world of 6 ranks; nearest valid: --dp 3 or --dp 6"),
        (4, {"tp": 3}, r"--tp 3 does not divide the world of 4 ranks; nearest valid: --tp 2 or --tp 4"),
        (8, {"ep": 5}, r"--ep 5 does not divide the world of 8 ranks; nearest valid: --ep 4 or --ep 8"),
        (4, {"ep": 9}, r"--ep 9 .*; nearest valid: --ep 4$"),
        (4, {"dp": 0}, r"--dp 0 .*; nearest valid: --dp 1$"),
        (
            4,
            {"tp": 2},
            r"--dp 1 times --tp 2 is 2, but the world has 4 ranks; nearest valid: --dp 2 --tp 2 or --dp 1 --tp 4",
        ),
        (2, {"dp": 2, "tp": 2}, r"--dp 2 times --tp 2 is 4, .*--dp 1 --tp 2 or --dp 2 --tp 1; or launch 4 ranks"),
        (0, {}, "a world of 0 ranks"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_nearest_choices(
    world: int, options: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Mesh.create(world=world, rank=0, **options)


def test_nearest_choices_are_valid() -> None:
    for world in range(1, 13):
        for dp in range(14):
            for tp in range(14):
                try:
                    Mesh.create(world=world, rank=0, dp=dp, tp=tp)
                except UsageError as error:
                    text = str(error).split("nearest valid: ")[1].split(";")[0]
                    for choice in text.split(" or "):
                        words = choice.split()
                        options = dict(zip((word[2:] for word in words[::2]), map(int, words[1::2]), strict=True))
                        if len(options) == 2:
                            Mesh.create(world=world, rank=0, **options)
                        else:
                            assert world % next(iter(options.values())) == 0


@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_outside_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} is not in a world of 4"):
        Mesh.create(world=4, rank=rank)
    mesh = Mesh.create(world=4, rank=0)
    with pytest.raises(ValueError, match="not in a world"):
        mesh.group_of(rank)
    with pytest.raises(ValueError, match="not one of 1"):
        mesh.group_ranks(rank)
