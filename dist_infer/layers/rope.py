"""Angles of the rotary position embedding. T tokens, R rotated channels of a head.

Frequencies and angles are computed in float64, whatever the model's dtype: in float32 the angle of position 100,000
is off by 0.004.
"""

import math

import torch
from torch import Tensor

from dist_infer.config import RopeConfig
from dist_infer.kernels import rotary_angles as op
from dist_infer.layers.setup import LayerSetup


class RotaryAngles:
    """cos and sin of every position, computed once a step for all layers."""

    def __init__(self, config: RopeConfig, head_dim: int, setup: LayerSetup) -> None:
        self._frequencies = frequencies(config, config.rotary_dim or head_dim).to(setup.device)
        self._factor = torch.tensor(config.angle_factor, dtype=torch.float64, device=setup.device)
        self._dtype = setup.wide_dtype
        self._library = setup.choose("rotary_angles", op.LIBRARIES, rope_dim=2 * len(self._frequencies))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), times the angle factor, float32 (float64 for a float64 model).

        Shapes: positions [T] -> two of [T, R / 2].
        Ranks: local.
        """
        return op.rotary_angles(positions, self._frequencies, self._factor, dtype=self._dtype, library=self._library)


def frequencies(config: RopeConfig, rotary_dim: int) -> Tensor:
    """Radians a token for each pair of channels, float64.

    "llama3" divides by `factor` those that turn less than `low_freq_factor` times in the original context, keeps
    those that turn more than `high_freq_factor` times, and blends between. "yarn" does the same with `beta_slow` and
    `beta_fast`, but blends by the index of the pair.

    Shapes: -> [R / 2].
    Source: Su et al., RoFormer (2021); the scaling of Llama 3.1 as in its config.json; Peng et al., YaRN (2023).
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    plain = config.theta**-exponents
    if config.kind == "default":
        return plain
    if config.kind == "yarn":
        low, high = _yarn_pairs(config, rotary_dim)
        scaled = ((torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return plain * (1 - scaled + scaled / config.factor)
    turns = config.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return plain * (kept + (1 - kept) / config.factor)


def _yarn_pairs(config: RopeConfig, rotary_dim: int) -> tuple[float, float]:
    """The pairs between which the blend runs: up to the first all is kept, from the second on all is scaled."""

    def pair_of(turns: float) -> float:
        return (
            rotary_dim
            * math.log(config.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = pair_of(config.beta_fast), pair_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    return low, high if high != low else high + 0.001
