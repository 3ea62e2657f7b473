"""Cases of the all-reduce through peer memory: rows, what must come of them, calls that are checked against it.

All ranks are one launch on one device: their programs all fit on it together.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_infer.kernels import all_reduce as op
from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels import rms_norm as rms_norm_op
from dist_infer.kernels.all_reduce import Epilogue, PeerLayout, PeerSpace, Reduced
from dist_infer.kernels.carriers import ExpertOutputs, QuantizedTensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.kernels.triton import all_reduce as kernels
from tests.kernels import peer_code

EPS = 1e-5
FUNCTIONS = {"one_shot": op.one_shot, "two_shot": op.two_shot}
LIBRARY = {"one_shot": op.ONE_SHOT_LIBRARIES[0], "two_shot": op.TWO_SHOT_LIBRARIES[0]}
_SCALED = (QuantFormat.FP8, QuantFormat.NVFP4, QuantFormat.NVFP4_LINEAR)


def scale_for(quant_format: QuantFormat | None, device: str) -> Tensor | None:
    return torch.tensor([0.75], device=device) if quant_format in _SCALED else None


def bytes_of(quantized: QuantizedTensor) -> list[Tensor]:
    return [quantized.data.view(torch.uint8), quantized.scales.view(torch.uint8)]


def separate_ops(summed: Tensor, epilogue: Epilogue) -> Reduced:
    """What the kernels must give, by other kernels."""
    if epilogue.weight is None:
        return Reduced(total=summed, normed=None, quantized=())
    normed, total = rms_norm_op.rms_norm(
        summed, epilogue.weight, epilogue.eps, epilogue.residual, library=rms_norm_op.LIBRARIES[0]
    )
    quantized: tuple[QuantizedTensor, ...] = ()
    if epilogue.quant_format is not None:
        library = quantize_op.LIBRARIES[0]
        quantized = (quantize_op.quantize(normed, epilogue.quant_format, epilogue.scale, library=library),)
    return Reduced(total=total, normed=normed if epilogue.keeps_norm else None, quantized=quantized)


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit; NaN is NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    equal = ours.view(integers) == theirs.view(integers)
    if ours.dtype.is_floating_point and ours.element_size() > 1:
        equal |= ours.isnan() & theirs.isnan()
    return bool(equal.all())


def check_same(ours: Reduced, theirs: Reduced) -> None:
    assert same(ours.total, theirs.total)
    assert (ours.normed is None) == (theirs.normed is None)
    if ours.normed is not None and theirs.normed is not None:
        assert same(ours.normed, theirs.normed)
    for mine, other in zip(ours.quantized, theirs.quantized, strict=True):
        assert all(same(a, b) for a, b in zip(bytes_of(mine), bytes_of(other), strict=True))


def one_device(num_ranks: int, *, row_bytes: int, max_rows: int) -> PeerSpace:
    """A group whose ranks are one launch."""
    layout = PeerLayout(num_ranks=num_ranks, row_bytes=row_bytes, one_shot_rows=max_rows, two_shot_rows=max_rows)
    return op.space_on_one_device(layout, torch.device("cuda"))


def poisoned_results(x: Tensor | ExpertOutputs, epilogue: Epilogue) -> Reduced:
    """Results that hold 0xFF where a kernel doesn't write."""
    reduced = op.empty_reduced(x, epilogue)
    outputs = [reduced.total, *([] if reduced.normed is None else [reduced.normed])]
    for quantized in reduced.quantized:
        outputs += [quantized.data, *([] if quantized.scales is epilogue.scale else [quantized.scales])]
    for output in outputs:
        output.view(torch.uint8).fill_(0xFF)
    return reduced


