"""From the logits of a vocabulary shard to the token ids of a step, equal on all ranks of the group.

L rows, V ids of this rank's shard, N ranks, K candidates.

A row goes one of four ways, by its own parameters alone:
    greedy    temperature 0 or top_k 1    each shard's best (value, id)
    noisy     neither top_k nor top_p     each shard's best (value + temperature * noise, id): see kernels/sample
    top-k     top_k, perhaps others       each shard's k largest (value, id), then min-p, top-p, noise over the k of all
    nucleus   top_p or min_p, no top_k    all logits of the row: only such batches gather them
Greedy, noisy and top-k share one exchange. What is exchanged depends on the batch only, which all ranks of a group
hold.

The order of the options is that of vLLM: bans of min_tokens, logit_bias, penalties (see logit_edits), temperature,
min-p (ids at least min_p times as likely as the likeliest), top-k, then top-p over what is left. The noise is keyed by
seed, position and token id, and sums are taken in an order that doesn't depend on the other rows, so a request gets the
same tokens for any number of ranks, alone or in company.

Rows in company go through `sample`, each on its way. A whole batch can also go through `choose`: one way for all, with
options that are read on the device, so it can be captured in a graph. A greedy row is a noisy one of temperature 0, bit
for bit. Filtered rows (top-k, top-p, min-p) can go there too if one rank has the whole vocabulary (see
kernels/sample_filtered).

Source: vLLM, vllm/v1/sample/sampler.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.kernels import sample as sample_op
from dist_infer.kernels import sample_filtered as filter_op
from dist_infer.kernels import top_k as top_k_op
from dist_infer.kernels.choices import select
from dist_infer.kernels.dispatch import Library, Target
from dist_infer.logit_edits import edit_logits
from dist_infer.row_options import HostOptions, RowOptions
from dist_infer.token_scores import score_tokens
from dist_infer.types import Batch, Float64Array, Int64Array
from dist_infer.upload import HostArray, upload


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What the host knows of a batch's ways; its columns go to the device with the other inputs of the step."""

    columns: Mapping[str, HostArray]
    sizes: tuple[int, ...]  # rows of each way
    num_candidates: int  # of the row on the way of top-k that needs most


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a step on the device. Shapes: [rows] each."""

    rows: Tensor  # which ones
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    keys: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, logits: Tensor) -> Tensor:
        """Their logits, without a copy where these are all rows: rows of one way keep their order."""
        return logits if len(self) == len(logits) else logits[self.rows]


_GREEDY, _NOISY, _LARGEST, _NUCLEUS = range(4)


@dataclass(frozen=True, slots=True)
class _Ways:
    """The rows of a step by the way that they go, in the order above."""

    greedy: _Rows
    noisy: _Rows
    largest: _Rows
    nucleus: _Rows
    num_candidates: int  # of the row in `largest` that needs most


class Sampler:
    """Chooses the next tokens of a group.

    `vocab_range` are the ids of this rank's logits; ids from `vocab_size` on are padding and never chosen.
    """

    def __init__(
        self,
        tp: Collectives,
        vocab_range: range,
        vocab_size: int,
        *,
        sample_library: Library[sample_op.SampleFunction] = sample_op.LIBRARIES[-1],
        filter_library: Library[filter_op.SampleFilteredFunction] | None = None,
        top_k_library: Library[top_k_op.TopKFunction] = top_k_op.LIBRARIES[-1],
    ) -> None:
        if vocab_size < 1 or vocab_range.step != 1:
            raise ValueError(f"sampler: a shard {vocab_range} of a vocabulary of {vocab_size}")
        self._tp = tp
        self._vocab_range = vocab_range
        self.vocab_size = vocab_size
        self._num_real = max(0, min(vocab_range.stop, vocab_size) - vocab_range.start)
        self._held = range(vocab_range.start, vocab_range.start + self._num_real)
        self._ids: Tensor | None = None  # of the columns
        self._shard_sizes: list[int] | None = None  # asked for by the first batch that gathers logits
        self._sample_library = sample_library
        self._filter_library = filter_library
        self._top_k_library = top_k_library

    @classmethod
    def choosing(
        cls,
        tp: Collectives,
        vocab_range: range,
        vocab_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernel_orders: Mapping[str, str] | None = None,
        on_choice: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """One with the best libraries for logits of `dtype` on `device`; `on_choice` gets a line for each."""
        target = Target(device=device, dtype=dtype, geometry={"columns": len(vocab_range)})
        orders = kernel_orders or {}
        sample = select("sample", sample_op.LIBRARIES, target, orders)
        filtered = select("sample_filtered", filter_op.LIBRARIES, target, orders)
        top_k = select("top_k", top_k_op.LIBRARIES, target, orders)
        for line in (sample.explain(), filtered.explain(), top_k.explain()):
            on_choice(line)
        return cls(
            tp,
            vocab_range,
            vocab_size,
            sample_library=sample.pick(),
            filter_library=filtered.pick(),
            top_k_library=top_k.pick(),
        )

    @property
    def graph_blocker(self) -> str | None:
        """Why `choose` can't be captured in a graph; None where it can."""
        if not self._sample_library.graph_safe:
            return f"sample by {self._sample_library.name} can't be captured"
        return None if self._tp.capturable else "the collectives of the sampler can't be captured"

    def options(self, batch: Batch) -> HostOptions:
        """How the tokens of a batch are chosen, as `choose` reads it."""
        ways, min_p = self._ways_of(batch)
        temperature = np.where(ways == _GREEDY, 0.0, batch.temperature)
        return HostOptions(
            temperature=temperature,
            keys=_noise_keys(batch, ways),
            top_k=batch.top_k.astype(np.int64),
            top_p=batch.top_p,
            min_p=min_p,
            is_filtered=bool((ways >= _LARGEST).any()),
        )

    def plan(self, batch: Batch) -> SamplePlan:
        """The ways of a batch's rows. Ranks: local, equal on all ranks of the group."""
        ways, min_p = self._ways_of(batch)
        columns: dict[str, HostArray] = {
            "rows": np.arange(len(ways)),
            "temperature": batch.temperature,
            "top_p": batch.top_p,
            "top_k": batch.top_k.astype(np.int64),
            "min_p": min_p,
            "keys": _noise_keys(batch, ways),
        }
        sizes = np.bincount(ways, minlength=4).tolist()
        if len(ways) not in sizes:
            order = np.argsort(ways, kind="stable")
            columns = {name: column[order] for name, column in columns.items()}
        num_candidates = int(batch.top_k[ways == _LARGEST].max()) if sizes[_LARGEST] else 0
        return SamplePlan(columns, tuple(sizes), num_candidates)

    @torch.inference_mode()
    def sample(self, logits: Tensor, batch: Batch, input_ids: Tensor | None = None) -> Tensor:
        """The next token of each logit row of the batch.

        `input_ids` are the tokens that these rows have as input; only a batch with edits needs them.

        Shapes: logits [L, V], input_ids [L] int64 -> [L] int64.
        Ranks: collective over tp; nothing is exchanged when L is 0.
        Errors: ValueError for logits of another shape.
        """
        plan = self.plan(batch)
        logits = self.edited(logits, batch, input_ids)
        return self.sample_planned(logits, plan, upload(plan.columns, logits.device))

    @torch.inference_mode()
    def edited(self, logits: Tensor, batch: Batch, input_ids: Tensor | None = None) -> Tensor:
        """The logits with the edits of the batch; the same tensor where it has none.

        Shapes: as `sample`.
        Ranks: local.
        Errors: ValueError for logits of another shape, and for edits without `input_ids`.
        """
        if logits.shape != (len(batch.logit_rows), len(self._vocab_range)):
            raise ValueError(
                f"sampler: {len(batch.logit_rows)} rows of {len(self._vocab_range)} logits are due,"
                f" not {list(logits.shape)}"
            )
        if batch.edits is None:
            return logits
        if input_ids is None:
            raise ValueError("sampler: a batch with edits needs the input tokens of its rows")
        return edit_logits(logits, self._held, batch.edits, input_ids)

    @torch.inference_mode()
    def sample_planned(self, logits: Tensor, plan: SamplePlan, columns: Mapping[str, Tensor]) -> Tensor:
        """The same from a plan whose columns are on the device, and from edited logits."""
        token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        ways = _split_ways(plan, columns)
        if len(ways.nucleus) < len(logits):
            self._sample_by_candidates(logits, ways, token_ids)
        if len(ways.nucleus):
            everything = self._gather_logits(ways.nucleus.of(logits))
            values, ids = top_k_op.top_k(everything, self.vocab_size, library=self._top_k_library)
            token_ids.index_copy_(0, ways.nucleus.rows, self._sample_sorted(values, ids, ways.nucleus))
        return token_ids

    @property
    def can_filter(self) -> bool:
        """`choose` also takes filtered rows."""
        return self._filter_library is not None and self._filter_library.graph_safe and self._tp.size == 1

    @torch.inference_mode()
    def choose(self, logits: Tensor, options: RowOptions, *, filtered: bool = False) -> Tensor:
        """The next tokens of rows that are greedy or noisy; of any rows if `filtered`, where the sampler can.

        Nothing here depends on the values of the options: one captured call serves all.

        Shapes: logits [L, V] -> [L] int64.
        Ranks: collective over tp.
        Errors: ValueError for filtered rows where `can_filter` is false.
        """
        if filtered:
            if self._filter_library is None or self._tp.size > 1:
                raise ValueError("sampler: filtered rows need a library for them and one rank")
            own = logits[:, : self._num_real]
            return filter_op.sample_filtered(
                own,
                options.temperature,
                options.top_k,
                options.top_p,
                options.min_p,
                options.keys,
                library=self._filter_library,
            )
        own, ids = self._own_columns(logits)
        bests = sample_op.sample(own, ids, options.temperature, options.keys, library=self._sample_library)
        if self._tp.size == 1:
            return bests[1]
        # Float64 holds every score and every id exactly.
        table = self._tp.all_gather(torch.stack([best.double() for best in bests])[None])
        scores, best_ids = table.unbind(1)
        _, chosen = sample_op.sample(scores.t(), best_ids.t().long(), library=self._sample_library)
        return chosen

    @torch.inference_mode()
    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
        """Log probabilities of a token a row and of the likeliest ones: see `token_scores.score_tokens`.

        A vocabulary of fewer than `num_top` ids has no more of them.

        Shapes: logits [Q, V], token_ids [Q] -> [Q, 2 + 2 num_top] float64.
        Ranks: collective over tp.
        """
        num_top = min(num_top, self.vocab_size)
        own = logits[:, : self._num_real]
        return score_tokens(own, self._held, token_ids, num_top, tp=self._tp, top_k_library=self._top_k_library)

    def _ways_of(self, batch: Batch) -> tuple[Int64Array, Float64Array]:
        """The way of each row and its min_p. Shapes: [L], [L]."""
        limited = (batch.top_k > 0) & (batch.top_k < self.vocab_size)
        is_greedy = (batch.temperature == 0) | (batch.top_k == 1)
        min_p = np.zeros_like(batch.temperature) if batch.min_p is None else batch.min_p
        nucleus = (batch.top_p < 1) | (min_p > 0)
        ways = np.where(nucleus, _NUCLEUS, _NOISY)
        ways[limited] = _LARGEST
        ways[is_greedy] = _GREEDY
        return ways, min_p

    def _sample_by_candidates(self, logits: Tensor, ways: _Ways, token_ids: Tensor) -> None:
        greedy, noisy, largest, width = ways.greedy, ways.noisy, ways.largest, ways.num_candidates
        own, ids = self._own_columns(logits)
        bests = [
            sample_op.sample(greedy.of(own), ids, library=self._sample_library),
            sample_op.sample(noisy.of(own), ids, noisy.temperature, noisy.keys, library=self._sample_library),
        ]
        best_scores, best_ids = (torch.cat(pair) for pair in zip(*bests, strict=True))
        values, value_ids = self._own_candidates(largest.of(own), ids, width)
        # One exchange in float64, which holds every value and every id exactly.
        parts = (best_scores, best_ids, values.flatten(), value_ids.flatten())
        table = self._tp.all_gather(torch.cat([part.double() for part in parts])).view(self._tp.size, -1)
        all_scores, all_best_ids, all_values, all_ids = table.split_with_sizes([len(part) for part in parts], 1)
        _, chosen = sample_op.sample(all_scores.t(), all_best_ids.t().long(), library=self._sample_library)
        token_ids.index_copy_(0, torch.cat([greedy.rows, noisy.rows]), chosen)
        if len(largest):
            values, places = top_k_op.top_k(_side_by_side(all_values, width), width, library=self._top_k_library)
            ids = _side_by_side(all_ids, width).gather(1, places).long()
            token_ids.index_copy_(0, largest.rows, self._sample_sorted(values, ids, largest))

    def _own_columns(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and ids of this shard's part of the vocabulary; one column that never wins where it has none.

        Shapes: [L, V], [V].
        """
        if self._num_real == 0:
            return logits.new_full((len(logits), 1), -torch.inf), torch.tensor([self.vocab_size], device=logits.device)
        if self._ids is None or self._ids.device != logits.device:
            self._ids = torch.arange(self._held.start, self._held.stop, device=logits.device)
        return logits[:, : self._num_real], self._ids

    def _own_candidates(self, own: Tensor, ids: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
        """The largest logits of the shard, filled up with ones that never win. Shapes: [rows, K], [rows, K]."""
        if len(own) == 0:
            return own.new_empty(0, 0), ids.new_empty(0, 0)
        values, columns = top_k_op.top_k(own, min(num_candidates, own.shape[1]), library=self._top_k_library)
        missing = (0, num_candidates - values.shape[1])
        return (
            torch.nn.functional.pad(values, missing, value=-torch.inf),
            torch.nn.functional.pad(ids[columns], missing, value=self.vocab_size),
        )

    def _gather_logits(self, logits: Tensor) -> Tensor:
        """All logits of some rows. Shapes: [rows, V] -> [rows, vocabulary]."""
        if self._shard_sizes is None:
            own_size = torch.tensor([self._num_real], device=logits.device)
            self._shard_sizes = self._tp.all_gather(own_size).tolist()
        by_id = logits[:, : self._num_real].t().contiguous()
        return self._tp.all_gather(by_id, self._shard_sizes).t()

    def _sample_sorted(self, values: Tensor, ids: Tensor, rows: _Rows) -> Tensor:
        """Top-k, top-p and noise over candidates, largest first. Shapes: [rows, K], [rows, K] -> [rows]."""
        values = values.double()
        kept = nucleus_mask(values, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        values = values.masked_fill(~kept, -torch.inf)
        _, chosen = sample_op.sample(values, ids, rows.temperature, rows.keys, library=self._sample_library)
        return chosen


def _noise_keys(batch: Batch, ways: Int64Array) -> Int64Array:
    """Greedy rows need none."""
    return sample_op.host_row_keys(batch.seeds, batch.draw_positions) if ways.any() else np.zeros_like(batch.seeds)


def _split_ways(plan: SamplePlan, columns: Mapping[str, Tensor]) -> _Ways:
    parts = {name: column.split_with_sizes(plan.sizes) for name, column in columns.items()}
    greedy, noisy, largest, nucleus = (_Rows(**{name: part[way] for name, part in parts.items()}) for way in range(4))
    return _Ways(greedy, noisy, largest, nucleus, num_candidates=plan.num_candidates)


def nucleus_mask(values: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which of the sorted values are in: the smallest prefix with a probability of top_p.

    The whole are those of the first top_k (0: all) that are at least min_p times as likely as the first one, which is
    always in.

    Shapes: values [L, K] float64, largest first; the others [L] -> [L, K] bool.
    """
    num_columns = values.shape[1]
    counts = torch.where(top_k > 0, top_k.clamp(max=num_columns), num_columns)[:, None]
    columns = torch.arange(num_columns, device=values.device)
    first = values[:, :1]
    # The largest ones are 0 by definition: -inf or +inf minus itself would be NaN.
    scaled = torch.where(values == first, 0.0, (values - first) / temperature[:, None])
    weights = scaled.exp()
    candidates = (columns < counts) & (weights >= min_p[:, None])
    weights = torch.where(candidates, weights, 0.0)
    sums = prefix_sums(weights)
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    total = sums.gather(1, counts - 1)
    inside = (before < top_p[:, None] * total) | (top_p[:, None] >= 1) | (columns == 0)
    return inside & candidates


def prefix_sums(x: Tensor) -> Tensor:
    """Sums of each row up to each column, added in an order that depends on the column alone.

    It doesn't depend on the device or on how many columns follow, which torch.cumsum doesn't promise.

    Shapes: [L, K] -> [L, K].
    """
    shift = 1
    while shift < x.shape[1]:
        x = torch.cat([x[:, :shift], x[:, shift:] + x[:, :-shift]], 1)
        shift *= 2
    return x


def _side_by_side(table: Tensor, width: int) -> Tensor:
    """The candidates of all ranks in one row, ranks in order, so that equal values stand in the order of their ids.

    Shapes: [N, rows * width] -> [rows, N * width].
    """
    return table.view(len(table), -1, width).transpose(0, 1).flatten(1)
