"""Which library was the fastest where: the form of the data, which stands with its figures in *_measured.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """On `device`, `library` was the fastest of `op` (with its phase) for all sizes in these ranges.

    With a `tactic` it is so when its function is told that (see dispatch.Library). `figures` are what was measured, and
    where they are kept. Sizes are those of the layer's geometry and of a step.
    """

    device: str
    op: str
    library: str
    sizes: Mapping[str, range]
    figures: str
    tactic: Mapping[str, int] = field(default_factory=dict)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """All sizes that this entry names are known and in its ranges."""
        return all(name in sizes and sizes[name] in values for name, values in self.sizes.items())

    def may_hold(self, sizes: Mapping[str, int]) -> bool:
        """The sizes that are known so far are in its ranges."""
        return all(sizes[name] in values for name, values in self.sizes.items() if name in sizes)


def exactly(sizes: Mapping[str, int]) -> dict[str, range]:
    """The ranges that hold these sizes alone."""
    return {name: range(size, size + 1) for name, size in sizes.items()}


def entries_for(
    table: Sequence[Measured], *, device: str, op: str, geometry: Mapping[str, int]
) -> tuple[Measured, ...]:
    """What a layer of this geometry needs of a table."""
    return tuple(entry for entry in table if (entry.device, entry.op) == (device, op) and entry.may_hold(geometry))
