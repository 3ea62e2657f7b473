"""Products with staged MXFP8 and NVFP4 weights in CuTe DSL for sm_90a; the contract stands in kernels/scaled_linear.py.

The matrix units take the weight as their left operand, from registers in which it has been dequantised: so its rows
fill them however few the tokens are, no more than the quantised bytes is read, and inputs never go through registers.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor
from torch import Tensor

from dist_infer.kernels.carriers import Fp8Tensor, QuantizedTensor
from dist_infer.kernels.cute.compile_cache import load_or_compile
from dist_infer.kernels.cute.staged_gemm import Launch, Variant
from dist_infer.kernels.multiprocessors import num_multiprocessors
from dist_infer.kernels.prepared_weight import PreparedWeight
from dist_infer.kernels.staged_weight import MAX_CTAS, ROWS, StagedWeight

TOKENS = (8, 16, 32, 64, 128)  # of a block
_MAX_PARTS = 8  # of a block: more would take longer to add up than a CTA's share to read
_MAX_TOKENS = 2**14  # of a launch


def staged_linear(
    x: Tensor | Fp8Tensor, weight: QuantizedTensor | PreparedWeight, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `dist_infer.kernels.scaled_linear.scaled_linear`: MXFP8 and NVFP4 weights of `stage_weight`, in bfloat16.

    Up to `TOKENS[-1]` tokens the order of a token's sums depends on the weight alone.
    """
    if isinstance(x, Fp8Tensor) or not isinstance(weight, StagedWeight) or out_dtype != torch.bfloat16:
        raise TypeError("staged_linear takes an x that isn't quantised, a weight of stage_weight, and gives bfloat16")
    num_outputs, num_tokens = weight.shape[0], x.shape[0]
    out = torch.empty(num_tokens, num_outputs, dtype=out_dtype, device=x.device)
    if num_tokens == 0 or num_outputs == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    for first in range(0, num_tokens, _MAX_TOKENS):
        some = slice(first, first + _MAX_TOKENS)
        _multiply(x[some], weight, bias, out[some])
    return out


def _multiply(x: Tensor, weight: StagedWeight, bias: Tensor | None, out: Tensor) -> None:
    num_tokens, num_outputs = out.shape
    variant = Variant(
        is_nvfp4=weight.is_nvfp4,
        is_steep=weight.is_steep,
        tokens=next((size for size in TOKENS if num_tokens <= size), TOKENS[-1]),
        has_bias=bias is not None,
    )
    num_blocks = -(-num_outputs // ROWS) * -(-num_tokens // variant.tokens)
    num_ctas = min(MAX_CTAS, num_multiprocessors(x.device), num_blocks * min(weight.num_stages, _MAX_PARTS))
    compiled(variant)(
        x,
        weight.data,
        weight.factor,
        out[0] if bias is None else bias.contiguous(),
        out,
        torch.empty(num_ctas * ROWS * variant.tokens, device=x.device),
        weight.flags,
        weight.num_stages,
        num_ctas,
        int(torch.cuda.is_current_stream_capturing()),  # else what is in front may just have written the weight
    )


@cache
def compiled(variant: Variant, options: str = "") -> Callable[..., Any]:
    """The launch of a variant, on the current CUDA device and from the cache unless `options` compile it anew."""
    if not options:
        return load_or_compile("staged_linear", repr(variant), lambda: _compile(variant))
    launch: Callable[..., Any] = _compile(variant, options)
    return launch


def _compile(variant: Variant, options: str = "") -> Any:
    return cute.compile(
        Launch(variant),
        _matrix(8),
        _vector(Int32, 16),
        _vector(Float32, 4),
        _vector(BFloat16, 2),
        _matrix(1),
        _vector(Float32, 16),
        _vector(Int32, 4),
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi {options}",
    )


def _matrix(divisor: int) -> Any:
    """Of bfloat16, whose rows begin at multiples of so many elements."""
    columns, stride = cute.sym_int(divisibility=divisor), cute.sym_int64(divisibility=divisor)
    return make_fake_tensor(BFloat16, (cute.sym_int(), columns), (stride, 1), assumed_align=2 * divisor)


def _vector(number: Any, alignment: int) -> Any:
    return make_fake_compact_tensor(number, (cute.sym_int(),), assumed_align=alignment)
