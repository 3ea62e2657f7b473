"""The all-reduce at the border of a decoder layer, with what follows it. T tokens, D hidden.

    total     = the sum over the ranks as comm/collectives has it, rounded; + residual, rounded
    norm      = kernels/rms_norm of total
    quantised = kernels/quantize of norm

Every strategy gives these bytes, whatever the sizes: GATHER by separate ops over any wire, ONE_SHOT and TWO_SHOT in one
kernel through peer memory. Only LIBRARY is outside: it sums in an order of its own from three ranks on, and may leave a
-0.0. So AUTO never takes it.
"""

from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import Tensor

from dist_infer.comm.all_reduce_measured import TABLE
from dist_infer.comm.all_reduce_table import default_strategy, look_up
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.strategy import Strategy, Table
from dist_infer.comm.symmetric import PeerMemory, open_peer_memory
from dist_infer.errors import UsageError
from dist_infer.kernels import all_reduce as op
from dist_infer.kernels import moe_finalize as moe_finalize_op
from dist_infer.kernels import qk_norm as qk_norm_op
from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels import rms_norm as rms_norm_op
from dist_infer.kernels.all_reduce import AllReduceFunction, Epilogue, PeerLayout, PeerSpace, Reduced
from dist_infer.kernels.carriers import ExpertOutputs, QkNorm, Rotation
from dist_infer.kernels.dispatch import Library, Target, resolve
from dist_infer.kernels.multiprocessors import num_multiprocessors
from dist_infer.kernels.quantize import QuantFormat

MAX_ONE_SHOT_BYTES = 64 << 20  # of one rank's rows between two ranks; each keeps two such slots for every other one
MAX_TWO_SHOT_BYTES = 128 << 20
_MAX_ADDED_ROWS = 64  # whose outputs of experts a kernel adds up itself: of more a launch before it does, same bytes
_MAX_PROGRAMS = 132  # where it isn't known how many multiprocessors there are


@dataclass(frozen=True, slots=True)
class _Parts:
    has_residual: bool = False
    has_norm: bool = False
    quant_format: QuantFormat | None = None
    keeps_norm: bool = True


def _quantised(quant_format: QuantFormat, *, out: bool) -> _Parts:
    return _Parts(True, True, quant_format, out)


class FusedOp(Enum):
    """What follows the sum; OUT: the norm is given out too, not only its quantised form."""

    NONE = _Parts()
    RMS_NORM = _Parts(has_norm=True)
    RESIDUAL_RMS_NORM = _Parts(True, True)
    RESIDUAL_RMS_NORM_QUANT_FP8 = _quantised(QuantFormat.FP8, out=False)
    RESIDUAL_RMS_NORM_QUANT_FP8_ROWS = _quantised(QuantFormat.FP8_ROWS, out=False)
    RESIDUAL_RMS_NORM_QUANT_FP8_BLOCK128 = _quantised(QuantFormat.FP8_BLOCK128, out=False)
    RESIDUAL_RMS_NORM_QUANT_NVFP4 = _quantised(QuantFormat.NVFP4, out=False)
    RESIDUAL_RMS_NORM_QUANT_NVFP4_LINEAR = _quantised(QuantFormat.NVFP4_LINEAR, out=False)
    RESIDUAL_RMS_NORM_QUANT_MXFP8 = _quantised(QuantFormat.MXFP8, out=False)
    RESIDUAL_RMS_NORM_QUANT_MXFP8_LINEAR = _quantised(QuantFormat.MXFP8_LINEAR, out=False)
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8 = _quantised(QuantFormat.FP8, out=True)
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8_ROWS = _quantised(QuantFormat.FP8_ROWS, out=True)
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8_BLOCK128 = _quantised(QuantFormat.FP8_BLOCK128, out=True)
    RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4 = _quantised(QuantFormat.NVFP4, out=True)
    RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4_LINEAR = _quantised(QuantFormat.NVFP4_LINEAR, out=True)
    RESIDUAL_RMS_NORM_OUT_QUANT_MXFP8 = _quantised(QuantFormat.MXFP8, out=True)
    RESIDUAL_RMS_NORM_OUT_QUANT_MXFP8_LINEAR = _quantised(QuantFormat.MXFP8_LINEAR, out=True)

    @property
    def kind(self) -> str:
        """The table's name for it: ops of one kind take about the same time."""
        if self.value.quant_format is not None:
            return "quant"
        return "norm" if self.value.has_norm else "none"


