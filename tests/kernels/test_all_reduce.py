"""All-reduce through peer memory: layout, arithmetic, compiled form; on a GPU the protocols, ranks of one launch.

A GPU test runs all ranks as one launch on one device: their programs all fit on it together.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_infer.kernels import all_reduce as op
from dist_infer.kernels import moe_finalize as moe_finalize_op
from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels import rms_norm as rms_norm_op
from dist_infer.kernels.all_reduce import SENTINEL, Epilogue, PeerLayout, PeerSpace, Reduced
from dist_infer.kernels.carriers import ExpertOutputs, QuantizedTensor
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.kernels.triton import all_reduce as kernels
from dist_infer.kernels.triton.quantize import kernel_format
from dist_infer.kernels.triton.rms_norm import _rms_norm, tile_of
from tests.kernels import peer_code
from tests.kernels.aot import Compiled, compile_ahead
from tests.kernels.triton_interpreter import TRITON_DEVICES

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FUNCTIONS = {"one_shot": op.one_shot, "two_shot": op.two_shot}
LIBRARY = {"one_shot": op.ONE_SHOT_LIBRARIES[0], "two_shot": op.TWO_SHOT_LIBRARIES[0]}
TOKENS = [1, 33, 0, 2, 129, 31, 1000, 32, 128, 1, 127]
SCALED = (QuantFormat.FP8, QuantFormat.NVFP4, QuantFormat.NVFP4_LINEAR)


def layout_of(**changes: int) -> PeerLayout:
    given = {"num_ranks": 4, "row_bytes": 4096, "one_shot_rows": 7, "two_shot_rows": 30}
    return PeerLayout(**(given | changes))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_parts_of_the_layout_follow_each_other(num_ranks: int) -> None:
    layout = layout_of(num_ranks=num_ranks)
    ends = [
        (4 * layout.one_shot_rows, layout.slots),
        (layout.slots + 2 * (num_ranks - 1) * layout.slot_bytes, layout.flags),
        (layout.flags + 4 * 2 * (num_ranks - 1) * layout.max_tiles, layout.counters),
        (layout.counters + 4 * (2 * (num_ranks - 1) + 1) * layout.max_tiles, layout.parts),
        (layout.parts + (num_ranks - 1) * layout.part_bytes, layout.sums),
        (layout.sums + layout.two_shot_rows * layout.row_bytes, layout.num_bytes),
    ]
    assert all(0 <= start - end < 256 and start % 256 == 0 for end, start in ends)
    assert layout.max_tiles * num_ranks >= layout.two_shot_rows and layout.slot_bytes == 7 * 4096


def test_memory_is_empty_before_the_first_call() -> None:
    layout = layout_of()
    memory = torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8)
    layout.prepare(memory)
    words = memory.view(torch.int32)
    assert (words[layout.slots // 4 : layout.flags // 4] == SENTINEL).all()
    assert not words[: layout.slots // 4].any() and not words[layout.flags // 4 :].any()


@pytest.mark.parametrize("change", [{"num_ranks": 1}, {"row_bytes": 24}, {"row_bytes": 0}, {"one_shot_rows": 0}])
def test_a_layout_that_can_not_be_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no layout"):
        layout_of(**change)


def _space(**changes: int) -> PeerSpace:
    layout = layout_of(**changes)
    memory, table = torch.zeros(0, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    return PeerSpace(layout=layout, memory=memory, table=table, rank=0, max_programs=4)


ROWS = torch.zeros(3, 64)


@pytest.mark.parametrize(
    ("x", "epilogue", "message"),
    [
        (ROWS.double(), Epilogue(), "torch.float64"),
        (ROWS.int(), Epilogue(), "float type"),
        (ROWS.t(), Epilogue(), "contiguous"),
        (ROWS.view(1, 3, 64), Epilogue(), "not the rows of 1 ranks"),
        (torch.zeros(3, 6), Epilogue(), "multiple of 16"),
        (torch.zeros(8, 64), Epilogue(), "up to 7 rows"),
        (torch.zeros(1, 2048), Epilogue(), "8192 bytes are not up to 7 rows of up to 4096"),
        (ROWS, Epilogue(residual=torch.zeros(2, 64)), r"residual torch.float32 \[2, 64\] differs"),
        (ROWS, Epilogue(residual=ROWS.bfloat16()), "residual torch.bfloat16"),
        (ROWS, Epilogue(weight=torch.zeros(3)), r"weight \[3\]"),
        (ROWS, Epilogue(quant_format=QuantFormat.FP8), "needs a weight"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, epilogue: Epilogue, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op.one_shot(x, epilogue, _space(), library=LIBRARY["one_shot"])


def test_two_shots_have_a_limit_of_their_own() -> None:
    with pytest.raises(ValueError, match="two_shot: 31 rows .* up to 30 rows"):
        op.two_shot(torch.zeros(31, 64), Epilogue(), _space(), library=LIBRARY["two_shot"])


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_words_are_the_elements_in_order(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    out = torch.empty_like(x)
    peer_code.unpack_words[1,](x.view(torch.int32), out, VECTORS=len(x) * x.element_size() // 16)
    assert torch.equal(out, x)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_only_the_sentinel_is_not_sent(device: str) -> None:
    words = torch.tensor(
        [SENTINEL, SENTINEL + 1, -1, 0, 1, 0x3F80, -32768, 2**31 - 1], dtype=torch.int32, device=device
    )
    sent = torch.empty_like(words)
    peer_code.make_sendable[1,](words, sent, LENGTH=8)
    assert sent.tolist() == [0, *words.tolist()[1:]]
    zeros = torch.tensor([SENTINEL], dtype=torch.int32)
    assert zeros.view(torch.float32).item() == 0 and zeros.view(torch.bfloat16).tolist() == [0, 0]


def _scale_for(quant_format: QuantFormat | None, device: str) -> Tensor | None:
    return torch.tensor([0.75], device=device) if quant_format in SCALED else None


def _bytes_of(quantized: QuantizedTensor) -> list[Tensor]:
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
        assert all(same(a, b) for a, b in zip(_bytes_of(mine), _bytes_of(other), strict=True))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("quant_format", [None, *QuantFormat])
@pytest.mark.parametrize("has_residual", [False, True])
def test_what_follows_the_sum_is_what_separate_ops_give(
    device: str, quant_format: QuantFormat | None, has_residual: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    summed, residual = (torch.randn(3, 256, generator=generator).bfloat16().to(device) for _ in range(2))
    weight = torch.randn(256, generator=generator).bfloat16().to(device)
    epilogue = Epilogue(
        residual=residual if has_residual else None,
        weight=weight,
        eps=EPS,
        quant_format=quant_format,
        scale=_scale_for(quant_format, device),
    )
    ours = op.empty_reduced(summed, epilogue)
    data = scales = scale = name = None
    if ours.quantized:
        data, scales, scale = ours.quantized[0].data, ours.quantized[0].scales, epilogue.scale
        name = kernel_format(ours.quantized[0])[0]
    arguments = (summed, epilogue.residual, weight, ours.total, ours.normed, data, scales, scale)
    peer_code.finish_rows[3,](*arguments, EPS, HIDDEN=256, COLUMNS=256, FORMAT=name)
    theirs = separate_ops(summed, epilogue)
    assert same(ours.total, theirs.total)
    assert ours.normed is not None and theirs.normed is not None and same(ours.normed, theirs.normed)
    for mine, other in zip(ours.quantized, theirs.quantized, strict=True):
        assert same(mine.data.view(torch.uint8), other.data.view(torch.uint8))
        written = scales_of_rows(mine), scales_of_rows(other)
        assert same(*written)


def scales_of_rows(quantized: QuantizedTensor) -> Tensor:
    """Without those of rows that don't exist, which other programs write."""
    scales = quantized.scales.view(torch.uint8).flatten()
    if kernel_format(quantized)[2]:
        return scales.view(-1, 32, 4, 4)[:, :3, 0]
    return scales


