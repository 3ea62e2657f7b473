"""All-reduces between ranks that are one launch on one device: the protocol and its epilogues, without a wire.

`epilogue` cases are what an op takes longer than the one it builds on: the norm than the sum, a quantised norm than the
norm. Cases of `experts` start at the outputs of experts, eight a row, which the kernel adds up itself; their peer adds
them up in a launch before it.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.all_reduce_samples import EPS, NUM_SETS, Call, Inputs, compare_us
from benchmarks.timing import Row
from dist_infer.comm.all_reduce import FusedOp
from dist_infer.kernels import all_reduce as op
from dist_infer.kernels import moe_finalize as moe_finalize_op
from dist_infer.kernels.all_reduce import AllReduceFunction, Epilogue, PeerLayout, PeerSpace
from dist_infer.kernels.carriers import ExpertOutputs
from dist_infer.kernels.quantize import QuantFormat

HIDDEN = 7168
NUM_RANKS = (2, 4, 8)
TOKENS = (1, 4, 16)
EXPERT_TOKENS = (16, 64, 128)
TOP_K = 8
BUILDS_ON = {
    FusedOp.RESIDUAL_RMS_NORM: FusedOp.NONE,
    FusedOp.RESIDUAL_RMS_NORM_QUANT_NVFP4: FusedOp.RESIDUAL_RMS_NORM,
    FusedOp.RESIDUAL_RMS_NORM_QUANT_MXFP8: FusedOp.RESIDUAL_RMS_NORM,
}
OPS = {"one_shot": (FusedOp.NONE, *BUILDS_ON), "two_shot": (FusedOp.NONE, FusedOp.RESIDUAL_RMS_NORM)}
_NUM_CALLS = 60
_RUNS: dict[str, AllReduceFunction] = {
    "one_shot": partial(op.one_shot, library=op.ONE_SHOT_LIBRARIES[0]),
    "two_shot": partial(op.two_shot, library=op.TWO_SHOT_LIBRARIES[0]),
}


def rows(device: torch.device) -> Iterator[Row]:
    """All cases."""
    for num_ranks in NUM_RANKS:
        space = _space(num_ranks, max(TOKENS), device)
        for num_tokens in TOKENS:
            inputs = Inputs.make(device, num_ranks, num_tokens, HIDDEN)
            for strategy, run in _RUNS.items():
                yield from _rows_of(strategy, run, space, inputs)
    space = _space(2, max(EXPERT_TOKENS), device)
    for num_tokens in EXPERT_TOKENS:
        yield _row_of_experts(space, num_tokens)


def _space(num_ranks: int, max_rows: int, device: torch.device) -> PeerSpace:
    layout = PeerLayout(num_ranks=num_ranks, row_bytes=2 * HIDDEN, one_shot_rows=max_rows, two_shot_rows=max_rows)
    return op.space_on_one_device(layout, device)


def _rows_of(strategy: str, run: AllReduceFunction, space: PeerSpace, inputs: Inputs) -> Iterator[Row]:
    num_ranks, num_tokens, _ = inputs.x[0].shape
    place, size = f"virtual ranks={num_ranks} strategy={strategy}", f"h={HIDDEN} tokens={num_tokens}"
    ops = OPS[strategy]
    calls = {what.name: partial(_call, run, space, what, inputs) for what in ops}
    found = compare_us(calls, _NUM_CALLS)
    for what in ops:
        yield Row(case=f"{place} {what.name.lower()} {size}", ours_us=found[what.name], library=strategy)
    for what in ops[1:]:
        added = found[what.name] - found[BUILDS_ON[what].name]
        yield Row(case=f"{place} epilogue {what.name.lower()} {size}", ours_us=added, library=strategy)


def _call(run: AllReduceFunction, space: PeerSpace, what: FusedOp, inputs: Inputs, idx: int) -> object:
    epilogue = Epilogue()
    if what is not FusedOp.NONE:
        quant_format = what.value.quant_format
        epilogue = Epilogue(
            residual=inputs.residual[idx],
            weight=inputs.weight,
            eps=EPS,
            quant_format=quant_format,
            scale=inputs.scale if quant_format is QuantFormat.NVFP4 else None,
            keeps_norm=what.value.keeps_norm,
        )
    return run(inputs.x[idx], epilogue, space)


def _row_of_experts(space: PeerSpace, num_tokens: int) -> Row:
    """What comm/all_reduce's limit of rows rests on, from which on a launch before it adds up the experts."""
    device, num_ranks = space.memory.device, space.layout.num_ranks
    outputs = [_outputs(num_ranks, num_tokens, device) for _ in range(NUM_SETS)]
    inputs = Inputs.make(device, num_ranks, num_tokens, HIDDEN)
    run, library = _RUNS["one_shot"], moe_finalize_op.LIBRARIES[0]

    def epilogue(idx: int) -> Epilogue:
        return Epilogue(residual=inputs.residual[idx], weight=inputs.weight, eps=EPS)

    def fused(idx: int) -> object:
        return run(outputs[idx], epilogue(idx), space)

    def separate(idx: int) -> object:
        summed: Tensor = moe_finalize_op.moe_finalize(_flat(outputs[idx]), library=library)
        return run(summed.view(num_ranks, num_tokens, HIDDEN), epilogue(idx), space)

    calls: dict[str, Call] = {"fused": fused, "separate": separate}
    found = compare_us(calls, _NUM_CALLS)
    return Row(
        case=f"virtual ranks={num_ranks} strategy=one_shot experts residual_rms_norm h={HIDDEN} tokens={num_tokens}",
        ours_us=found["fused"],
        library="one_shot",
        peers={"moe_finalize + one_shot": found["separate"]},
    )


def _outputs(num_ranks: int, num_tokens: int, device: torch.device) -> ExpertOutputs:
    """Half of whose choices are of experts that the rank holds."""
    return ExpertOutputs(
        outputs=torch.randn(num_ranks, num_tokens * TOP_K, HIDDEN, device=device).bfloat16(),
        ids=torch.randint(0, 128, (num_ranks, num_tokens, TOP_K), device=device, dtype=torch.int32),
        weights=torch.rand(num_ranks, num_tokens, TOP_K, device=device),
        num_experts=64,
    )


def _flat(x: ExpertOutputs) -> ExpertOutputs:
    """The rows of all ranks as those of one."""
    return replace(x, outputs=x.outputs.flatten(0, 1), ids=x.ids.flatten(0, 1), weights=x.weights.flatten(0, 1))
