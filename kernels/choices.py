"""How a layer chooses: by a user's order, by what was measured, or by the op's own order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Generic, TypeVar

from dist_infer.kernels import attention_measured, moe_measured, quantized_experts_measured
from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Library, Phase, Selection, Sizes, Target, order_libraries, resolve
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.orders import OPS, order_of
from dist_infer.kernels.phases import num_seqs_by_phase

F = TypeVar("F", bound=Callable[..., object])
MEASURED: tuple[Measured, ...] = (
    *attention_measured.MEASURED,
    *moe_measured.MEASURED,
    *quantized_experts_measured.MEASURED,
)


def select(
    op: str,
    libraries: Sequence[Library[F]],
    target: Target,
    orders: Mapping[str, str],
    *,
    phase: Phase | None = None,
    tuned: Sequence[Measured] = (),
) -> Selection[F]:
    """The libraries that can run, best first; what was `tuned` goes before what is committed.

    Errors: UsageError for a malformed order, and when none can run.
    """
    return resolve(op, libraries, target, order_of(orders, op, phase), phase=phase, measured=(*tuned, *MEASURED))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSelection(Generic[F]):
    """The libraries of an op, from which a layer picks by a size of its step: each size once."""

    selection: Selection[F]
    size: str
    on_choice: Callable[[str], None]
    _picked: dict[int, Library[F]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def pick(self, value: int) -> Library[F]:
        """The library for this size. One that wasn't told of yet is.

        Errors: UsageError with every reason when there is none.
        """
        if value not in self._picked:
            sizes = {self.size: value}
            library = self.selection.pick(sizes)
            self._picked[value] = library
            if library.name not in self._told:
                self._told.add(library.name)
                self.on_choice(self.selection.explain(sizes))
        return self._picked[value]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedSelection(Generic[F]):
    """The libraries of each phase of an op, from which each step picks by its sizes."""

    context: Selection[F]
    generation: Selection[F]
    told: set[str]
    on_choice: Callable[[str], None]

    def pick(self, phase: Phase, sizes: Sizes) -> Library[F]:
        """The library of a phase of a step. One that wasn't told of yet is.

        Errors: UsageError with every reason when there is none.
        """
        selection = self.context if phase is Phase.CONTEXT else self.generation
        library = selection.pick(sizes)
        name = f"{selection.op}: {library.name}"
        if name not in self.told:
            self.told.add(name)
            self.on_choice(selection.explain(sizes))
        return library

    def pick_both(self, step: PagedStep) -> tuple[Library[F], Library[F]]:
        """(context, generation) of a step.

        Errors: UsageError as `pick`.
        """
        of_context, of_generation = num_seqs_by_phase(step)
        context = self.pick(Phase.CONTEXT, {"seqs": of_context, "block_size": step.block_size})
        return context, self.pick(Phase.GENERATION, {"seqs": of_generation, "block_size": step.block_size})


def select_phases(
    op: str,
    libraries: Sequence[Library[F]],
    target: Target,
    orders: Mapping[str, str],
    on_choice: Callable[[str], None],
    *,
    sizes: Sizes,
    tuned: Sequence[Measured] = (),
) -> PhasedSelection[F]:
    """Both phases; `sizes` are those that a step is likely to have, for what is told now.

    Errors: UsageError for a malformed order, and when no library can run a phase.
    """
    context, generation = (select(op, libraries, target, orders, phase=phase, tuned=tuned) for phase in Phase)
    selection = PhasedSelection(context=context, generation=generation, told=set(), on_choice=on_choice)
    for phase in Phase:
        selection.pick(phase, sizes)
    return selection


def check_orders(orders: Mapping[str, str]) -> None:
    """Errors: UsageError for a malformed list, and for a library that an op has not."""
    for name, order in orders.items():
        module, attribute = OPS[name.split(".")[0]]
        libraries = getattr(import_module(f"dist_infer.kernels.{module}"), attribute)
        for choices in libraries.values() if isinstance(libraries, Mapping) else (libraries,):
            order_libraries(name, choices, order)
