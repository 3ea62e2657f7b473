"""Inputs of decode steps in device memory that stays in place, so that a graph can be replayed on them.

M sequences at most, S of a step, B rows of a graph (S <= B <= M), P pages of a sequence at most.

A decode step has one token, and one logit row, for each of its sequences. All that it needs lies in one piece of memory
with room for M rows, and one copy from the host renews it. The rows behind the step's own are inert (no length, no
slot, the spare state row), so whichever B the ranks agree on after the copy has been started, its rows are there, and
padding costs no further copy. An inert row writes nowhere and reads nothing, so no block of the pool is set aside.

Pages travel as changes of the sequences' own tables (page_tables), whose rows are brought into the order of the step on
the device, unless they are there already. A batch that has all of its pages brings them along. What a row has behind
its length is left over from earlier steps: always a page of the pool, and nobody reads it.

The tokens that sequences got last stand right before the ids that the host knows, so one gather gives every row its
token, known to the host or not.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.page_tables import PageTables
from dist_infer.row_options import HostOptions, RowOptions
from dist_infer.types import Batch, BatchKind, Float64Array, Int32Array, Int64Array, PageChanges
from dist_infer.upload import HostArray, upload

# What a row that belongs to no sequence holds; the spare state row and the own cell of the token table are set besides.
_INERT: Mapping[str, float] = MappingProxyType(
    {
        "token_ids": 0,
        "token_sources": 0,
        "positions": 0,
        "slots": -1,
        "state_rows": 0,
        "keys": 0,
        "top_k": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
)


class DecodeInputs:
    """Device memory for the inputs of up to `max_num_seqs` sequences that compute one token each.

    Stream: whatever reads these inputs runs on the stream on which `fill` is called.
    """

    def __init__(self, *, max_num_seqs: int, max_pages: int, block_size: int, device: torch.device) -> None:
        M = max_num_seqs
        self.max_num_seqs = M
        self._max_pages, self._block_size, self._device = max_pages, block_size, device
        num_columns = len(_INERT) * M
        self._header = np.zeros(num_columns + -(-M // 2) + 1, np.int64)
        self._columns: dict[str, Int64Array | Float64Array] = {
            name: part.view(np.float64 if isinstance(inert, float) else np.int64)
            for (name, inert), part in zip(_INERT.items(), self._header[:num_columns].reshape(-1, M), strict=True)
        }
        self._kv_lens: Int32Array = self._header[num_columns:-1].view(np.int32)[:M]
        self._num_real: Int32Array = self._header[-1:].view(np.int32)[:1]
        self._num_filled = M
        # Memory: the last token of each state row (one more than sequences: what belongs to none is written there and
        # never read), the header in the order above, cells and ids of pages that are new, or all pages.
        num_words = M + 1 + len(self._header) + -(-M * max_pages // 2) + 2 * M
        memory = torch.zeros(num_words, dtype=torch.int64, device=device)
        self.last_token_ids = memory[: M + 1]
        self._token_table = memory[: 2 * M + 1]
        self._sent = memory[M + 1 :]
        header = self._sent[: len(self._header)]
        self._on_device: dict[str, Tensor] = {
            name: part.view(torch.float64) if isinstance(inert, float) else part
            for (name, inert), part in zip(_INERT.items(), header[:num_columns].view(-1, M), strict=True)
        }
        self._on_device["kv_lens"] = header[num_columns:-1].view(torch.int32)[:M]
        self._on_device["num_real"] = header[-1:].view(torch.int32)[:1]
        self._query_start = torch.arange(M + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(M, device=device)
        self._page_table = torch.zeros(M, max_pages, dtype=torch.int32, device=device)
        self.page_tables = PageTables(max_num_seqs=M, max_pages=max_pages, device=device)
        self._gathered: tuple[int, bytes] | None = None  # changes and state rows that the page table is made of
        self._make_inert(0)
        upload({"header": self._header}, device, into=self._sent)

    def takes(self, batch: Batch) -> bool:
        """The batch is a decode step, or the dummy of a group without tokens."""
        is_decode = batch.kind in (BatchKind.DECODE, BatchKind.NONE)
        return is_decode and batch.num_tokens == batch.num_seqs == len(batch.logit_rows)

    @torch.inference_mode()
    def fill(self, batch: Batch, state_rows: Int64Array, options: HostOptions) -> None:
        """Start the copy of a batch that it `takes`. `state_rows` keep the tokens of its sequences.

        Ranks: local.
        Stream: the current one; the host waits for nothing.
        Errors: ValueError when it has more pages than there is room for.
        """
        S, changes = batch.num_seqs, batch.pages
        self.page_tables.check(batch)
        columns = self._columns
        own_cells = np.arange(self.max_num_seqs + 1, self.max_num_seqs + 1 + S)
        columns["token_ids"][:S] = batch.token_ids
        columns["token_sources"][:S] = np.where(batch.token_ids < 0, state_rows, own_cells)
        columns["positions"][:S] = batch.positions
        columns["slots"][:S] = batch.slots
        columns["state_rows"][:S] = state_rows
        for name, values in options.columns():
            columns[name][:S] = values
        self._kv_lens[:S] = batch.kv_lens
        self._num_real[0] = S if batch.kind is not BatchKind.NONE else 0  # a dummy's token is nobody's
        self._make_inert(S)
        if isinstance(changes, PageChanges):
            cells = self.page_tables.cells_of(changes)
            arrays: dict[str, HostArray] = {"header": self._header, "cells": cells, "page_ids": changes.page_ids}
            sent = upload(arrays, self._device, into=self._sent)
            self.page_tables.apply(sent["cells"], sent["page_ids"])
            self._gather(state_rows)
        else:
            sent = upload({"header": self._header, "page_table": changes}, self._device, into=self._sent)
            self._page_table[:S, : batch.num_pages] = sent["page_table"]
            self._gathered = None

    def _gather(self, state_rows: Int64Array) -> None:
        wanted = self.page_tables.num_applied, state_rows.tobytes()
        if wanted != self._gathered:
            S = len(state_rows)
            self.page_tables.gather(self._on_device["state_rows"][:S], self._page_table[:S])
            self._gathered = wanted

    def step_inputs(self, num_rows: int, host_kv_lens: Int32Array | None = None) -> StepInputs:
        """The first rows as the model's inputs, which read whatever has been filled in by then.

        Without `host_kv_lens` the host's lengths are the largest that the page table allows: a graph holds for all.
        """
        B = num_rows
        if host_kv_lens is None:
            host_kv_lens = np.full(B, self._max_pages * self._block_size, np.int32)
        own = self._on_device
        return StepInputs(
            token_ids=self._token_table.index_select(0, own["token_sources"][:B]),
            positions=own["positions"][:B],
            slots=own["slots"][:B],
            paged=PagedStep(
                query_start=self._query_start[: B + 1],
                kv_lens=own["kv_lens"][:B],
                page_table=self._page_table[:B],
                block_size=self._block_size,
                host_query_start=np.arange(B + 1, dtype=np.int32),
                host_kv_lens=host_kv_lens,
            ),
            logit_rows=self._logit_rows[:B],
            logit_state_rows=own["state_rows"][:B],
            num_real=own["num_real"],
        )

    def state_rows(self, num_rows: int) -> Tensor:
        """Where the tokens of the first rows are kept. Shapes: -> [B] int64."""
        return self._on_device["state_rows"][:num_rows]

    def row_options(self, num_rows: int) -> RowOptions:
        """How the tokens of the first rows are chosen."""
        own = self._on_device
        return RowOptions(**{name: own[name][:num_rows] for name in RowOptions.__dataclass_fields__})

    def _make_inert(self, first: int) -> None:
        """The host's rows from `first` on; those behind the last one filled are so already."""
        rows = slice(first, max(first, self._num_filled))
        for name, inert in _INERT.items():
            self._columns[name][rows] = inert
        self._columns["state_rows"][rows] = self.max_num_seqs
        self._columns["token_sources"][rows] = np.arange(rows.start, rows.stop) + self.max_num_seqs + 1
        self._kv_lens[rows] = 0
        self._num_filled = first
