"""Routed experts as their formula says, row by row in float64. R rows, E experts, K experts a row, D model, I inner."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """All experts of a layer.

    Shapes: gate_up [E, 2 * I, D], the gates first, down [E, D, I].
    """

    gate_up: Tensor
    down: Tensor

    @classmethod
    def random(cls, num_experts: int, inner: int, width: int, *, seed: int = 0) -> "DenseExperts":
        generator = torch.Generator().manual_seed(seed)
        return cls(
            torch.randn(num_experts, 2 * inner, width, generator=generator, dtype=torch.float64) * 0.5,
            torch.randn(num_experts, width, inner, generator=generator, dtype=torch.float64) * 0.5,
        )

    def part(self, experts: range, channels: range) -> tuple[Tensor, Tensor]:
        """What a rank holds: (gate_up, down) of some experts, some channels of each."""
        gate, up = self.gate_up[experts.start : experts.stop].chunk(2, 1)
        held = slice(channels.start, channels.stop)
        down = self.down[experts.start : experts.stop, :, held]
        return torch.cat([gate[:, held], up[:, held]], 1), down.contiguous()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sums; an id of -1 is no expert."""
        inner = self.down.shape[2]
        out = torch.zeros(x.shape, dtype=torch.float64)
        for row, row_ids in enumerate(ids.tolist()):
            for k, expert in enumerate(row_ids):
                if expert >= 0:
                    hidden = self.gate_up[expert] @ x[row].double()
                    gate, up = hidden[:inner], hidden[inner:]
                    out[row] += weights[row, k].double() * (self.down[expert] @ (gate / (1 + (-gate).exp()) * up))
        return out
