"""Who is who: the axes of the world and what each rank holds. Pure Python, the same answer on every rank.

world = D x T and rank = dp_rank * T + tp_rank. The T ranks of an attention-data-parallel group share one model
replica's attention, dense layers, embedding and head. Experts are dealt to the whole world: `ep` divides it, the rest M
= world / E is tensor parallelism inside an expert, and expert rank = ep_rank * M + moe_tp_rank = rank.

Whatever does not divide evenly is split contiguously, the larger parts first; what cannot be split is refused when the
job starts.
"""

from dataclasses import dataclass
from typing import Literal

from dist_infer.errors import UsageError

Axis = Literal["world", "tp", "dp", "ep"]


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of `parts` contiguous parts of `total`, ceil then floor: 5 over 2 is [3, 2]."""
    if total < 0 or parts < 1:
        raise ValueError(f"split_sizes: total {total} must be >= 0 and parts {parts} >= 1")
    floor, num_larger = divmod(total, parts)
    return [floor + 1] * num_larger + [floor] * (parts - num_larger)


def split_range(total: int, parts: int, idx: int) -> range:
    """The `idx`-th part of range(total), cut as `split_sizes` says."""
    sizes = split_sizes(total, parts)
    if not 0 <= idx < parts:
        raise ValueError(f"split_range: index {idx} is not one of {parts} parts")
    start = sum(sizes[:idx])
    return range(start, start + sizes[idx])


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The attention heads of one tp rank, as indices into the whole model's heads.

    Every KV head serves the same number of the rank's query heads, so the shard is grouped-query attention again.
    """

    heads: range
    kv_heads: range


def split_heads(num_heads: int, num_kv_heads: int, tp: int, tp_rank: int) -> HeadShard:
    """The query and KV heads that `tp_rank` of `tp` ranks holds.

    Up to one rank per KV head, KV heads are dealt contiguously, each with its query heads. With more ranks than KV
    heads the ranks are dealt to the KV heads (3 KV heads on 4 ranks: 2, 1, 1); the ranks of one KV head all hold it and
    split its query heads.

    Errors: UsageError if a rank would be left without a whole query head, or if the heads don't form equal groups.
    """
    check_heads(num_heads, num_kv_heads, tp)
    if not 0 <= tp_rank < tp:
        raise ValueError(f"split_heads: tp rank {tp_rank} is not one of {tp}")
    group_len = num_heads // num_kv_heads
    if tp <= num_kv_heads:
        kv_heads = split_range(num_kv_heads, tp, tp_rank)
        return HeadShard(range(kv_heads.start * group_len, kv_heads.stop * group_len), kv_heads)
    first_rank = 0
    for kv_head, num_ranks in enumerate(split_sizes(tp, num_kv_heads)):
        if tp_rank < first_rank + num_ranks:
            own = split_range(group_len, num_ranks, tp_rank - first_rank)
            start = kv_head * group_len
            return HeadShard(range(start + own.start, start + own.stop), range(kv_head, kv_head + 1))
        first_rank += num_ranks
    raise ValueError(f"split_heads: tp rank {tp_rank} got no KV head of {num_kv_heads}")