def compiled(
    kernel: Any, hidden: int, dtype: str, *, residual: bool, num_ranks: int = 2, top_k: int = 0, **constants: Any
) -> Compiled:
    columns, num_warps = tile_of(hidden)
    per_vector = 4 if dtype == "fp32" else 8
    pointers = ["x", "weight", "total_out", "norm_out", *(["residual"] if residual else [])]
    types = dict.fromkeys(pointers, f"*{dtype}") | {"memory": "*u8", "table": "*i64", "eps": "fp32"}
    missing = {"data": None, "scales": None, "scale": None} | ({} if residual else {"residual": None})
    if top_k:
        types |= {"ids": "*i32", "factors": "*fp32", "shared": f"*{dtype}"}
    else:
        missing |= {"ids": None, "factors": None, "shared": None}
    constants |= missing | {"FORMAT": None, "ZEROING": 0, "PEEK": True, "OVERLAP": True, "NUM_RANKS": num_ranks}
    constants |= {"HIDDEN": hidden, "VECTORS": hidden // per_vector, "BLOCK": columns // per_vector}
    constants |= {"TOP_K": top_k, "NUM_EXPERTS": 64}
    sizes = [name for name in kernel.arg_names if name not in types and name not in constants]
    types |= dict.fromkeys(sizes, "i32") | {"memory_stride": "i64"}
    return compile_ahead(kernel, types, constants, num_warps=num_warps)


ONE_SHOT, TWO_SHOT = {"AHEAD": 0}, {"ROWS": 4}


@pytest.mark.parametrize(
    ("name", "hidden", "dtype", "residual", "constants"),
    [
        ("one_shot_kernel", 7168, "bf16", True, ONE_SHOT),
        ("one_shot_kernel", 2048, "fp32", False, {"AHEAD": 2}),
        ("two_shot_kernel", 7168, "bf16", False, TWO_SHOT),
        ("two_shot_kernel", 6144, "fp16", True, TWO_SHOT),
        ("one_shot_kernel", 2048, "bf16", True, {"AHEAD": 0, "top_k": 8}),
        ("two_shot_kernel", 7168, "bf16", True, {"ROWS": 4, "top_k": 8}),
    ],
)
def test_ahead_of_time(name: str, hidden: int, dtype: str, residual: bool, constants: dict[str, Any]) -> None:
    """Accesses are wide, rows never change their layout, and the norm adds in that of kernels/triton/rms_norm."""
    made = compiled(getattr(kernels, name), hidden, dtype, residual=residual, **constants)
    ptx = made.asm["ptx"]
    assert "ld.relaxed.sys.global.v4.b32" in ptx and "st.relaxed.sys.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx and "st.global.b16" not in ptx and "multimem" not in ptx
    assert ("st.release.sys" in ptx) == ("ld.acquire.sys" in ptx) == (name == "two_shot_kernel")
    assert "convert_layout" not in made.asm["ttgir"]
    tile, num_warps = tile_of(hidden)
    types = dict.fromkeys(("x", "weight", "normed", "total"), f"*{dtype}")
    types |= {"x_stride": "i32:16", "residual_stride": "i32:16", "eps": "fp32"}
    constexprs = {"residual": None, "HIDDEN": hidden, "TILE": tile, "OVERLAP": False}
    alone = compile_ahead(_rms_norm, types, constexprs, num_warps=num_warps)
    assert {_reduced_layout(made)} == {_reduced_layout(alone)}


def _reduced_layout(made: Compiled) -> str:
    """The layout of what `tt.reduce` adds up."""
    lines = made.asm["ttgir"].splitlines()
    types = {line.split("->")[0].split("tensor<")[-1] for line in lines if line.lstrip().startswith("}) : (tensor<")}
    names = {text.split("#")[1].split(">")[0] for text in types}
    layouts = {line.split("=", 1)[1].strip() for line in lines if line.split(" ", 1)[0] in {f"#{n}" for n in names}}
    assert len(layouts) == 1, types
    return layouts.pop()


# On a GPU: the protocols.


def one_device(num_ranks: int, *, row_bytes: int, max_rows: int) -> PeerSpace:
    """A group whose ranks are one launch."""
    layout = PeerLayout(num_ranks=num_ranks, row_bytes=row_bytes, one_shot_rows=max_rows, two_shot_rows=max_rows)
    return op.space_on_one_device(layout, torch.device("cuda"))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results hold 0xFF where a kernel doesn't write."""

    def poison(x: Tensor | ExpertOutputs, epilogue: Epilogue) -> Reduced:
        reduced = op.empty_reduced(x, epilogue)
        outputs = [reduced.total, *([] if reduced.normed is None else [reduced.normed])]
        for quantized in reduced.quantized:
            outputs += [quantized.data, *([] if quantized.scales is epilogue.scale else [quantized.scales])]
        for output in outputs:
            output.view(torch.uint8).fill_(0xFF)
        return reduced

    monkeypatch.setattr(kernels, "empty_reduced", poison)


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
    scale = _scale_for(quant_format, "cuda")
    return replace(whole, quant_format=quant_format, scale=scale, keeps_norm=what.startswith("out_"))


FORMATS = [quant_format.value for quant_format in QuantFormat]
OPS = [None, "rms_norm", "residual_rms_norm", *FORMATS, *(f"out_{name}" for name in FORMATS)]
SHAPES = [(2, 7168), (8, 2048), (4, 6144), (8, 7168), (2, 2048), (4, 7168), (2, 6144), (4, 2048), (8, 6144)]


def _pairs() -> Iterator[Any]:
    """Every op with both strategies; ranks and widths take turns, and each runs with all numbers of tokens."""
    for idx, (what, strategy) in enumerate((what, strategy) for what in OPS for strategy in FUNCTIONS):
        num_ranks, hidden = SHAPES[idx % len(SHAPES)]
        yield pytest.param(strategy, what, num_ranks, hidden, id=f"{strategy}-{what}-{num_ranks}-{hidden}")


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("strategy", "what", "num_ranks", "hidden"), list(_pairs()))
def test_bytes(strategy: str, what: str | None, num_ranks: int, hidden: int) -> None:
    """Whatever the sizes, and however they change from call to call."""
    space = one_device(num_ranks, row_bytes=2 * 7168, max_rows=1000)
    weight = torch.randn(hidden, device="cuda").bfloat16()
    for call, num_tokens in enumerate(TOKENS):
        x = rows_of_ranks(num_ranks, num_tokens, hidden, torch.bfloat16, seed=call)
        residual = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
        run_and_check(strategy, space, x, epilogue_of(what, residual, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("strategy", FUNCTIONS)
def test_bytes_of_other_types(strategy: str, dtype: torch.dtype) -> None:
    space = one_device(4, row_bytes=4 * 2048, max_rows=300)
    weight = torch.randn(2048, device="cuda").to(dtype)
    for num_tokens in (1, 300, 33):
        x = rows_of_ranks(4, num_tokens, 2048, dtype, seed=num_tokens)
        residual = torch.randn(num_tokens, 2048, device="cuda").to(dtype)
        run_and_check(strategy, space, x, epilogue_of("residual_rms_norm", residual, weight))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strategy", FUNCTIONS)
def test_outputs_of_experts_are_added_up_first(strategy: str, dtype: torch.dtype) -> None:
    """Byte for byte as kernels/moe_finalize and then the sum; without a shared expert every other time."""
    space = one_device(4, row_bytes=4 * 2048, max_rows=300)
    weight = torch.randn(2048, device="cuda").to(dtype)
    for call, num_tokens in enumerate((1, 129, 0, 33, 300, 2)):
        outputs = rows_of_ranks(4, num_tokens * 8, 2048, dtype, seed=call)
        ids = torch.randint(-1, 6, (4, num_tokens, 8), device="cuda", dtype=torch.int32)
        shared = rows_of_ranks(4, num_tokens, 2048, dtype, seed=9 + call) if call % 2 else None
        weights = torch.rand(4, num_tokens, 8, device="cuda")
        x = ExpertOutputs(outputs=outputs, ids=ids, weights=weights, num_experts=5, shared=shared)
        residual = torch.randn(num_tokens, 2048, device="cuda").to(dtype)
        epilogue = epilogue_of("residual_rms_norm", residual, weight)
        stacked = replace(epilogue, residual=residual.expand(4, -1, -1).contiguous())
        reduced = FUNCTIONS[strategy](x, stacked, space, library=LIBRARY[strategy])
        sums = [
            moe_finalize_op.moe_finalize(
                replace(
                    x,
                    outputs=outputs[rank],
                    ids=ids[rank],
                    weights=weights[rank],
                    shared=None if shared is None else shared[rank],
                ),
                library=moe_finalize_op.LIBRARIES[0],
            )
            for rank in range(4)
        ]
        theirs = separate_ops(ordered_sum(torch.stack(sums)), epilogue)
        for rank in range(4):
            check_same(of_rank(reduced, rank), theirs)


@pytest.mark.gpu
def test_strategies_and_widths_take_turns_in_one_space() -> None:
    space = one_device(4, row_bytes=2 * 7168, max_rows=600)
    for call, num_tokens in enumerate([5, 600, 1, 0, 77, 600, 2] * 3):
        hidden = (2048, 7168, 64)[call % 3]
        x = rows_of_ranks(4, num_tokens, hidden, torch.bfloat16, seed=call)
        run_and_check(("one_shot", "two_shot")[call * 5 // 7 % 2], space, x, Epilogue())


def _captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", FUNCTIONS)
def test_graphs_of_several_sizes_and_eager_calls_take_turns(strategy: str) -> None:
    space = one_device(4, row_bytes=2 * 2048, max_rows=200)
    run = FUNCTIONS[strategy]
    inputs = {rows: rows_of_ranks(4, rows, 2048, torch.bfloat16, seed=rows) for rows in (1, 200, 40)}

    def three(rows: int) -> list[Reduced]:
        return [run(inputs[rows], Epilogue(), space, library=LIBRARY[strategy]) for _ in range(3)]

    graphs = {rows: _captured(partial(three, rows)) for rows in inputs}
    for turn, rows in enumerate([1, 200, 40, 40, 1, 200, 1, 1, 40]):
        x, (graph, outs) = inputs[rows], graphs[rows]
        x.copy_(rows_of_ranks(4, rows, 2048, torch.bfloat16, seed=100 + turn))
        for out in outs:
            out.total.fill_(7)
        graph.replay()
        for out in outs:
            assert all(same(out.total[rank], ordered_sum(x)) for rank in range(4))
        if turn % 2:
            run_and_check(strategy, space, rows_of_ranks(4, 3 + turn, 2048, torch.bfloat16, seed=turn), Epilogue())


def _use(monkeypatch: pytest.MonkeyPatch, strategy: str, **replaced: Any) -> None:
    name = f"{strategy}_kernel"
    monkeypatch.setattr(kernels, name, peer_code.rebuilt(getattr(kernels, name), **replaced))


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", FUNCTIONS)
def test_ten_thousand_calls_with_delays(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One time in a hundred a warp is late."""
    _use(monkeypatch, strategy, load_words=peer_code.dawdling_load)
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

    graph, _ = _captured(calls)
    for _ in range(100):
        graph.replay()
    assert wrong.item() == 0


FAULTS = {
    "early read": ("one_shot", {"settle_words": peer_code.hasty_settle, "load_words": peer_code.late_load}, None),
    "flags not waited for": ("two_shot", {"await_flag": peer_code.deaf_await, "load_words": peer_code.late_load}, None),
    "first rounding skipped": ("two_shot", {"row_sum": peer_code.unrounded_sum}, "residual_rms_norm"),
    "invented rows unwritten": ("one_shot", {"zero_rest": peer_code.careless_zero}, "mxfp8"),
}


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, replaced, what = FAULTS[fault]
    _use(monkeypatch, strategy, **replaced)
    space = one_device(2, row_bytes=2 * 2048, max_rows=100)
    weight = torch.randn(2048, device="cuda").bfloat16()

    def calls() -> None:
        for num_tokens in (100, 33, 100):
            x = rows_of_ranks(2, num_tokens, 2048, torch.bfloat16, seed=num_tokens)
            residual = torch.randn(num_tokens, 2048, device="cuda").bfloat16()
            run_and_check(strategy, space, x, epilogue_of(what, residual, weight))

    with pytest.raises(AssertionError):
        calls()
