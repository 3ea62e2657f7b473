"""The pages of each state row on the host, kept as a runner keeps them on its device."""

import numpy as np

from dist_infer.types import Batch, Int32Array, PageChanges

NO_PAGE = -1


class PageMirror:
    """Batches go through `table_of` once, in the order in which they were scheduled."""

    def __init__(self, max_num_seqs: int, max_pages: int) -> None:
        self._pages = np.full((max_num_seqs, max_pages), NO_PAGE, np.int32)

    def table_of(self, batch: Batch) -> Int32Array:
        """All pages of the batch's sequences, -1 behind them. Shapes: -> [S, P]."""
        changes = batch.pages
        if not isinstance(changes, PageChanges):
            return changes
        cells = list(zip(changes.rows.tolist(), changes.columns.tolist(), strict=True))
        assert len(set(cells)) == len(cells), "the order of changes would count"
        self._pages[[row for row, column in cells if column == 0]] = NO_PAGE  # a sequence starts there
        self._pages[changes.rows, changes.columns] = changes.page_ids
        return self._pages[batch.state_rows, : changes.num_pages].copy()