def check_heads(num_heads: int, num_kv_heads: int, tp: int) -> None:
    """Refuses a number of tp ranks that the attention heads can't feed; the same on all ranks.

    With equal groups, "each rank has a whole query head" is the same as tp <= num_heads.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        raise UsageError(
            f"the model has {num_heads} attention heads and {num_kv_heads} KV heads:"
            " the first must be a multiple of the second"
        )
    if tp < 1:
        raise UsageError(f"--tp {tp} is not possible: the nearest valid choice is --tp 1")
    if tp > num_heads:
        raise UsageError(
            f"--tp {tp} leaves ranks without an attention head: the model has {num_heads} query heads"
            f" in {num_kv_heads} groups. The nearest valid choice is --tp {num_heads};"
            " with more ranks, share them out by --dp"
        )


@dataclass(frozen=True, slots=True)
class Mesh:
    """The axes of the world and this rank's place on each of them."""

    world: int
    dp: int
    tp: int
    ep: int
    rank: int

    def __post_init__(self) -> None:
        if self.world < 1:
            raise UsageError(f"a world of {self.world} ranks is not possible")
        for name, value in (("dp", self.dp), ("tp", self.tp), ("ep", self.ep)):
            if value < 1 or self.world % value != 0:
                raise UsageError(
                    f"--{name} {value} does not divide the world of {self.world} ranks;"
                    f" nearest valid: {' or '.join(f'--{name} {d}' for d in _nearest_divisors(self.world, value))}"
                )
        if self.dp * self.tp != self.world:
            choices = dict.fromkeys(((self.world // self.tp, self.tp), (self.dp, self.world // self.dp)))
            raise UsageError(
                f"--dp {self.dp} times --tp {self.tp} is {self.dp * self.tp}, but the world has {self.world} ranks;"
                f" nearest valid: {' or '.join(f'--dp {dp} --tp {tp}' for dp, tp in choices)};"
                f" or launch {self.dp * self.tp} ranks"
            )
        if not 0 <= self.rank < self.world:
            raise UsageError(f"rank {self.rank} is not in a world of {self.world} ranks")

    @classmethod
    def create(
        cls, *, world: int, rank: int, dp: int | None = None, tp: int | None = None, ep: int | None = None
    ) -> "Mesh":
        """The mesh for the options given; otherwise dp 1, tp world / dp, and experts over the whole world.

        Errors: UsageError with the numbers and the nearest valid choices.
        """
        dp = 1 if dp is None else dp
        if tp is None:
            # A dp that doesn't divide is reported as such, whatever tp is made of it.
            tp = max(1, world // dp) if dp > 0 else world
        return cls(world=world, dp=dp, tp=tp, ep=world if ep is None else ep, rank=rank)

    @property
    def dp_rank(self) -> int:
        """The group of this rank."""
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        """The place of this rank in its group."""
        return self.rank % self.tp

    @property
    def moe_tp(self) -> int:
        """M: how many ranks share each expert."""
        return self.world // self.ep

    @property
    def ep_rank(self) -> int:
        """Which part of the experts this rank holds."""
        return self.rank // self.moe_tp

    @property
    def moe_tp_rank(self) -> int:
        """Which slice of its experts this rank holds."""
        return self.rank % self.moe_tp

    @property
    def expert_rank(self) -> int:
        """ep_rank * M + moe_tp_rank: experts are dealt in the order of world ranks."""
        return self.ep_rank * self.moe_tp + self.moe_tp_rank

    def group_of(self, rank: int) -> int:
        """The dp group of a world rank."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in a world of {self.world} ranks")
        return rank // self.tp

    def group_ranks(self, dp_rank: int) -> range:
        """The world ranks of a dp group."""
        if not 0 <= dp_rank < self.dp:
            raise ValueError(f"group {dp_rank} is not one of {self.dp}")
        return range(dp_rank * self.tp, (dp_rank + 1) * self.tp)

    def root_of(self, group: int) -> int:
        """The world rank that speaks for a group: its tp_rank 0."""
        return self.group_ranks(group).start

    def axis_ranks(self, axis: Axis) -> range:
        """The world ranks, in order, that this rank meets on an axis."""
        if axis == "world":
            return range(self.world)
        if axis == "tp":
            return self.group_ranks(self.dp_rank)
        if axis == "dp":
            return range(self.tp_rank, self.world, self.tp)
        return range(self.moe_tp_rank, self.world, self.moe_tp)

    def partition(self, axis: Axis) -> list[range]:
        """All groups of an axis in one order, the same on every rank; together they are the world."""
        first_of_each = {
            "world": range(1),
            "tp": range(0, self.world, self.tp),
            "dp": range(self.tp),
            "ep": range(self.moe_tp),
        }
        return [Mesh(self.world, self.dp, self.tp, self.ep, first).axis_ranks(axis) for first in first_of_each[axis]]


def _nearest_divisors(total: int, wanted: int) -> list[int]:
    """The divisors of `total` next to `wanted`, smaller one first."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    smaller = [d for d in divisors if d <= wanted][-1:]
    larger = [d for d in divisors if d >= wanted][:1]
    return list(dict.fromkeys(smaller + larger))
