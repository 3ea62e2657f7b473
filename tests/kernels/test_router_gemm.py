"""Logits of a router."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library
from dist_infer.kernels.router_gemm import LIBRARIES, RouterGemmFunction, router_gemm
from tests.kernels.aot import compile_ahead
from tests.kernels.triton_interpreter import TRITON_DEVICES
from tests.yardstick import check_error

TRITON, TORCH = LIBRARIES
RUNS = [
    *(
        pytest.param(TRITON, *device.values, marks=device.marks, id=f"triton-{device.values[0]}")
        for device in TRITON_DEVICES
    ),
    pytest.param(TORCH, "cpu", id="torch-cpu"),
    pytest.param(TORCH, "cuda", marks=pytest.mark.gpu, id="torch-cuda"),
]


def random_case(num_tokens: int, width: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations of a dtype, weights of float32 with all bits in use."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(num_experts, width, generator=generator)


@pytest.mark.parametrize(("library", "device"), RUNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "width", "num_experts"),
    [(0, 8, 4), (1, 200, 7), (3, 64, 5), (15, 33, 9), (17, 96, 6), (129, 40, 8)],
)
def test_error_is_that_of_a_float32_product(
    device: str, library: Library[RouterGemmFunction], dtype: torch.dtype, num_tokens: int, width: int, num_experts: int
) -> None:
    x, weight = random_case(num_tokens, width, num_experts, dtype)
    logits = router_gemm(x.to(device), weight.to(device), library=library).cpu()
    assert logits.is_contiguous()
    check_error(logits, x.double() @ weight.double().T, x.float() @ weight.T)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 16, 31, 64, 128, 129, 4096])
@pytest.mark.parametrize(("width", "num_experts"), [(2048, 128), (2048, 64), (6144, 128), (7168, 256)])
def test_real_sizes(num_tokens: int, width: int, num_experts: int) -> None:
    x, weight = (part.cuda() for part in random_case(num_tokens, width, num_experts, torch.bfloat16))
    logits = router_gemm(x, weight, library=TRITON)
    truth = x.double() @ weight.double().T
    check_error(logits, truth, x.float() @ weight.T, factor=1.0)
    # TF32 would lose thirteen bits of the weights: far more.
    assert (logits.double() - truth).abs().max() < 1e-5 * width**0.5


@pytest.mark.gpu
def test_a_graph_replays_with_other_rows() -> None:
    x, weight = (part.cuda() for part in random_case(16, 512, 32, torch.bfloat16))
    router_gemm(x, weight, library=TRITON)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = router_gemm(x, weight, library=TRITON)
    x.copy_(random_case(3, 512, 32, torch.bfloat16)[0].repeat(6, 1)[:16])
    graph.replay()
    assert torch.equal(logits, router_gemm(x, weight, library=TRITON))
    assert torch.equal(logits[0], logits[3])


def test_a_wide_weight_keeps_its_dtype() -> None:
    x, weight = random_case(3, 16, 4, torch.bfloat16)
    logits = router_gemm(x, weight.double(), library=TORCH)
    assert logits.dtype == torch.float64
    assert torch.equal(logits, x.double() @ weight.double().T)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3, 8), torch.zeros(4, 9), r"x \[3, 8\] does not fit weight \[4, 9\]"),
        (torch.zeros(8), torch.zeros(4, 8), r"x \[8\] does not fit"),
        (torch.zeros(3, 8), torch.zeros(4, 8, dtype=torch.bfloat16), "weight torch.bfloat16, which must be wide"),
        (torch.zeros(3, 8, dtype=torch.float64), torch.zeros(4, 8), "x torch.float64 meets weight torch.float32"),
    ],
)
def test_bad_calls_are_refused(x: Tensor, weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router_gemm(x, weight, library=TORCH)


@pytest.mark.parametrize("num_tokens", [8, 64])
def test_the_kernel_compiles_for_hopper(num_tokens: int) -> None:
    module = import_module("dist_infer.kernels.triton.router_gemm")
    types = {"x": "*bf16", "weight": "*fp32", "out": "*fp32", "num_tokens": "i32"}
    sizes = {"NUM_EXPERTS": 128, "WIDTH": 6144, "OVERLAP": True}
    tiles = module.HELD_TILES if num_tokens == 8 else module.TILES
    tile = next(tile for tile in tiles if num_tokens <= tile.max_tokens)
    sizes |= {"TOKENS": tile.tokens, "DEPTH": tile.depth}
    sizes |= {"TURNS": tile.turns, "EARLY": True} if num_tokens == 8 else {"EXPERTS": tile.experts}
    kernel = module._held_kernel if num_tokens == 8 else module._router_kernel
    made = compile_ahead(kernel, types, sizes, num_warps=tile.num_warps)
    assert made.spilled_bytes == 0
    assert "ld.global.v4" in made.asm["ptx"] and "tf32" not in made.asm["ptx"]
    if num_tokens == 8:  # all weights are asked for before the wait for the tokens
        weights, wait = made.asm["ptx"].count("ld.global.v4"), made.asm["ptx"].index("griddepcontrol.wait")
        assert weights > made.asm["ptx"][:wait].count("ld.global.v4") == 12
