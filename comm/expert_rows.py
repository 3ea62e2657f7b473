"""Token rows on their way to the experts. R rows, D model, K experts a row."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Experts: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The experts of this rank: (x [R, D], ids [R, K], weights [R, K]) -> their part of the sums [R, D]. Ids count the
experts held here; -1 is another rank's or none."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows with what the router says about them; ids count all experts of the layer, -1 is none.

    Shapes: x [R, D], ids and weights [R, K].
    """

    x: Tensor
    ids: Tensor
    weights: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def slice(self, rows: range) -> "ExpertRows":
        """Some consecutive rows."""
        part = slice(rows.start, rows.stop)
        return ExpertRows(self.x[part], self.ids[part], self.weights[part])

    def stand_in(self) -> "ExpertRows":
        """One row of zeros that goes to no expert."""
        return ExpertRows(
            self.x.new_zeros(1, self.x.shape[1]),
            self.ids.new_full((1, self.ids.shape[1]), -1),
            self.weights.new_zeros(1, self.weights.shape[1]),
        )

    def take(self, rows: Tensor) -> "ExpertRows":
        """Rows by index."""
        return ExpertRows(self.x[rows], self.ids[rows], self.weights[rows])

    def pack(self) -> Tensor:
        """Each row as one string of words, so that one collective carries all of it.

        Shapes: -> [R, words of a row], of the widest integer that parts of a row are made of: copies by the byte are
            several times slower.
        """
        word = self._word()
        return torch.cat([_as_words(part, word) for part in (self.x, self.weights, self.ids)], 1)

    def unpack(self, packed: Tensor) -> "ExpertRows":
        """Rows that some rank has packed, of the same widths and dtypes as these."""
        parts = (self.x, self.weights, self.ids)
        columns = torch.split(packed, [_row_bytes(part) // packed.element_size() for part in parts], 1)
        # Copies, because words can be seen as other numbers only where such a number may begin.
        x, weights, ids = (
            packed.new_empty(column.shape).copy_(column).view(part.dtype)
            for column, part in zip(columns, parts, strict=True)
        )
        return ExpertRows(x, ids, weights)

    def _word(self) -> torch.dtype:
        widths = [_row_bytes(part) for part in (self.x, self.weights, self.ids)]
        return next(word for word in _WORDS if all(width % word.itemsize == 0 for width in widths))

    def apply(self, experts: Experts, held: range) -> Tensor:
        """The part of the experts held on this rank.

        Shapes: -> [R, D], contiguous.
        """
        return experts(self.x, counted_from(self.ids, held), self.weights).contiguous()


def counted_from(ids: Tensor, held: range) -> Tensor:
    """Ids of all experts as ids of those held: -1 is none of them."""
    return torch.where((ids >= held.start) & (ids < held.stop), ids - held.start, -1)


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _row_bytes(part: Tensor) -> int:
    return part.shape[1] * part.element_size()


def _as_words(part: Tensor, word: torch.dtype) -> Tensor:
    flat = part.reshape(-1)
    if flat.storage_offset() * flat.element_size() % word.itemsize or not flat.is_contiguous():
        flat = flat.clone()
    return flat.view(word).view(len(part), _row_bytes(part) // word.itemsize)
