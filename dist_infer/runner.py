"""Runs the model on a group's batch: host arrays in, logits out. T tokens, S sequences, L rows with logits, P pages.

The last sampled token of each sequence stays on the device, in the sequence's state row. So at depth 1 a batch may
say -1 for a token that the step in flight samples: `prepare` of the next step puts it in, in stream order, and no
host waits for it.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kv_cache import KVCache
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.models.decoder import LayerCache
from dist_infer.types import Batch, Int64Array

_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


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

    def __init__(self, model: Model, kv_cache: KVCache, *, max_num_seqs: int, device: torch.device) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._device = device
        self._max_num_seqs = max_num_seqs
        # One row more than sequences: what belongs to none is written there and never read.
        self._last_token_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def prepare(self, batch: Batch) -> StepInputs:
        """Copies a batch to the device and fills in the tokens that the host doesn't know.

        Ranks: local.
        Stream: the current one; the host waits for nothing.
        Errors: ValueError for a state row out of range, and for an unknown token of a sequence without one.
        """
        unknown = np.flatnonzero(batch.token_ids < 0)
        on_device = self._to_device(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            logit_rows=batch.logit_rows,
            logit_state_rows=self._kept_rows(batch)[batch.logit_seqs],
            unknown=unknown,
            unknown_state_rows=self._state_rows_of_tokens(batch, unknown),
            query_start=batch.query_start,
            kv_lens=batch.kv_lens,
            page_table=batch.page_table,
        )
        if len(unknown):
            known = self._last_token_ids.index_select(0, on_device["unknown_state_rows"])
            on_device["token_ids"].index_copy_(0, on_device["unknown"], known)
        paged = PagedStep(
            query_start=on_device["query_start"],
            kv_lens=on_device["kv_lens"],
            page_table=on_device["page_table"],
            block_size=self.kv_cache.block_size,
            host_query_start=batch.query_start,
            host_kv_lens=batch.kv_lens,
        )
        return StepInputs(
            paged=paged,
            token_ids=on_device["token_ids"],
            positions=on_device["positions"],
            slots=on_device["slots"],
            logit_rows=on_device["logit_rows"],
            logit_state_rows=on_device["logit_state_rows"],
        )

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
        self._last_token_ids.index_copy_(0, inputs.logit_state_rows, token_ids)

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

    def _to_device(self, **arrays: npt.NDArray[np.int32] | Int64Array) -> dict[str, Tensor]:
        """The arrays on the device by one copy, each in its own dtype and shape."""
        num_words = [-(-array.nbytes // 8) for array in arrays.values()]
        # A fresh pinned buffer each step: torch hands it out again only when the copy out of it is done.
        staging = torch.empty(sum(num_words), dtype=torch.int64, pin_memory=self._device.type == "cuda")
        for part, array in zip(staging.split_with_sizes(num_words), arrays.values(), strict=True):
            part.numpy().view(array.dtype)[: array.size] = array.reshape(-1)
        parts = staging.to(self._device, non_blocking=True).split_with_sizes(num_words)
        return {
            name: part.view(_TORCH_DTYPES[array.dtype])[: array.size].view(array.shape)
            for part, (name, array) in zip(parts, arrays.items(), strict=True)
        }