def rows_of_ranks(num_ranks: int, num_tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor a rank, with zeros of both signs, infinities and NaN in places."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(num_ranks, num_tokens, hidden, device="cuda", generator=generator).to(dtype)
    x.view(-1)[::37] = -0.0
    x[..., 2:6] = -0.0
    x[..., 4] = 0.0
    if num_tokens > 2:
        x[0, -1, 9], x[num_ranks - 1, -1, 10] = math.inf, math.nan
        x[0, 1, 11], x[num_ranks - 1, 1, 11] = math.inf, -math.inf
    return x


def ordered_sum(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[0], dtype=torch.float32)
    for part in x:
        total += part
    return total.to(x.dtype)


def of_rank(reduced: Reduced, rank: int) -> Reduced:
    normed = None if reduced.normed is None else reduced.normed[rank]
    return Reduced(total=reduced.total[rank], normed=normed, quantized=reduced.quantized[rank : rank + 1])


def run_and_check(strategy: str, space: PeerSpace, x: Tensor, epilogue: Epilogue) -> None:
    """On all ranks, against separate ops."""
    stacked = epilogue
    if epilogue.residual is not None:
        stacked = replace(epilogue, residual=epilogue.residual.expand(x.shape).contiguous())
    reduced = FUNCTIONS[strategy](x, stacked, space, library=LIBRARY[strategy])
    theirs = separate_ops(ordered_sum(x), epilogue)
    for rank in range(len(x)):
        check_same(of_rank(reduced, rank), theirs)


def epilogue_of(what: str | None, residual: Tensor, weight: Tensor) -> Epilogue:
    """None, "rms_norm", "residual_rms_norm", or a format's value, after "out_" where the norm is kept."""
    if what is None:
        return Epilogue()
    if what == "rms_norm":
        return Epilogue(weight=weight, eps=EPS)
    whole = Epilogue(residual=residual, weight=weight, eps=EPS)
    if what == "residual_rms_norm":
        return whole
    quant_format = QuantFormat(what.removeprefix("out_"))
    scale = scale_for(quant_format, "cuda")
    return replace(whole, quant_format=quant_format, scale=scale, keeps_norm=what.startswith("out_"))


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the launches of `run`, and what `run` gave."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def put_in(monkeypatch: pytest.MonkeyPatch, strategy: str, **replaced: Any) -> None:
    """Other device functions in the kernel of a strategy, in place of those of the same names."""
    name = f"{strategy}_kernel"
    monkeypatch.setattr(kernels, name, peer_code.rebuilt(getattr(kernels, name), **replaced))


def run_ten_thousand_calls(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several sizes between eight ranks, where one time in a hundred a warp is late."""
    put_in(monkeypatch, strategy, load_words=peer_code.dawdling_load)
    space = one_device(8, row_bytes=2 * 2048, max_rows=40)
    run = FUNCTIONS[strategy]
    inputs = [rows_of_ranks(8, rows, 2048, torch.bfloat16, seed=rows) for rows in (1, 40, 17, 2, 33)]
    sums = [ordered_sum(x) for x in inputs]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def calls() -> None:
        for _ in range(20):
            for x, expected in zip(inputs, sums, strict=True):
                total = run(x, Epilogue(), space, library=LIBRARY[strategy]).total
                wrong.add_(((total != expected) & ~(total.isnan() & expected.isnan())).sum())

    graph, _ = captured(calls)
    for _ in range(100):
        graph.replay()
    assert wrong.item() == 0


def expect_wrong_bytes(strategy: str, what: str | None, monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> None:
    """Of a kernel with a fault: its bytes are found to be wrong."""
    monkeypatch.setattr(kernels, "empty_reduced", poisoned_results)
    put_in(monkeypatch, strategy, **replaced)
    space = one_device(2, row_bytes=2 * 2048, max_rows=100)
    weight = torch.randn(2048, device="cuda").bfloat16()

    def calls() -> None:
        for num_tokens in (100, 33, 100):
            x = rows_of_ranks(2, num_tokens, 2048, torch.bfloat16, seed=num_tokens)
            residual = torch.randn(num_tokens, 2048, device="cuda").bfloat16()
            run_and_check(strategy, space, x, epilogue_of(what, residual, weight))

    with pytest.raises(AssertionError):
        calls()