class PeerRoom:
    """Peer memory of a group, laid out for the all-reduce kernels. Its size never changes."""

    def __init__(self, memory: PeerMemory, layout: PeerLayout, *, max_programs: int, shares_device: bool) -> None:
        self.layout = layout
        self._memory = memory
        self._max_programs = max_programs
        self._shares_device = shares_device

    def enter(self) -> PeerSpace:
        """What a kernel on the current stream needs."""
        self._memory.enter_stream()
        return PeerSpace(
            layout=self.layout,
            memory=self._memory.memory,
            table=self._memory.table,
            rank=self._memory.rank,
            max_programs=self._max_programs,
            shares_device=self._shares_device,
        )

    def close(self) -> None:
        """Unmap the memory; no call may follow. Ranks: collective."""
        self._memory.close()


def max_one_shot_bytes(num_ranks: int) -> int:
    """The largest tensor for which room is made: one shot pays with few bytes or two ranks, and slots are for each."""
    return MAX_ONE_SHOT_BYTES // (num_ranks - 1) ** 2


def open_peer_room(
    group: Collectives,
    process_group: dist.ProcessGroup,
    *,
    max_tokens: int,
    row_bytes: int,
    device: torch.device,
    num_sharing: int = 1,
) -> PeerRoom:
    """Room for all-reduces of up to `max_tokens` rows of `row_bytes`, or as many as the limits above allow.

    `num_sharing` ranks share each GPU: their programs wait for each other, so all must fit on it together.

    Ranks: collective over the group.
    Errors: NoPeerMemoryError, the same on all ranks.
    """
    stride = -(-row_bytes // 16) * 16
    layout = PeerLayout(
        num_ranks=group.size,
        row_bytes=stride,
        one_shot_rows=max(1, min(max_tokens, max_one_shot_bytes(group.size) // stride)),
        two_shot_rows=max(1, min(max_tokens, MAX_TWO_SHOT_BYTES // stride)),
    )
    memory = open_peer_memory(group, process_group, num_bytes=layout.num_bytes, device=device, prepare=layout.prepare)
    num_sms = num_multiprocessors(device)
    return PeerRoom(memory, layout, max_programs=max(1, num_sms // num_sharing), shares_device=num_sharing > 1)


class FusedAllReduce:
    """All-reduces of one group with what follows them. The same calls on all ranks, on one stream."""

    def __init__(
        self,
        group: Collectives,
        target: Target,
        *,
        room: PeerRoom | None = None,
        library_group: dist.ProcessGroup | None = None,
        strategy: Strategy = Strategy.AUTO,
        table: Table = TABLE,
    ) -> None:
        """Without `room` there is no peer memory and AUTO is GATHER; LIBRARY needs `library_group`.

        Errors: UsageError for a strategy that can't be had.
        """
        self._group = group
        self._room = room
        self._library_group = library_group
        self._strategy = strategy
        self._table = table
        self._device_name = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu"
        self._rms_norm = resolve("rms_norm", rms_norm_op.LIBRARIES, target).pick()
        self._moe_finalize = resolve("moe_finalize", moe_finalize_op.LIBRARIES, target).pick()
        if target.dtype in op.DTYPES:
            self._quantize = resolve("quantize", quantize_op.LIBRARIES, target).pick()
        self._kernels: dict[Strategy, Library[AllReduceFunction]] = {}
        if room is not None:
            self._kernels[Strategy.ONE_SHOT] = resolve("one_shot", op.ONE_SHOT_LIBRARIES, target).pick()
            self._kernels[Strategy.TWO_SHOT] = resolve("two_shot", op.TWO_SHOT_LIBRARIES, target).pick()
            self._norm_rotary = resolve("reduced_norm_rotary", qk_norm_op.ONE_SHOT_LIBRARIES, target).pick()
        if strategy in (Strategy.ONE_SHOT, Strategy.TWO_SHOT) and room is None:
            raise UsageError(f"the all-reduce {strategy.value} needs peer memory, which there isn't")
        if strategy is Strategy.LIBRARY and library_group is None and group.size > 1:
            raise UsageError("the library's all-reduce needs a group of torch.distributed")

    def strategy_for(self, x: Tensor | ExpertOutputs, fused_op: FusedOp = FusedOp.NONE) -> Strategy:
        """How a tensor is reduced: as asked for where the size allows, else by GATHER. The same on all ranks.

        Shapes: x [T, D].
        """
        chosen = self._strategy
        if chosen is Strategy.LIBRARY or self._room is None:
            return Strategy.LIBRARY if chosen is Strategy.LIBRARY else Strategy.GATHER
        num_tokens, hidden = x.shape
        rows = x if isinstance(x, Tensor) else x.outputs
        row_bytes = hidden * rows.element_size()
        if rows.dtype not in op.DTYPES or row_bytes % 16 or row_bytes > self._room.layout.row_bytes:
            return Strategy.GATHER
        if chosen is Strategy.AUTO:
            chosen = look_up(
                device=self._device_name,
                num_ranks=self._group.size,
                op=fused_op.kind,
                hidden=hidden,
                num_tokens=num_tokens,
                table=self._table,
            ) or default_strategy(num_ranks=self._group.size, num_bytes=num_tokens * row_bytes)
        if chosen is Strategy.ONE_SHOT and num_tokens > self._room.layout.one_shot_rows:
            chosen = Strategy.TWO_SHOT
        if chosen is Strategy.TWO_SHOT and num_tokens > self._room.layout.two_shot_rows:
            chosen = Strategy.GATHER
        return chosen

    def __call__(
        self,
        x: Tensor | ExpertOutputs,
        fused_op: FusedOp = FusedOp.NONE,
        *,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        eps: float = 0.0,
        scale: Tensor | None = None,
    ) -> Reduced:
        """The sum of all ranks' `x` and what `fused_op` makes of it; of outputs of experts the sum of their sums.

        Shapes: x, residual and results [T, D]; weight [D]; scale 1 element, of FP8 or NVFP4.
        Ranks: collective over the group.
        Stream: the current one, the same as for the calls before.
        Errors: ValueError for arguments that don't fit the op or each other.
        """
        parts: _Parts = fused_op.value
        if parts.has_residual != (residual is not None) or parts.has_norm != (weight is not None):
            raise ValueError(f"all_reduce: {fused_op.name} got another residual or weight than it takes")
        epilogue = Epilogue(
            residual=residual,
            weight=weight,
            eps=eps,
            quant_format=parts.quant_format,
            scale=scale,
            keeps_norm=parts.keeps_norm,
        )
        strategy = self.strategy_for(x, fused_op)
        if self._room is None or strategy not in self._kernels:
            return self._finish(self._sum(self._rows(x), strategy), epilogue)
        if not isinstance(x, Tensor) and len(x.ids) > _MAX_ADDED_ROWS:
            x = self._rows(x)
        if isinstance(x, Tensor) and x.data_ptr() % 16:
            x = x.clone()
        run = op.one_shot if strategy is Strategy.ONE_SHOT else op.two_shot
        return run(x, epilogue, self._room.enter(), library=self._kernels[strategy])

    def takes_heads(self, qkv: Tensor) -> bool:
        """Whether there is one kernel for these heads. The same on all ranks.

        Shapes: qkv [T, heads of the rank, H].
        """
        if self._room is None or self._strategy in (Strategy.GATHER, Strategy.LIBRARY):
            return False
        return qkv.dtype in op.DTYPES and len(qkv) <= self._room.layout.one_shot_rows

    def norm_rotary(self, qkv: Tensor, norm: QkNorm, rotation: Rotation) -> Tensor:
        """kernels/qk_norm.reduced_norm_rotary, where the group has it: see takes_heads.

        Shapes: qkv [T, N + 2 * K, H] -> [T, N, H].
        Ranks: collective over the group.
        Stream: the current one, the same as for the calls before.
        Errors: ValueError where it has not.
        """
        if self._room is None or not self.takes_heads(qkv):
            raise ValueError(f"norm_rotary: there is no one kernel for {qkv.dtype} {list(qkv.shape)}")
        return qk_norm_op.reduced_norm_rotary(qkv, norm, rotation, self._room.enter(), library=self._norm_rotary)

    def close(self) -> None:
        """Give the peer memory back; no call may follow. Ranks: collective."""
        if self._room is not None:
            self._room.close()

    def _rows(self, x: Tensor | ExpertOutputs) -> Tensor:
        return x if isinstance(x, Tensor) else moe_finalize_op.moe_finalize(x, library=self._moe_finalize)

    def _sum(self, x: Tensor, strategy: Strategy) -> Tensor:
        if strategy is not Strategy.LIBRARY or self._library_group is None:
            return self._group.all_reduce(x)
        summed = x.clone()
        self._library_group.allreduce([summed]).wait()
        return summed

    def _finish(self, summed: Tensor, epilogue: Epilogue) -> Reduced:
        """What the kernels do after the sum, by separate ops."""
        if epilogue.weight is None:
            return Reduced(total=summed, normed=None, quantized=())
        normed, total = rms_norm_op.rms_norm(
            summed, epilogue.weight, epilogue.eps, epilogue.residual, library=self._rms_norm
        )
        if epilogue.quant_format is None:
            return Reduced(total=total, normed=normed, quantized=())
        quantized = quantize_op.quantize(normed, epilogue.quant_format, epilogue.scale, library=self._quantize)
        return Reduced(total=total, normed=normed if epilogue.keeps_norm else None, quantized=(quantized,))
