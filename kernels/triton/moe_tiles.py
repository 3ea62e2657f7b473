"""Tile sizes of the grouped products, by how many pairs an expert has on average: data.

M pairs of a block, N output channels of a program (of gate and up each), K channels summed over at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """`swap`: the product is computed transposed. `tails`: blocks that are filled by half or less become smaller."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap: bool = False
    tails: bool = False

    @property
    def sizes(self) -> tuple[int, int, bool, bool]:
        """As the kernels take them."""
        return self.block_n, self.block_k, self.swap, self.tails

    @property
    def launch(self) -> Mapping[str, int]:
        """What the compiler is told."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Of both products, for up to `max_density` pairs an expert."""

    max_density: float
    block_m: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True, slots=True)
class PairTile:
    """Of one pair's products: output channels of a program, and channels summed over at a time."""

    rows: int
    depth: int
    num_warps: int


PAIR_GATE_UP = PairTile(1, 256, 1)
PAIR_DOWN = PairTile(2, 256, 1)

# Of gate and up and of down, by the format of the weights.
QUANTIZED_PAIRS: Mapping[str, tuple[PairTile, PairTile]] = {
    "fp8": (PairTile(8, 2048, 8), PairTile(1, 256, 1)),
    "mxfp8": (PairTile(4, 2048, 4), PairTile(1, 256, 1)),
    "nvfp4": (PairTile(4, 2048, 4), PairTile(1, 256, 1)),
}

HALF: Sequence[Tiles] = (
    Tiles(8, 16, Tile(64, 128, 4, 3, swap=True), Tile(128, 128, 4, 3)),
    Tiles(24, 32, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)),
    Tiles(56, 64, Tile(64, 64, 4, 4, swap=True, tails=True), Tile(128, 64, 4, 4, swap=True, tails=True)),
    Tiles(float("inf"), 128, Tile(128, 64, 8, 4, tails=True), Tile(128, 64, 4, 3, tails=True)),
)
WIDE: Sequence[Tiles] = (
    Tiles(24, 16, Tile(32, 32, 4, 3), Tile(64, 32, 4, 3)),
    Tiles(float("inf"), 64, Tile(32, 32, 4, 3), Tile(64, 32, 4, 3)),
)


# Experts for each pair, from which on pairs are computed one by one.
QUANTIZED_EXPERTS_PER_PAIR: Mapping[str, int] = {"fp8": 16, "mxfp8": 2, "nvfp4": 2}
# The products with quantised weights are always computed transposed. FP8 goes by 128 channels of either kind.
QUANTIZED: Mapping[str, Sequence[Tiles]] = {
    "fp8": (
        Tiles(8, 16, Tile(128, 128, 4, 3), Tile(128, 128, 4, 2)),
        Tiles(float("inf"), 32, Tile(128, 128, 8, 3), Tile(64, 128, 4, 3)),
    ),
    "mxfp8": (
        Tiles(8, 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 2)),
        Tiles(24, 32, Tile(64, 128, 4, 3), Tile(64, 128, 4, 2)),
        Tiles(float("inf"), 64, Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ),
    "nvfp4": (
        Tiles(8, 16, Tile(64, 256, 4, 3), Tile(64, 128, 4, 2)),
        Tiles(24, 32, Tile(64, 128, 4, 3), Tile(64, 128, 4, 2)),
        Tiles(float("inf"), 64, Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
    ),
}


def quantized_tiles_for(num_pairs: int, num_experts: int, quant_format: str) -> Tiles:
    """The measured best on an H200."""
    return _densest(QUANTIZED[quant_format], num_pairs / num_experts)


def _densest(choices: Sequence[Tiles], density: float) -> Tiles:
    return next(tiles for tiles in choices if density <= tiles.max_density)


def tiles_for(num_pairs: int, num_experts: int, element_bytes: int, place: int | None = None) -> Tiles:
    """The measured best for bfloat16 and float16 on an H200; what float32 gets is only known to fit.

    With a `place` those that stand there, or the last ones.
    """
    choices = HALF if element_bytes == 2 else WIDE
    if place is not None:
        return choices[min(place, len(choices) - 1)]
    return _densest(choices, num_pairs / num_experts)
