"""A step on this rank's device: forward, then sampling, then the token ids on their way to the host.

What the engine drives. All collectives of a step are inside `launch`; `prepare` and the copy back have none. No host
waits for the device here.

A decode step for which all ranks want a graph replays its forward pass, and the choice of tokens behind it. Where a row
asks for edits or scores, tokens are chosen outside of the graph, kernel by kernel; also for top-k, top-p and min-p if
several ranks share the vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_infer.comm.agreement import EAGER, Decision
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import HeadShard
from dist_infer.config import SchedulerConfig
from dist_infer.decode_inputs import DecodeInputs
from dist_infer.graphs import Capture, DecodeGraphs, Program
from dist_infer.kv_cache import KVCache
from dist_infer.layers.step_inputs import StepInputs
from dist_infer.models.decoder import Decoder
from dist_infer.row_options import RowOptions
from dist_infer.runner import Runner
from dist_infer.sampler import SamplePlan, Sampler
from dist_infer.types import Batch, BatchKind, Float64Array, Int64Array, ScoreRows
from dist_infer.upload import upload

_SCORED_ELEMENTS = 2**23  # logits of a prompt that are scored at a time: 64 MiB of float64 over all shards
_FORWARD, _CHOICE, _FILTERED_CHOICE = "forward", "choice", "filtered choice"  # parts of a graph


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A batch on the host and on the device.

    `inputs` is None for a decode step whose inputs are where a graph finds them. The rows go their own ways through the
    sampler (`ways`: the plan and its columns), or all go one way, by `options`.
    """

    batch: Batch
    inputs: StepInputs | None
    ways: tuple[SamplePlan, Mapping[str, Tensor]] | None = None
    options: RowOptions | None = None
    is_filtered: bool = False

    @property
    def is_plain(self) -> bool:
        """A graph can choose the tokens."""
        return self.ways is None and self.batch.edits is None and self.batch.scores is None


