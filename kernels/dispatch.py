"""Choice between the libraries that implement an op: the mechanism only.

An op file holds an ordered tuple of `Library`. `resolve` drops what can't run here (once, when a layer is built);
`Selection.pick` takes the first that supports the sizes at hand (when a layer is built or once a step, never per layer
call). Reasons are kept, so that `Selection.explain` can say why a library was passed over.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch

from dist_infer.errors import UsageError
from dist_infer.kernels.measured import Measured, entries_for

F = TypeVar("F", bound=Callable[..., object])
Sizes = Mapping[str, int]
_NO_SIZES: Sizes = MappingProxyType({})


class Phase(StrEnum):
    """Parts of a step that an op of attention may leave to different libraries: several tokens a sequence, or one."""

    CONTEXT = "context"
    GENERATION = "generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is known when a layer is built: where it runs, in which dtype, and its fixed sizes (such as head_dim)."""

    device: torch.device
    dtype: torch.dtype
    geometry: Sizes = field(default_factory=dict)

    @property
    def device_name(self) -> str:
        """As tables of measurements call it."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type


def runs_anywhere(target: Target) -> str | None:
    """`is_available` of a library without static demands."""
    return None


def on_triton(target: Target) -> str | None:
    """`is_available` of a library whose kernels are written in Triton."""
    if target.device.type != "cuda":
        return f"needs a GPU, not {target.device.type}"
    if target.dtype == torch.float64:
        return "float64 is the reference's"
    return None if find_spec("triton") else "the package triton is missing: pip install triton"


def on_cute(target: Target) -> str | None:
    """`is_available` of a library whose kernels are written in CuTe DSL for sm_90a, with 16-bit numbers."""
    if target.device.type != "cuda":
        return f"needs a GPU, not {target.device.type}"
    if target.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {str(target.dtype).removeprefix('torch.')}"
    missing = [name for name in ("cutlass", "tvm_ffi") if not find_spec(name)]
    if missing:
        return f"{missing[0]} is missing: pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
    major, minor = torch.cuda.get_device_capability(target.device)
    return None if (major, minor) == (9, 0) else f"needs compute capability 9.0, not {major}.{minor}"


def deferred(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported at the first call, because a package that it needs may be missing."""

    @cache
    def load() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function

    return lambda *args, **options: load()(*args, **options)


