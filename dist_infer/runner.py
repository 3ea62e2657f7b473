"""Runs the model on a group's batch: host arrays in, logits out. T tokens, S sequences, L rows with logits, P pages.

The last sampled token of each sequence stays on the device, in the sequence's state row. So at depth 1 a batch may
say -1 for a token that the step in flight samples: `prepare` of the next step puts it in, in stream order, and no
host waits for it.

So do the pages of each sequence: a batch of the scheduler brings what has changed of them, and each of its batches has
to be prepared, in order.

A runner with `decode_inputs` takes decode steps through them (`fill`, then `decode_inputs.step_inputs`), where a graph
finds them; all other steps, and all steps of a runner without, come in tensors of their own (`prepare`).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dist_infer.decode_inputs import DecodeInputs
from dist_infer.kernels.carriers import PagedStep
from dist_infer.kv_cache import KVCache
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.models.decoder import LayerCache
from dist_infer.page_tables import PageTables
from dist_infer.row_options import HostOptions
from dist_infer.types import Batch, Int64Array, PageChanges
from dist_infer.upload import HostArray, upload


class Model(Protocol):
    """What the runner asks of a model."""

    def __call__(self, inputs: StepInputs, kv: Sequence[LayerCache]) -> Tensor:
        """Hidden states [T, D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[L, D] -> [L, V of this rank]."""
        ...


class Runner:
    """One rank's model and cache, and the state rows of up to `max_num_seqs` sequences."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        device: torch.device,
        max_pages: int | None = None,
        decode_inputs: DecodeInputs | None = None,
    ) -> None:
        """`max_pages` of a sequence, None: as many as the cache has."""
        self.model = model
        self.kv_cache = kv_cache
        self.decode_inputs = decode_inputs
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._page_tables = (
            PageTables(max_num_seqs=max_num_seqs, max_pages=max_pages or kv_cache.num_blocks, device=device)
            if decode_inputs is None
            else decode_inputs.page_tables
        )
        # One row more than sequences: what belongs to none is written there and never read.
        self.last_token_ids = (
            torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
            if decode_inputs is None
            else decode_inputs.last_token_ids
        )

    def takes(self, batch: Batch) -> bool:
        """The batch goes by `fill`."""
        return self.decode_inputs is not None and self.decode_inputs.takes(batch)

    def fill(self, batch: Batch, options: HostOptions) -> DecodeInputs:
        """Start the copy of a decode step to where a graph finds it.

        Ranks: local.
        Stream: the current one; the host waits for nothing.
        Errors: as `prepare`.
        """
        if self.decode_inputs is None:
            raise ValueError("this runner has no decode inputs")
        self._state_rows_of_tokens(batch, np.flatnonzero(batch.token_ids < 0))
        self.decode_inputs.fill(batch, self._kept_rows(batch), options)
        return self.decode_inputs

    def prepare(self, batch: Batch) -> StepInputs:
        """Copies a batch to the device and fills in the tokens that the host doesn't know.

        Ranks: local.
        Stream: the current one; the host waits for nothing.
        Errors: ValueError for a state row out of range, and for an unknown token of a sequence without one.
        """
        return self.prepare_with(batch, {})[0]

    @torch.inference_mode()
    def prepare_with(self, batch: Batch, more: Mapping[str, HostArray]) -> tuple[StepInputs, dict[str, Tensor]]:
        """The same, and `more` arrays on the device by the same copy."""
        unknown = np.flatnonzero(batch.token_ids < 0)
        state_rows = self._kept_rows(batch)
        sent = upload(
            {
                "token_ids": batch.token_ids,
                "positions": batch.positions,
                "slots": batch.slots,
                "logit_rows": batch.logit_rows,
                "logit_state_rows": state_rows[batch.logit_seqs],
                "unknown": unknown,
                "unknown_state_rows": self._state_rows_of_tokens(batch, unknown),
                "query_start": batch.query_start,
                "kv_lens": batch.kv_lens,
                **self._sent_pages(batch, state_rows),
                **{f"more {name}": array for name, array in more.items()},
            },
            self._device,
        )
        if len(unknown):
            known = self.last_token_ids.index_select(0, sent["unknown_state_rows"])
            sent["token_ids"].index_copy_(0, sent["unknown"], known)
        paged = PagedStep(
            query_start=sent["query_start"],
            kv_lens=sent["kv_lens"],
            page_table=self._page_table(batch, sent),
            block_size=self.kv_cache.block_size,
            host_query_start=batch.query_start,
            host_kv_lens=batch.kv_lens,
        )
        inputs = StepInputs(
            paged=paged,
            token_ids=sent["token_ids"],
            positions=sent["positions"],
            slots=sent["slots"],
            logit_rows=sent["logit_rows"],
            logit_state_rows=sent["logit_state_rows"],
        )
        return inputs, {name: sent[f"more {name}"] for name in more}

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states of all tokens; the cache holds the step's keys and values afterwards.

        Shapes: -> [T, D].
        Ranks: collective over tp.
        """
        return self.model(inputs, self.kv_cache.layers)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """This rank's logits of some token rows.

        Shapes: hidden [T, D], rows [R] int64 -> [R, V of this rank], R may be 0.
        Ranks: local.
        """
        return self.model.logits(hidden.index_select(0, rows))

    def run(self, inputs: StepInputs) -> Tensor:
        """This rank's logits of the rows that get a next token: `forward`, then `logits`.

        Shapes: -> [L, V of this rank], L may be 0.
        Ranks: collective over tp.
        """
        return self.logits(self.forward(inputs), inputs.logit_rows)

    @torch.inference_mode()
    def remember(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """Keeps the token sampled for each logit row, for a next batch that doesn't know it.

        Shapes: token_ids [L] int64 on the device.
        Ranks: local.
        """
        self.last_token_ids.index_copy_(0, inputs.logit_state_rows, token_ids)

    def _sent_pages(self, batch: Batch, state_rows: Int64Array) -> dict[str, HostArray]:
        if not isinstance(batch.pages, PageChanges):
            return {"page_table": batch.pages}
        self._page_tables.check(batch)
        if self._device.type == "cpu":
            return {"page_table": self._page_tables.on_host(batch.pages, state_rows)}
        cells = self._page_tables.cells_of(batch.pages)
        return {"cells": cells, "page_ids": batch.pages.page_ids, "state_rows": state_rows}

    def _page_table(self, batch: Batch, sent: Mapping[str, Tensor]) -> Tensor:
        if "page_table" in sent:
            return sent["page_table"]
        self._page_tables.apply(sent["cells"], sent["page_ids"])
        return self._page_tables.of_rows(sent["state_rows"], batch.num_pages)

    def _kept_rows(self, batch: Batch) -> Int64Array:
        """The state row of each sequence; the spare one for a sequence that has none."""
        rows = batch.state_rows.astype(np.int64)
        if len(rows) and int(rows.max()) >= self._max_num_seqs:
            raise ValueError(f"state row {int(rows.max())} is not below max_num_seqs {self._max_num_seqs}")
        return np.where(rows < 0, self._max_num_seqs, rows)

    def _state_rows_of_tokens(self, batch: Batch, token_rows: Int64Array) -> Int64Array:
        """The state row of the sequence that each of these token rows belongs to."""
        seqs = np.searchsorted(batch.query_start, token_rows, side="right") - 1
        rows = batch.state_rows[seqs].astype(np.int64)
        if (rows < 0).any():
            lost = batch.request_ids[seqs[rows < 0]].tolist()
            raise ValueError(f"requests {lost} have a token that is not known yet and no state row that keeps it")
        return rows
