"""Which of a group's token rows a rank works on between the sharded parts of a decoder layer. T tokens, D hidden.

Attention and dense MLP are cut over heads and channels and see all rows of the group. What lies between them
(residual, norm, router) needs each row once: either all ranks hold all rows, or each rank holds its slice of them, so
that no token is sent to the experts twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor

from dist_infer.comm.all_reduce import FusedOp
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import split_sizes
from dist_infer.comm.peer_collectives import PeerCollectives
from dist_infer.kernels.carriers import ExpertOutputs, Fp8Tensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.norm import InputNorm, RmsNorm
from dist_infer.layers.quantized import as_fp8

Rows = TypeVar("Rows", Tensor, Tensor | Fp8Tensor)

_QUANTIZING: Mapping[QuantFormat, FusedOp] = MappingProxyType(
    {
        QuantFormat.FP8_ROWS: FusedOp.RESIDUAL_RMS_NORM_QUANT_FP8_ROWS,
        QuantFormat.FP8_BLOCK128: FusedOp.RESIDUAL_RMS_NORM_QUANT_FP8_BLOCK128,
    }
)


@dataclass(frozen=True, slots=True)
class Branch:
    """What a sublayer adds to the residual stream: the sum already, or this rank's part of it.

    A part that a group sums through peer memory may be what the experts of each row have left to add up.
    """

    x: Tensor | ExpertOutputs
    is_part: bool

    @property
    def tensor(self) -> Tensor:
        """Errors: TypeError for outputs of experts."""
        if not isinstance(self.x, Tensor):
            raise TypeError("outputs of experts are added up by the kernel that sums over the ranks, or before")
        return self.x


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
            return norm(branch.tensor, residual)
        if self.sizes is None and isinstance(self.tp, PeerCollectives):
            fused_op = FusedOp.RMS_NORM if residual is None else FusedOp.RESIDUAL_RMS_NORM
            reduced = self.tp.reducer(branch.x, fused_op, residual=residual, weight=norm.weight, eps=norm.eps)
            if reduced.normed is None:
                raise ValueError(f"all_reduce: {fused_op.name} gave no norm")
            return reduced.normed, reduced.total
        return norm(self.reduce(branch.tensor), residual)

    def add_input_norm(
        self, branch: Branch, residual: Tensor | None, norm: InputNorm
    ) -> tuple[Tensor | Fp8Tensor, Tensor]:
        """`add_norm`, the norm as its consumer takes it: in the same launch where there is one that does it.

        Slices of rows are not quantised: their consumer takes all rows.

        Shapes: branch [T, D] if it is a part, else [own rows, D]; residual and results [own rows, D].
        Ranks: collective over tp, for a part.
        """
        if norm.gives is None or self.sizes is not None:
            return self.add_norm(branch, residual, norm)
        if not branch.is_part or self.tp.size == 1:
            return norm.quantized(branch.tensor, residual)
        if not isinstance(self.tp, PeerCollectives):
            return norm.quantized(self.reduce(branch.tensor), residual)
        if residual is None or norm.gives not in _QUANTIZING:
            normed, total = self.add_norm(branch, residual, norm)
            return norm.convert(normed), total
        reduced = self.tp.reducer(
            branch.x, _QUANTIZING[norm.gives], residual=residual, weight=norm.weight, eps=norm.eps
        )
        return as_fp8(reduced.quantized[0]), reduced.total

    def gather(self, own: Rows) -> Rows:
        """All rows of the group.

        Shapes: [own rows, D] -> [T, D].
        Ranks: collective over tp, where rows are sliced.
        Errors: TypeError for quantised slices.
        """
        if self.sizes is None:
            return own
        if not isinstance(own, Tensor):
            raise TypeError("slices of rows are gathered before they are quantised")
        return self.tp.all_gather(own, self.sizes)


def plan_rows(num_tokens: int, tp: Collectives, *, sliced: bool) -> GroupRows:
    """All rows on every rank, or contiguous slices."""
    return GroupRows(tp, tuple(split_sizes(num_tokens, tp.size)) if sliced and tp.size > 1 else None)
