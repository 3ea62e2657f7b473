"""What every layer of a model is built with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.lane import Lane
from dist_infer.comm.mesh import Mesh
from dist_infer.kernels.choices import PhasedSelection, SizedSelection, select, select_phases
from dist_infer.kernels.dispatch import Library, Phase, Sizes, Target
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.scaled_linear import WeightFormat

F = TypeVar("F", bound=Callable[..., object])


def _ignore(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSetup:
    """The tensor-parallel group, where parameters live, and how kernel libraries are chosen.

    `mesh` and `world` are all ranks, over which experts are dealt; without them the group is all there is. A MoE layer
    takes `max_moe_tokens` rows of all ranks at a time, None: all of a step. `kernel_orders` holds an order for an op by
    its name (see kernels/dispatch); `on_choice` gets one line for each choice made. `uniform_routing` is for benchmarks
    with dummy weights: routers do their work, but the experts of a row are drawn evenly. Linear layers quantise their
    weights to `weight_format` when they have been loaded: what is in `on_loaded` does it, and gives the bytes it freed.
    `cached_as` is the dtype of the KV cache, None: `dtype`. `batch_invariant`: attention of a sequence may not depend
    on those beside it. What was `tuned` on this device goes before the committed measurements.
    """

    tp: Collectives
    dtype: torch.dtype
    device: torch.device
    kernel_orders: Mapping[str, str] = field(default_factory=dict)
    on_choice: Callable[[str], None] = _ignore
    graph_blockers: set[str] = field(default_factory=set)
    mesh: Mesh | None = None
    world: Collectives | None = None
    max_moe_tokens: int | None = None
    uniform_routing: bool = False
    weight_format: WeightFormat | None = None
    cached_as: torch.dtype | None = None
    batch_invariant: bool = False
    tuned: Sequence[Measured] = ()
    on_loaded: list[Callable[[], int]] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)  # none or one, see `lane`

    @property
    def lane(self) -> Lane:
        """The model's own, made when a layer first asks for it."""
        if not self.lanes:
            self.lanes.append(Lane(self.device))
        return self.lanes[0]

    @property
    def expert_mesh(self) -> Mesh:
        """The ranks that experts are dealt to."""
        return self.mesh or Mesh.create(world=self.tp.size, rank=self.tp.rank)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the KV cache."""
        return self.cached_as or self.dtype

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of routers and of what else is not to be rounded: float32, float64 for float64."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def choose(self, op: str, libraries: Sequence[Library[F]], **geometry: int) -> Library[F]:
        """The library that a layer uses from now on."""
        target = Target(device=self.device, dtype=self.dtype, geometry=geometry)
        selection = select(op, libraries, target, self.kernel_orders)
        self.on_choice(selection.explain())
        library = selection.pick()
        if not library.graph_safe:
            self.graph_blockers.add(f"{op} by {library.name}")
        return library

    def choose_by_size(self, op: str, libraries: Sequence[Library[F]], size: str, **geometry: int) -> SizedSelection[F]:
        """What each step picks the library from, by one of its sizes."""
        target = Target(device=self.device, dtype=self.dtype, geometry=geometry)
        selection = select(op, libraries, target, self.kernel_orders, tuned=self.tuned)
        sized = SizedSelection(selection=selection, size=size, on_choice=self.on_choice)
        library = sized.pick(1)  # steps of few sequences are captured
        if not library.graph_safe:
            self.graph_blockers.add(f"{op} by {library.name}")
        return sized

    def choose_phases(
        self, op: str, libraries: Sequence[Library[F]], *, sizes: Sizes, **geometry: int
    ) -> PhasedSelection[F]:
        """What each step picks the libraries of its phases from; `sizes` are likely ones of a step."""
        target = Target(device=self.device, dtype=self.dtype, geometry=geometry)
        selection = select_phases(
            op, libraries, target, self.kernel_orders, self.on_choice, sizes=sizes, tuned=self.tuned
        )
        library = selection.pick(Phase.GENERATION, sizes)  # steps of that phase alone are captured
        if not library.graph_safe:
            self.graph_blockers.add(f"{op}.{Phase.GENERATION} by {library.name}")
        return selection

    def empty(self, *shape: int) -> torch.Tensor:
        """A parameter that the loader fills."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty_wide(self, *shape: int) -> torch.Tensor:
        """A parameter of at least float32."""
        return torch.empty(shape, dtype=self.wide_dtype, device=self.device)
