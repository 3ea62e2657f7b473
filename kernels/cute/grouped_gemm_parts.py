"""What the warps of a grouped product agree on: its variants, the sizes of its tiles, and which of them a CTA has."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from dist_infer.kernels.carriers import GatedActivation

DEPTH = 64  # channels of a piece: 128 bytes of a row
STEP = 16  # tiles grow by so many pairs
PASS = 32  # pairs that go through shared memory at a time, on their way out
PASS_BYTES = PASS * 128  # of one warpgroup: 64 channels
SHORT = 48  # pairs: up to there weights are what takes time
_LOADS = 72  # registers of a thread that loads
NUMBERS = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compiled apart: the gate and up product with its activation, or without one the down product.

    `sizes`: numbers of pairs that a tile is computed for, ascending multiples of 8, the last one of 16.
    `box`: rows of weights that one load takes, 64 for each warpgroup that multiplies; a stage has two boxes.
    `pieces`: of DEPTH channels each that are summed over in a stage.
    `cluster`: CTAs that load weights together where both have the same, 1 or 2.
    `orders`: there is no order yet, but the ids of the pairs; tiles are short.
    """

    activation: GatedActivation | None
    sizes: tuple[int, ...]
    num_stages: int
    dtype: torch.dtype
    box: int = 128
    pieces: int = 1
    cluster: int = 1
    orders: bool = False

    @property
    def gate_up(self) -> bool:
        """The two boxes of weights of a stage are gates and ups, and rows are gathered."""
        return self.activation is not None

    @property
    def number(self):
        """The dtype, as CuTe DSL names it."""
        return NUMBERS[self.dtype]

    @property
    def num_groups(self) -> int:
        """Warpgroups that multiply."""
        return self.box // 64

    @property
    def num_threads(self) -> int:
        """Of a CTA: one warpgroup loads."""
        return 128 * (1 + self.num_groups)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that loads, and of one that multiplies: what a CTA was given when it began, shared anew."""
        given = min(65536 // self.num_threads, 248) // 8 * 8
        return _LOADS, min((given * (1 + self.num_groups) - _LOADS) // self.num_groups // 8 * 8, 240)

    @property
    def stage_bytes(self) -> int:
        """Of the weights of a stage."""
        return 2 * self.box * self.pieces * DEPTH * 2

    @property
    def num_passes(self) -> int:
        """Buffers of a warpgroup for what is on its way out."""
        return min(2, -(-self.pairs // PASS))

    @property
    def sorts(self) -> bool:
        """Tiles are of lengths so different that their order tells."""
        return self.pairs > SHORT

    @property
    def pairs(self) -> int:
        """The most pairs of a tile."""
        return self.sizes[-1]


@cute.jit
def from_lane(known: tuple[Int32, ...], lane: Int32):
    """What a lane has looked up."""
    return tuple(cute.arch.make_warp_uniform(cute.arch.shuffle_sync(value, lane)) for value in known)