def any_sizes(sizes: Sizes) -> str | None:
    """`supports` of a library that takes every size."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Library(Generic[F]):
    """One implementation of an op. Both tests return None for yes, else the reason for no.

    `is_available` is static (device, architecture, package, dtype, geometry), `supports` is cheap. A library with
    `default=False` is used only when an order names it. One that is `graph_safe` can be captured in a CUDA graph: it
    reads sizes from the device, never waits for it, and takes the host's copies as upper bounds. One with `prepare`
    is fast on weights that went through it, once, when they had been loaded. `phases` are those that it has, of an op
    that has any. `tactics` are ways that its function can be told to take, as options, instead of its own choice: they
    differ in speed, and in the order of sums.
    """

    name: str
    function: F
    is_available: Callable[[Target], str | None] = runs_anywhere
    supports: Callable[[Sizes], str | None] = any_sizes
    default: bool = True
    graph_safe: bool = False
    prepare: Callable[[Any], Any] | None = None
    phases: tuple[Phase, ...] = tuple(Phase)
    tactics: tuple[Mapping[str, int], ...] = ()

    def told(self, tactic: Mapping[str, int]) -> "Library[F]":
        """The same, and its function takes that way."""
        function: Any = partial(self.function, **tactic)
        return replace(self, function=function, tactics=()) if tactic else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection(Generic[F]):
    """The libraries of an op that can run on a target, best first, and why the others can't.

    Where something was `measured`, the library that was the fastest comes before that order.
    """

    op: str
    libraries: tuple[Library[F], ...]
    rejected: tuple[tuple[str, str], ...]  # (name, reason)
    geometry: Sizes = field(default_factory=dict)
    measured: tuple[Measured, ...] = ()

    def pick(self, sizes: Sizes = _NO_SIZES) -> Library[F]:
        """The first library that supports these sizes.

        Errors: UsageError with every reason when there is none.
        """
        entry = self._entry(sizes)
        for library in self._ordered(entry):
            if library.supports(sizes) is None:
                return library.told(entry.tactic) if entry is not None and _tells(entry, library) else library
        raise UsageError(f"no library can run {self.op}: {self.explain(sizes)}")

    def _ordered(self, entry: Measured | None) -> Sequence[Library[F]]:
        if entry is None:
            return self.libraries
        return sorted(self.libraries, key=lambda library: library.name != entry.library)

    def _entry(self, sizes: Sizes) -> Measured | None:
        """What was measured for these sizes."""
        known = {**self.geometry, **sizes}
        return next((entry for entry in self.measured if entry.holds(known)), None)

    def explain(self, sizes: Sizes = _NO_SIZES) -> str:
        """One line: the choice for these sizes, then every library passed over with its reason."""
        chosen: str | None = None
        notes = [f"{name} rejected ({reason})" for name, reason in self.rejected]
        entry = self._entry(sizes)
        for library in self._ordered(entry):
            reason = library.supports(sizes)
            if reason is not None:
                notes.append(f"{library.name} rejected ({reason})")
            elif chosen is None:
                chosen = library.name
                if entry is not None and entry.library == chosen:
                    tactic = entry.tactic if _tells(entry, library) else {}
                    notes.insert(0, ", ".join(["the fastest that was measured", *spell(tactic)]))
            else:
                notes.append(f"{library.name} comes later")
        return "; ".join([f"{self.op}: {chosen or 'none'}", *notes])


def spell(tactic: Mapping[str, int]) -> list[str]:
    """For people."""
    return [f"{name} {value}" for name, value in tactic.items()]


def _tells(entry: Measured, library: Library[F]) -> bool:
    """The entry names a way that the library has; one of another version may be gone."""
    return entry.library == library.name and dict(entry.tactic) in map(dict, library.tactics)


def resolve(
    op: str,
    libraries: Sequence[Library[F]],
    target: Target,
    order: str = "",
    *,
    phase: Phase | None = None,
    measured: Sequence[Measured] = (),
) -> Selection[F]:
    """The libraries that can run on `target`, or one phase of the op there, in `order` (see `order_libraries`).

    What was `measured` counts where no order is given.
    Errors: UsageError for a malformed order, and when none can run.
    """
    ordered = order_libraries(op, libraries, order)
    op = f"{op}.{phase}" if phase else op
    reasons = [(library, _reason_against(library, target, phase)) for library in ordered]
    unnamed = [(library.name, "not in the order") for library in libraries if library not in ordered]
    entries: tuple[Measured, ...] = ()
    if measured and not order.strip(" ,"):
        entries = entries_for(measured, device=target.device_name, op=op, geometry=target.geometry)
    selection = Selection(
        op=op,
        libraries=tuple(library for library, reason in reasons if reason is None),
        rejected=(*((library.name, reason) for library, reason in reasons if reason is not None), *unnamed),
        geometry=target.geometry,
        measured=entries,
    )
    if not selection.libraries:
        raise UsageError(f"no library can run {op} on {target.device} in {target.dtype}: {selection.explain()}")
    return selection


def _reason_against(library: Library[F], target: Target, phase: Phase | None) -> str | None:
    return f"has no {phase} phase" if phase and phase not in library.phases else library.is_available(target)


def order_libraries(op: str, libraries: Sequence[Library[F]], order: str = "") -> tuple[Library[F], ...]:
    """`libraries` in the order that a user asked for.

    "" is the op's own order. "a,b" is exact: these and no others. "+a,-b" changes the op's own order: a is tried first
    (several "+" in the order written), b never.
    Errors: UsageError for an unknown or empty name and for a mixture of both forms.
    """
    own = tuple(library for library in libraries if library.default)
    tokens = [token.strip() for token in order.split(",") if token.strip()]
    if not tokens:
        return own
    by_name = {library.name: library for library in libraries}
    names = [token.lstrip("+-").strip() if token[0] in "+-" else token for token in tokens]
    for name in names:
        if name not in by_name:
            raise UsageError(f"{op} has no library {name!r}: choose from {', '.join(by_name)}")
    signs = {token[0] if token[0] in "+-" else "" for token in tokens}
    if "" in signs and len(signs) > 1:
        raise UsageError(f"the order {order!r} of {op} mixes plain names with +name or -name: use one form")
    if "" in signs:
        return tuple(by_name[name] for name in dict.fromkeys(names))
    first = dict.fromkeys(name for name, token in zip(names, tokens, strict=True) if token[0] == "+")
    never = {name for name, token in zip(names, tokens, strict=True) if token[0] == "-"}
    if both := sorted(never & set(first)):
        raise UsageError(f"the order {order!r} of {op} both adds and removes {both[0]!r}")
    changed = (*(by_name[name] for name in first), *(library for library in own if library.name not in first))
    return tuple(library for library in changed if library.name not in never)
