"""Fills the parameters of a model from a source of weights, tensor by tensor."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from dist_infer.checkpoint.coverage import check_coverage
from dist_infer.errors import CheckpointError
from dist_infer.layers.weights import WeightSlot

_log = logging.getLogger(__name__)
_CASTABLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_MAX_LISTED = 3


class TensorSource(Protocol):
    """Named tensors that can be read in parts; every method but `names` raises CheckpointError with file and tensor."""

    @property
    def location(self) -> str:
        """Where the tensors come from, for messages."""

    def names(self) -> Collection[str]:
        """All tensors of the source."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """What `read` returns."""

    def file_of(self, name: str) -> str:
        """The file that holds the tensor, for messages."""

    def read(self, name: str, take: tuple[range, ...]) -> Tensor:
        """The part of the tensor that `take` cuts out: one range of step 1 for each dim."""


def load_weights(
    slots: Iterable[WeightSlot],
    source: TensorSource,
    *,
    ignored: Iterable[str] = (),
    tied: Mapping[str, str] | None = None,
    on_tensor: Callable[[str], None] = lambda name: None,
    parameters: Iterable[tuple[str, Tensor]] = (),
) -> int:
    """Copies every slot's part of the source into its parameter and returns the bytes written.

    What can be checked without reading a weight is checked first, so a wrong checkpoint fails before the long part.
    `ignored` holds regular expressions for whole names that may be in the source and are skipped; `tied` maps names
    that may repeat another tensor to the one that is used, with a warning where they differ. `on_tensor` hears of each
    tensor after it was loaded: it tells a watchdog that the load goes on. `parameters` (name and tensor) are what the
    slots must fill; without them it is every storage that a slot points into.

    Ranks: local.
    Errors: CheckpointError naming file and tensor: missing, unexpected, wrong shape, a cast that has no meaning or
        overflows, elements of a parameter that are filled twice or never.
    """
    slots, tied = list(slots), dict(tied or {})
    check_coverage(slots, parameters)
    _check_names(slots, source, [*ignored, *map(re.escape, tied)])
    _check_shapes(slots, source)
    _check_dtypes(slots, source)
    num_bytes = 0
    for slot in slots:
        _fill(slot, source)
        num_bytes += slot.into.numel() * slot.into.element_size()
        on_tensor(slot.name)
    for copy, used in tied.items():
        if copy in source.names():
            _compare_tied(copy, [slot for slot in slots if slot.name == used], source)
    return num_bytes


def _check_names(slots: Iterable[WeightSlot], source: TensorSource, ignored: Iterable[str]) -> None:
    wanted = {slot.name for slot in slots}
    present = set(source.names())
    missing = sorted(wanted - present)
    if missing:
        raise CheckpointError(f"{source.location}: tensor {_listed(missing)} is missing; the model needs it")
    patterns = [re.compile(pattern) for pattern in ignored]
    extra = sorted(name for name in present - wanted if not any(p.fullmatch(name) for p in patterns))
    if extra:
        where = source.file_of(extra[0])
        raise CheckpointError(f"{where}: tensor {_listed(extra)} is unexpected: the architecture has no such parameter")


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(repr(name) for name in names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _check_shapes(slots: Iterable[WeightSlot], source: TensorSource) -> None:
    for slot in slots:
        shape = source.shape(slot.name)
        if not slot.fits(shape):
            raise _error(slot, source, f"has shape {list(shape)}, the model needs {list(slot.shape)}")


def _check_dtypes(slots: Iterable[WeightSlot], source: TensorSource) -> None:
    """Refuses casts that mean nothing (packed or quantised to float); announces those that lose digits."""
    lossy: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    for slot in slots:
        stored, wanted = source.dtype(slot.name), slot.into.dtype
        if stored == wanted:
            continue
        if not {stored, wanted} <= _CASTABLE:
            raise _error(slot, source, f"is stored as {_short(stored)} and can't become {_short(wanted)}")
        lossy[stored, wanted] += is_narrowing(stored, wanted)
    for (stored, wanted), count in lossy.items():
        if count:
            rounding = f"{_short(stored)} to {_short(wanted)}"
            _log.warning("%s: %d tensors are rounded from %s", source.location, count, rounding)


def is_narrowing(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast between two float types may change a value: fewer digits, or a smaller range of exponents."""
    have, get = torch.finfo(stored), torch.finfo(wanted)
    return get.eps > have.eps or get.smallest_normal > have.smallest_normal


def _fill(slot: WeightSlot, source: TensorSource) -> None:
    if slot.into.numel() == 0:
        return
    part = source.read(slot.name, slot.take)
    with torch.no_grad():
        slot.into.copy_(part)
    if part.dtype != slot.into.dtype and _overflowed(part, slot.into):
        low, high = (float(value) for value in part.aminmax())
        found = f"has values from {low:.4g} to {high:.4g}, too large for {_short(slot.into.dtype)}"
        raise _error(slot, source, f"{found}; choose another --dtype")


def _overflowed(part: Tensor, into: Tensor) -> bool:
    """Whether the cast made an infinity out of a finite value. Works on extremes: no temporary of the tensor's size."""
    if torch.finfo(into.dtype).max >= torch.finfo(part.dtype).max:
        return False
    return any(
        bool(torch.isinf(after) & torch.isfinite(before))
        for before, after in zip(part.aminmax(), into.aminmax(), strict=True)
    )


def _compare_tied(copy: str, slots: Iterable[WeightSlot], source: TensorSource) -> None:
    """Warns when this rank's part of a repeated tensor isn't the one that is used."""
    for slot in slots:
        same = slot.fits(source.shape(copy))
        if same and slot.into.numel():
            same = torch.equal(source.read(copy, slot.take).to(slot.into), slot.into)
        if not same:
            used = f"{slot.name!r} is used in its place, because the config ties the two"
            _log.warning("%s: tensor %r differs from its twin; %s", source.file_of(copy), copy, used)


def _error(slot: WeightSlot, source: TensorSource, problem: str) -> CheckpointError:
    return CheckpointError(f"{source.file_of(slot.name)}: tensor {slot.name!r} {problem}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
