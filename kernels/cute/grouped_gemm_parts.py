"""What the warps of a grouped product agree on: its variants, the sizes of its tiles, and which of them a CTA has."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from dist_infer.kernels.carriers import GatedActivation

DEPTH = 64  # channels summed over a stage: 128 bytes of a row
BOX = 128  # rows of weights that one load takes; a stage has two
STEP = 16  # tiles grow by so many pairs
PASS = 32  # pairs that go through shared memory at a time, on their way out
PASS_BYTES = PASS * 128  # of one warpgroup: 64 channels
NUMBERS = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What is compiled apart: the gate and up product with its activation, or without one the down product.

    `sizes`: numbers of pairs that a tile is computed for, ascending multiples of 8, the last one of 16.
    """

    activation: GatedActivation | None
    sizes: tuple[int, ...]
    num_stages: int
    dtype: torch.dtype

    @property
    def gate_up(self) -> bool:
        """The two boxes of weights of a stage are gates and ups, and rows are gathered."""
        return self.activation is not None

    @property
    def number(self):
        """The dtype, as CuTe DSL names it."""
        return NUMBERS[self.dtype]

    @property
    def pairs(self) -> int:
        """The most pairs of a tile."""
        return self.sizes[-1]


@cute.jit
def from_lane(known: tuple[Int32, ...], lane: Int32):
    """What a lane has looked up."""
    return tuple(cute.arch.make_warp_uniform(cute.arch.shuffle_sync(value, lane)) for value in known)
