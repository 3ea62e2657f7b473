"""Which part of which checkpoint tensor goes where: what a layer tells the loader."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One checkpoint tensor and this rank's part of it.

    `shape` is the whole tensor's, `take` this rank's range in each dim (empty where it holds nothing), `into` the
    view of a parameter that the part is copied to. With `pads_rows` the tensor in the file may have more rows than
    `shape` says; nobody reads them.
    """

    name: str
    shape: tuple[int, ...]
    take: tuple[range, ...]
    into: Tensor
    pads_rows: bool = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """A tensor of this shape is the one."""
        longer = self.pads_rows and len(shape) == len(self.shape) and shape[0] >= self.shape[0]
        return shape == self.shape or (longer and shape[1:] == self.shape[1:])

    def __post_init__(self) -> None:
        taken = tuple(len(part) for part in self.take)
        inside = all(part.start >= 0 and part.stop <= size for part, size in zip(self.take, self.shape, strict=True))
        if taken != tuple(self.into.shape) or not inside:
            raise ValueError(
                f"{self.name}: part {self.take} of {self.shape} does not fit a view of {list(self.into.shape)}"
            )
