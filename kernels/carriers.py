"""Structures that ops take as one argument."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """The sequences of a step, whose keys and values lie in pages of `block_size` flat slots.

    Slot of token i of sequence s = page_table[s, i // block_size] * block_size + i % block_size. The page ids are
    logical: the same id names a page in every layer's cache. Kernels read the device tensors; the host copies are for
    plans that need no device read.

    Shapes: query_start [S + 1] int32, kv_lens [S] int32, page_table [S, P] int32 (-1 beyond a sequence's pages).
    """

    query_start: Tensor
    kv_lens: Tensor
    page_table: Tensor
    block_size: int
    host_query_start: npt.NDArray[np.int32]
    host_kv_lens: npt.NDArray[np.int32]

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.host_kv_lens)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.host_query_start[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingMethod:
    """How a router's logits become experts and weights (kernels/moe_route.py).

    With `num_groups` > 1 the experts form equal contiguous groups, and only those of the `num_kept_groups` best ones
    can be chosen; `group_score` tells how good a group is: its best expert, or the sum of its two best.

    `uniform` is for benchmarks of models with dummy weights, whose routers send all tokens to few experts: the choice
    is by noise that depends on row and expert alone, so that experts are chosen evenly; weights are the scores still.
    """

    scoring: Literal["softmax", "sigmoid"]
    top_k: int
    renormalise: bool = False  # the weights of a token are divided by (their sum + renorm_epsilon)
    renorm_epsilon: float = 0.0
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    uniform: bool = False

    def check(self, num_experts: int) -> None:
        """Errors: ValueError with the numbers that don't fit."""
        if not 0 < self.num_kept_groups <= self.num_groups or num_experts % self.num_groups:
            raise ValueError(
                f"routing keeps {self.num_kept_groups} of {self.num_groups} equal groups of {num_experts} experts"
            )
        num_eligible = num_experts // self.num_groups * self.num_kept_groups
        if not 0 < self.top_k <= num_eligible:
            raise ValueError(f"routing chooses {self.top_k} of {num_eligible} eligible experts")


class GatedActivation(StrEnum):
    """What an MLP makes of a gate g and an up u."""

    SILU = "silu"  # silu(g) u
    SWIGLUOAI = "swigluoai"  # (clamp(u, -7, 7) + 1) g' sigmoid(1.702 g'), g' = min(g, 7): gpt-oss, MiniMax-M3


class ScaleLayout(StrEnum):
    """How the scale bytes of blocks along a row are laid out. m is a row, k a block of it, K blocks a row."""

    LINEAR = "linear"  # byte m K + k
    # Tiles of 128 rows x 4 blocks, 512 bytes each: byte (m // 128 * K / 4 + k // 4) * 512 + m % 32 * 16
    # + m % 128 // 32 * 4 + k % 4. 4 divides K; rows are filled up to 128 with zeros.
    SWIZZLED_128X4 = "swizzled 128x4"

    def num_bytes(self, rows: int, blocks: int) -> int:
        """Of the scales of a matrix."""
        return rows * blocks if self is ScaleLayout.LINEAR else -(-rows // 128) * 128 * blocks


class Fp8Scaling(StrEnum):
    """What one float32 scale of an FP8 matrix covers."""

    TENSOR = "tensor"
    ROWS = "row"
    BLOCKS_1X128 = "1x128"  # activations
    BLOCKS_128X128 = "128x128"  # weights; the last tile of rows may be cut

    def scales_shape(self, rows: int, width: int) -> tuple[int, ...]:
        """Of the scales of a matrix."""
        if self is Fp8Scaling.TENSOR:
            return (1,)
        if self is Fp8Scaling.ROWS:
            return (rows, 1)
        return (rows if self is Fp8Scaling.BLOCKS_1X128 else -(-rows // 128), width // 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Tensor:
    """A matrix of E2M1 values in blocks of 16 along the rows, an E4M3 scale a block, one float32 scale G for all.

    value = e2m1 * scale / G; without G it counts as 1. Byte i of a row holds elements 2 i (low nibble) and 2 i + 1.

    Shapes: shape (M, K); data [M, K / 2] uint8; scales uint8 as `layout` says; global_scale 1 element.
    Errors: ValueError for parts that don't fit together, and for a width that the layout can't hold.
    """

    BLOCK: ClassVar[int] = 16

    data: Tensor
    scales: Tensor
    layout: ScaleLayout
    shape: tuple[int, int]
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        rows, width = self.shape
        _check_width("NVFP4", self.layout, width, self.BLOCK)
        _check_part("NVFP4 data", self.data, torch.uint8, (rows, width // 2))
        _check_part("NVFP4 scales", self.scales, torch.uint8, (self.layout.num_bytes(rows, width // self.BLOCK),))
        if self.global_scale is not None:
            _check_scalar("NVFP4 global scale", self.global_scale)

    @classmethod
    def empty(
        cls, rows: int, width: int, layout: ScaleLayout, *, device: torch.device, global_scale: Tensor | None = None
    ) -> Self:
        """For a kernel to fill."""
        _check_width("NVFP4", layout, width, cls.BLOCK)
        return cls(
            data=torch.empty(rows, width // 2, dtype=torch.uint8, device=device),
            scales=torch.empty(layout.num_bytes(rows, width // cls.BLOCK), dtype=torch.uint8, device=device),
            layout=layout,
            shape=(rows, width),
            global_scale=global_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp8Tensor:
    """A matrix of E4M3 values in blocks of 32 along the rows, a UE8M0 scale a block: byte b is 2^(b - 127).

    Shapes: shape (M, K); data [M, K] float8_e4m3fn; scales uint8 as `layout` says.
    Errors: ValueError for parts that don't fit together, and for a width that the layout can't hold.
    """

    BLOCK: ClassVar[int] = 32

    data: Tensor
    scales: Tensor
    layout: ScaleLayout
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        rows, width = self.shape
        _check_width("MXFP8", self.layout, width, self.BLOCK)
        _check_part("MXFP8 data", self.data, torch.float8_e4m3fn, (rows, width))
        _check_part("MXFP8 scales", self.scales, torch.uint8, (self.layout.num_bytes(rows, width // self.BLOCK),))

    @classmethod
    def empty(cls, rows: int, width: int, layout: ScaleLayout, *, device: torch.device) -> Self:
        """For a kernel to fill."""
        _check_width("MXFP8", layout, width, cls.BLOCK)
        return cls(
            data=torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
            scales=torch.empty(layout.num_bytes(rows, width // cls.BLOCK), dtype=torch.uint8, device=device),
            layout=layout,
            shape=(rows, width),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Tensor:
    """A matrix of E4M3 values with float32 scales: value = e4m3 * scale.

    Shapes: shape (M, K); data [M, K] float8_e4m3fn; scales as `scaling` says: [1], [M, 1], [M, K / 128]
    or [ceil(M / 128), K / 128].
    Errors: ValueError for parts that don't fit together, and for a width that 128 doesn't divide where blocks need it.
    """

    data: Tensor
    scales: Tensor
    scaling: Fp8Scaling
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        rows, width = self.shape
        _check_fp8_width(self.scaling, width)
        _check_part("FP8 data", self.data, torch.float8_e4m3fn, (rows, width))
        if self.scaling is Fp8Scaling.TENSOR:
            _check_scalar("FP8 scale", self.scales)
        else:
            _check_part("FP8 scales", self.scales, torch.float32, self.scaling.scales_shape(rows, width))

    @classmethod
    def empty(
        cls, rows: int, width: int, scaling: Fp8Scaling, *, device: torch.device, scale: Tensor | None = None
    ) -> Self:
        """For a kernel to fill; the scale of a tensor is given, those of blocks are found."""
        _check_fp8_width(scaling, width)
        if (scale is None) is (scaling is Fp8Scaling.TENSOR):
            raise ValueError(
                f"FP8 with a scale for each {scaling.value}: {'no ' if scale is None else ''}scale is given"
            )
        return cls(
            data=torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device),
            scales=torch.empty(scaling.scales_shape(rows, width), device=device) if scale is None else scale,
            scaling=scaling,
            shape=(rows, width),
        )


QuantizedTensor: TypeAlias = Nvfp4Tensor | Mxfp8Tensor | Fp8Tensor


def _check_width(name: str, layout: ScaleLayout, width: int, block: int) -> None:
    divisor = block if layout is ScaleLayout.LINEAR else 4 * block
    if width <= 0 or width % divisor:
        raise ValueError(f"{name} with {layout.value} scales needs a width that {divisor} divides, not {width}")


def _check_fp8_width(scaling: Fp8Scaling, width: int) -> None:
    by_blocks = scaling in (Fp8Scaling.BLOCKS_1X128, Fp8Scaling.BLOCKS_128X128)
    if width <= 0 or (by_blocks and width % 128):
        raise ValueError(f"FP8 with a scale for each {scaling.value} can't have the width {width}: 128 must divide it")


def _check_part(name: str, part: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if part.dtype != dtype or tuple(part.shape) != shape or not part.is_contiguous():
        layout = "" if part.is_contiguous() else ", not contiguous"
        raise ValueError(f"{name} must be {dtype} {list(shape)}, not {part.dtype} {list(part.shape)}{layout}")


def _check_scalar(name: str, part: Tensor) -> None:
    if part.dtype != torch.float32 or part.numel() != 1:
        raise ValueError(f"{name} must be one torch.float32, not {part.dtype} {list(part.shape)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNorm:
    """RMSNorm over all query heads and over all key heads of a token, as a rank knows it. N and K heads, H head dim.

    Shapes: q_weight [N * H], k_weight [K * H].
    """

    q_weight: Tensor
    k_weight: Tensor
    num_q_channels: int  # of all ranks
    num_k_channels: int
    eps: float
    counts_keys: tuple[bool, ...]  # of each rank of the launch: no other one adds the squares of its KV heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How heads turn, and where keys and values are kept. T tokens, R rotated channels, C slots of the cache.

    Shapes: cos and sin [T, R / 2], slots [T], caches [C, K, H].
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor
    interleaved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOutputs:
    """What the experts that a rank holds made of its rows, not added up yet. T rows, K experts a row, D columns.

    Shapes: outputs [T * K, D], of row t and its choice k in t K + k; ids [T, K] int32, those of experts held are from 0
        to num_experts - 1, what stands for others is anything; weights [T, K] float32 (float64 for float64); shared, of
        an expert that every row has, [T, D].
    """

    outputs: Tensor
    ids: Tensor
    weights: Tensor
    num_experts: int
    shared: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the sum: [T, D]."""
        return torch.Size((*self.ids.shape[:-1], self.outputs.shape[-1]))