class SampledIds:
    """Token ids that a step has sampled, and scores, copied to the host behind the step's kernels.

    Shapes: ids [L], scores [Q + P, 2 + 2 K] float64 (see `types.ScoreRows`).
    """

    def __init__(self, token_ids: Tensor, scores: Tensor | None = None) -> None:
        self._on_host = _start_copy(token_ids)
        self._scores_on_host = None if scores is None else _start_copy(scores)
        self._event: torch.cuda.Event | None = None
        if token_ids.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def ready(self) -> bool:
        """The copy has arrived; never waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def numpy(self) -> Int64Array:
        """Only once `ready`."""
        ids: Int64Array = self._on_host.numpy()
        return ids

    def scores(self) -> Float64Array | None:
        """Only once `ready`; None if the step gives none."""
        return None if self._scores_on_host is None else self._scores_on_host.numpy()


def _start_copy(x: Tensor) -> Tensor:
    if x.device.type != "cuda":
        return x.clone()  # as a copy to the host: the next step may write into the tensor itself
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


class StepRunner:
    """Runner and sampler of one rank. `graphs` must be captured before they are used, and need decode inputs."""

    def __init__(self, runner: Runner, sampler: Sampler, graphs: DecodeGraphs | None = None) -> None:
        self._runner = runner
        self._sampler = sampler
        self._graphs = graphs
        # What a part of a graph leaves for the next one.
        self._hidden: Tensor | None = None
        self._token_ids = torch.zeros_like(runner.last_token_ids)

    @torch.inference_mode()
    def capture(self, capture: Capture, *, on_size: Callable[[int], None] = lambda size: None) -> None:
        """Capture all graphs. Ranks: collective, as `launch`."""
        if self._graphs is not None:
            self._graphs.capture(self._parts, capture, on_size=on_size)

    def graph_bucket(self, batch: Batch) -> int:
        """Rows of the graph that could run this batch; EAGER where none can."""
        inputs = self._runner.decode_inputs
        if self._graphs is None or inputs is None or batch.kind is not BatchKind.DECODE or not inputs.takes(batch):
            return EAGER
        return self._graphs.bucket(batch.num_seqs)

    def prepare(self, batch: Batch) -> PreparedStep:
        """Start the copy of the inputs to the device. Ranks: local."""
        if self._runner.decode_inputs is None:
            return self._prepare_by_ways(batch)
        options = self._sampler.options(batch)
        filtered = options.is_filtered
        by_ways = filtered and (batch.edits is not None or not self._sampler.can_filter)
        if self._runner.takes(batch):
            inputs = self._runner.fill(batch, options)
            ways = self._upload_ways(batch) if by_ways else None
            on_device = inputs.row_options(batch.num_seqs)
            return PreparedStep(batch=batch, inputs=None, ways=ways, options=on_device, is_filtered=filtered)
        if by_ways:
            return self._prepare_by_ways(batch)
        step_inputs, columns = self._runner.prepare_with(batch, dict(options.columns()))
        return PreparedStep(batch=batch, inputs=step_inputs, options=RowOptions(**columns), is_filtered=filtered)

    def _prepare_by_ways(self, batch: Batch) -> PreparedStep:
        plan = self._sampler.plan(batch)
        inputs, columns = self._runner.prepare_with(batch, plan.columns)
        return PreparedStep(batch=batch, inputs=inputs, ways=(plan, columns))

    def _upload_ways(self, batch: Batch) -> tuple[SamplePlan, Mapping[str, Tensor]]:
        plan = self._sampler.plan(batch)
        return plan, upload(plan.columns, self._token_ids.device)

    @torch.inference_mode()
    def launch(self, step: PreparedStep, decision: Decision) -> SampledIds:
        """Forward and sampling. `decision` holds the sizes that all ranks agreed on, which experts need.

        Ranks: collective over tp, and over the world where there are experts.
        """
        if decision.graph_bucket != EAGER and self._graphs is not None:
            return self._launch_graph(self._graphs, step, decision.graph_bucket)
        prefills = decision.kind in (BatchKind.PREFILL, BatchKind.EXTEND)
        inputs = self._inputs_of(step).agreed(decision.rank_tokens, eager_prefill=prefills)
        return self._choose(step, inputs, self._runner.forward(inputs))

    def _launch_graph(self, graphs: DecodeGraphs, step: PreparedStep, size: int) -> SampledIds:
        graphs.replay(size, _FORWARD)
        num_seqs = step.batch.num_seqs
        if step.is_plain:
            graphs.replay(size, _FILTERED_CHOICE if step.is_filtered else _CHOICE)
            return SampledIds(self._token_ids[:num_seqs])
        return self._choose(step, self._inputs_of(step), self._left_by_forward(num_seqs))

    def _inputs_of(self, step: PreparedStep) -> StepInputs:
        if step.inputs is not None:
            return step.inputs
        return self._decode_inputs.step_inputs(step.batch.num_seqs, step.batch.kv_lens)

    @property
    def _decode_inputs(self) -> DecodeInputs:
        if self._runner.decode_inputs is None:
            raise ValueError("a step was prepared for decode inputs, but the runner has none")
        return self._runner.decode_inputs

    def _choose(self, step: PreparedStep, inputs: StepInputs, hidden: Tensor) -> SampledIds:
        """The tokens and scores of a step outside of a graph."""
        batch = step.batch
        logits = self._runner.logits(hidden, inputs.logit_rows)
        input_ids = None
        if batch.edits is not None:
            input_ids = inputs.token_ids.index_select(0, inputs.logit_rows)
        edited = self._sampler.edited(logits, batch, input_ids)
        if step.ways is not None:
            token_ids = self._sampler.sample_planned(edited, *step.ways)
        elif step.options is not None:
            token_ids = self._sampler.choose(edited, step.options, filtered=step.is_filtered)
        else:
            raise ValueError("a step was prepared without a way to choose its tokens")
        self._runner.remember(inputs, token_ids)
        if batch.scores is None:
            return SampledIds(token_ids)
        return SampledIds(token_ids, self._score(batch.scores, hidden, logits, token_ids))

    def _parts(self, size: int) -> dict[str, Program]:
        """A graph's parts: see module docstring of graphs."""
        parts: dict[str, Program] = {
            _FORWARD: lambda: self._forward_in_place(size),
            _CHOICE: lambda: self._choose_in_place(size, filtered=False),
        }
        if self._sampler.can_filter:
            parts[_FILTERED_CHOICE] = lambda: self._choose_in_place(size, filtered=True)
        return parts

    def _forward_in_place(self, size: int) -> None:
        hidden = self._runner.forward(self._decode_inputs.step_inputs(size))
        if self._hidden is None:  # at the first run, which is of the largest size and not captured
            self._hidden = torch.empty_like(hidden)
        self._left_by_forward(size).copy_(hidden)

    def _choose_in_place(self, size: int, *, filtered: bool) -> None:
        inputs = self._decode_inputs
        logits = self._runner.model.logits(self._left_by_forward(size))
        token_ids = self._sampler.choose(logits, inputs.row_options(size), filtered=filtered)
        self._token_ids[:size].copy_(token_ids)
        self._runner.last_token_ids.index_copy_(0, inputs.state_rows(size), token_ids)

    def _left_by_forward(self, size: int) -> Tensor:
        if self._hidden is None:
            raise RuntimeError("no graph has been captured")
        return self._hidden[:size]

    def _score(self, wanted: ScoreRows, hidden: Tensor, logits: Tensor, token_ids: Tensor) -> Tensor:
        """Prompts are scored a part at a time: the logits of a long one fill more memory than all else.

        Shapes: -> [Q + P, 2 + 2 K].
        """
        sent = upload(
            {"rows": wanted.logit_rows, "token_rows": wanted.token_rows, "next_ids": wanted.next_ids}, hidden.device
        )
        rows, token_rows, next_ids = sent["rows"], sent["token_rows"], sent["next_ids"]
        parts = [self._sampler.score(logits[rows], token_ids[rows], wanted.num_top)]
        step = max(1, _SCORED_ELEMENTS // self._sampler.vocab_size)  # not of the shard: all ranks take equal parts
        for first in range(0, len(token_rows), step):
            own = self._runner.logits(hidden, token_rows[first : first + step])
            parts.append(self._sampler.score(own, next_ids[first : first + step], wanted.num_top))
        return torch.cat(parts)


def build_step_runner(
    model: Decoder,
    config: SchedulerConfig,
    *,
    heads: HeadShard,
    tp: Collectives,
    dtype: torch.dtype,
    device: torch.device,
    graph_sizes: Sequence[int] = (),
    kernel_orders: Mapping[str, str] | None = None,
    cache_dtype: torch.dtype | None = None,
) -> StepRunner:
    """A filled model with KV cache and sampler, on a GPU with inputs that stay in place; no graph is captured yet.

    The cache has the activations' `dtype`, unless `cache_dtype` is another.

    Ranks: local.
    Errors: UsageError when the device has no room for the cache.
    """
    decode_inputs, max_pages = None, -(-config.max_model_len // config.block_size)
    if device.type == "cuda":
        decode_inputs = DecodeInputs(
            max_num_seqs=config.max_num_seqs,
            max_pages=max_pages,
            block_size=config.block_size,
            device=device,
        )
    kv_cache = KVCache(model.config, heads, config.num_kv_blocks, config.block_size, cache_dtype or dtype, device)
    runner = Runner(
        model,
        kv_cache,
        max_num_seqs=config.max_num_seqs,
        device=device,
        max_pages=max_pages,
        decode_inputs=decode_inputs,
    )
    sampler = Sampler.choosing(
        tp,
        model.vocab_range,
        model.config.num_sampled_ids,
        device=device,
        dtype=dtype,
        kernel_orders=kernel_orders,
    )
    return StepRunner(runner, sampler, DecodeGraphs(graph_sizes) if graph_sizes else None)
