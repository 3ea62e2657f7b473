"""Which of a group's token rows a rank works on between the sharded parts of a decoder layer. T tokens, D hidden.

Attention and dense MLP are cut over heads and channels and see all rows of the group. What lies between them
(residual, norm, router) needs each row once: either all ranks hold all rows, or each rank holds its slice of them, so
that no token is sent to the experts twice.
"""

from dataclasses import dataclass

from torch import Tensor

from dist_infer.comm.all_reduce import FusedOp
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import split_sizes
from dist_infer.comm.peer_collectives import PeerCollectives
from dist_infer.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class Branch:
    """What a sublayer adds to the residual stream: the sum already, or this rank's part of it."""

    x: Tensor
    is_part: bool


@dataclass(frozen=True, slots=True)
class GroupRows:
    """The rows of every rank of the group; None: each has all."""

    tp: Collectives
    sizes: tuple[int, ...] | None

    def real(self, num_real: Tensor) -> Tensor:
        """How many of the rank's own rows are among the first `num_real` of all.

        Shapes: [1] -> [1].
        Ranks: local.
        """
        if self.sizes is None:
            return num_real
        return (num_real - sum(self.sizes[: self.tp.rank])).clamp(0, self.sizes[self.tp.rank])

    def reduce(self, part: Tensor) -> Tensor:
        """The rank's own rows of the sum over the group; alone, the part is the sum, and a -0.0 stays one.

        Shapes: [T, D] -> [own rows, D].
        Ranks: collective over tp.
        """
        if self.tp.size == 1:
            return part
        return self.tp.all_reduce(part) if self.sizes is None else self.tp.reduce_scatter(part, self.sizes)

    def add_norm(self, branch: Branch, residual: Tensor | None, norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """(norm of branch + residual, branch + residual) of the rank's own rows, the branch summed where it is a part.

        Where the group sums through peer memory, all of it is one kernel, byte for byte the same.

        Shapes: branch [T, D] if it is a part, else [own rows, D]; residual and results [own rows, D].
        Ranks: collective over tp, for a part.
        """
        if not branch.is_part or self.tp.size == 1:
            return norm(branch.x, residual)
        if self.sizes is None and isinstance(self.tp, PeerCollectives):
            fused_op = FusedOp.RMS_NORM if residual is None else FusedOp.RESIDUAL_RMS_NORM
            reduced = self.tp.reducer(branch.x, fused_op, residual=residual, weight=norm.weight, eps=norm.eps)
            if reduced.normed is None:
                raise ValueError(f"all_reduce: {fused_op.name} gave no norm")
            return reduced.normed, reduced.total
        return norm(self.reduce(branch.x), residual)

    def gather(self, own: Tensor) -> Tensor:
        """All rows of the group.

        Shapes: [own rows, D] -> [T, D].
        Ranks: collective over tp, where rows are sliced.
        """
        return own if self.sizes is None else self.tp.all_gather(own, self.sizes)


def plan_rows(num_tokens: int, tp: Collectives, *, sliced: bool) -> GroupRows:
    """All rows on every rank, or contiguous slices."""
    return GroupRows(tp, tuple(split_sizes(num_tokens, tp.size)) if sliced and tp.size > 1 else None)
