"""The pages of sequences on the device, renewed by what has changed: the host sends a page once, not every step.

R state rows, C changes of a step, S sequences of a step, P pages of the longest one.
"""

import numpy as np
import torch
from torch import Tensor

from dist_infer.types import Batch, Int32Array, Int64Array, PageChanges


class PageTables:
    """The pages of each state row. One row more belongs to nobody: its pages are page 0.

    Pages behind those of a sequence are left over from others, always pages of the pool; nobody reads them.

    Stream: the current one, the same for all calls.
    """

    def __init__(self, *, max_num_seqs: int, max_pages: int, device: torch.device) -> None:
        self._max_pages = max_pages
        self._by_row = torch.zeros(max_num_seqs + 1, max_pages, dtype=torch.int32, device=device)
        self._on_host: Int32Array = self._by_row.numpy() if device.type == "cpu" else np.empty((0, 0), np.int32)
        self.num_applied = 0  # changes so far, so that others can tell whether there were any

    def check(self, batch: Batch) -> None:
        """Errors: ValueError when a sequence of the batch has more pages than there is room for."""
        if batch.num_pages > self._max_pages:
            raise ValueError(f"a sequence has {batch.num_pages} pages, but only {self._max_pages} are planned for")

    def cells_of(self, changes: PageChanges) -> Int64Array:
        """Where changes go, in one number each. Shapes: -> [C]."""
        cells: Int64Array = np.asarray(changes.rows, np.int64) * self._max_pages + changes.columns
        return cells

    @torch.inference_mode()
    def apply(self, cells: Tensor, page_ids: Tensor) -> None:
        """Shapes: cells [C] int64, no two equal, page_ids [C] int32."""
        if len(cells):
            self._by_row.view(-1).index_copy_(0, cells, page_ids)
            self.num_applied += len(cells)

    def on_host(self, changes: PageChanges, rows: Int64Array) -> Int32Array:
        """Both at once on a CPU, where a call of torch costs more than the work. Shapes: -> [S, P]."""
        table = self._on_host
        table[changes.rows, changes.columns] = changes.page_ids
        self.num_applied += len(changes.rows)
        return table[rows, : changes.num_pages]

    @torch.inference_mode()
    def of_rows(self, rows: Tensor, num_pages: int) -> Tensor:
        """The first pages of some state rows. Shapes: rows [S] int64 -> [S, P]."""
        return self._by_row[:, :num_pages].index_select(0, rows)

    @torch.inference_mode()
    def gather(self, rows: Tensor, into: Tensor) -> None:
        """All pages of some state rows. Shapes: rows [S] int64, into [S, max_pages] int32."""
        torch.index_select(self._by_row, 0, rows, out=into)
