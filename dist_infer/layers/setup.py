"""What every layer of a model is built with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from dist_infer.comm.collectives import Collectives
from dist_infer.kernels.dispatch import Library, Target, resolve

F = TypeVar("F", bound=Callable[..., object])


def _ignore(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSetup:
    """The tensor-parallel group, where parameters live, and how kernel libraries are chosen.

    `kernel_orders` holds an order for an op by its name (see kernels/dispatch); `on_choice` gets one line for each
    choice made.
    """

    tp: Collectives
    dtype: torch.dtype
    device: torch.device
    kernel_orders: Mapping[str, str] = field(default_factory=dict)
    on_choice: Callable[[str], None] = _ignore

    def choose(self, op: str, libraries: Sequence[Library[F]], **geometry: int) -> Library[F]:
        """The library that a layer uses from now on."""
        target = Target(device=self.device, dtype=self.dtype, geometry=geometry)
        selection = resolve(op, libraries, target, self.kernel_orders.get(op, ""))
        self.on_choice(selection.explain())
        return selection.pick()

    def empty(self, *shape: int) -> torch.Tensor:
        """A parameter that the loader fills."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)
