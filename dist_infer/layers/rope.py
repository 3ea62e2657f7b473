"""Angles of the rotary position embedding. T tokens, H head dim.

Frequencies and angles are computed in float64, whatever the model's dtype: in float32 the angle of position 100,000
is off by 0.004.
"""

import math

import torch
from torch import Tensor

from dist_infer.config import RopeConfig
from dist_infer.layers.setup import LayerSetup


class RotaryAngles:
    """cos and sin of every position, computed once a step for all layers."""

    def __init__(self, config: RopeConfig, head_dim: int, setup: LayerSetup) -> None:
        self._frequencies = frequencies(config, head_dim).to(setup.device)
        self._dtype = torch.float64 if setup.dtype == torch.float64 else torch.float32

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), float32 (float64 for a float64 model).

        Shapes: positions [T] -> two of [T, H / 2].
        Ranks: local.
        """
        angles = positions.double()[:, None] * self._frequencies
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)


def frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians a token for each pair of channels, float64.

    "llama3" divides by `factor` those that turn less than `low_freq_factor` times in the original context, keeps
    those that turn more than `high_freq_factor` times, and blends between.

    Shapes: -> [H / 2].
    Source: Su et al., RoFormer (2021); the scaling of Llama 3.1 as in its config.json.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = config.theta**-exponents
    if config.kind == "default":
        return plain
    turns = config.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)
    return plain * (kept + (1 - kept) / config.factor)
