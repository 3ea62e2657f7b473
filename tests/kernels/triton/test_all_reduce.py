"""All-reduce through peer memory: compiled form; on a GPU the bytes, whatever calls follow each other."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dist_infer.kernels import moe_finalize as moe_finalize_op
from dist_infer.kernels.all_reduce import Epilogue, Reduced
from dist_infer.kernels.carriers import ExpertOutputs
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.kernels.triton import all_reduce as kernels
from dist_infer.kernels.triton.rms_norm import _rms_norm, tile_of
from tests.kernels.all_reduce_cases import (
    FUNCTIONS,
    LIBRARY,
    captured,
    check_same,
    epilogue_of,
    of_rank,
    one_device,
    ordered_sum,
    poisoned_results,
    rows_of_ranks,
    run_and_check,
    same,
    separate_ops,
)
from tests.kernels.aot import Compiled, compile_ahead

TOKENS = [1, 33, 0, 2, 129, 31, 1000, 32, 128, 1, 127]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results hold 0xFF where a kernel doesn't write."""
    monkeypatch.setattr(kernels, "empty_reduced", poisoned_results)


def compiled(
    kernel: Any, hidden: int, dtype: str, *, residual: bool, num_ranks: int = 2, top_k: int = 0, **constants: Any
) -> Compiled:
    columns, num_warps = tile_of(hidden)
    parts = constants.get("PARTS", 1)
    columns, num_warps = columns // parts, num_warps // parts
    per_vector = 4 if dtype == "fp32" else 8
    pointers = ["x", "weight", "total_out", "norm_out", *(["residual"] if residual else [])]
    types = dict.fromkeys(pointers, f"*{dtype}") | {"memory": "*u8", "table": "*i64", "eps": "fp32"}
    missing = {"data": None, "scales": None, "scale": None} | ({} if residual else {"residual": None})
    if top_k:
        types |= {"ids": "*i32", "factors": "*fp32", "shared": f"*{dtype}"}
    else:
        missing |= {"ids": None, "factors": None, "shared": None}
    constants |= missing | {"FORMAT": None, "ZEROING": 0, "TOGETHER": 4, "OVERLAP": True, "NUM_RANKS": num_ranks}
    constants |= {"HIDDEN": hidden, "VECTORS": hidden // per_vector, "BLOCK": columns // per_vector}
    constants |= {"TOP_K": top_k, "NUM_EXPERTS": 64}
    sizes = [name for name in kernel.arg_names if name not in types and name not in constants]
    types |= dict.fromkeys(sizes, "i32") | {"memory_stride": "i64"}
    return compile_ahead(kernel, types, constants, num_warps=num_warps)


ONE_SHOT, TWO_SHOT = {"AHEAD": 0, "PARTS": 1}, {"ROWS": 4}


@pytest.mark.parametrize(
    ("name", "hidden", "dtype", "residual", "constants"),
    [
        ("one_shot_kernel", 7168, "bf16", True, ONE_SHOT),
        ("one_shot_kernel", 2048, "fp32", False, ONE_SHOT | {"AHEAD": 2}),
        ("one_shot_kernel", 7168, "bf16", True, ONE_SHOT | {"PARTS": 4, "num_ranks": 8}),
        ("two_shot_kernel", 7168, "bf16", False, TWO_SHOT),
        ("two_shot_kernel", 6144, "fp16", True, TWO_SHOT),
        ("one_shot_kernel", 2048, "bf16", True, ONE_SHOT | {"top_k": 8}),
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
    parts = constants.get("PARTS", 1)
    assert _reduced_layout(made).replace(f"[{num_warps // parts}]", f"[{num_warps}]") == _reduced_layout(alone)


def _reduced_layout(made: Compiled) -> str:
    """The layout of what `tt.reduce` adds up."""
    lines = made.asm["ttgir"].splitlines()
    types = {line.split("->")[0].split("tensor<")[-1] for line in lines if line.lstrip().startswith("}) : (tensor<")}
    names = {text.split("#")[1].split(">")[0] for text in types}
    layouts = {line.split("=", 1)[1].strip() for line in lines if line.split(" ", 1)[0] in {f"#{n}" for n in names}}
    assert len(layouts) == 1, types
    return layouts.pop()


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


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", FUNCTIONS)
def test_graphs_of_several_sizes_and_eager_calls_take_turns(strategy: str) -> None:
    space = one_device(4, row_bytes=2 * 2048, max_rows=200)
    run = FUNCTIONS[strategy]
    inputs = {rows: rows_of_ranks(4, rows, 2048, torch.bfloat16, seed=rows) for rows in (1, 200, 40)}

    def three(rows: int) -> list[Reduced]:
        return [run(inputs[rows], Epilogue(), space, library=LIBRARY[strategy]) for _ in range(3)]

    graphs = {rows: captured(partial(three, rows)) for rows in inputs}
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
