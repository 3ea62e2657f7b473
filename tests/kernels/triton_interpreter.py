"""Triton's interpreter, made to agree with a GPU: Triton kernels run on CPU tensors.

As it comes (3.6 to 3.9), it computes on the bit patterns of bfloat16, truncates casts to it, gets casts to float8 and
its NaN wrong, takes scalar comparisons for integers, and knows neither inline assembly nor programmatic dependent
launch. `switch_on` repairs these. What is
left: programs run one after another, so one that waits for another hangs; a custom combine function of tl.reduce takes
a Python call an element; of equal maxima tl.argmax gives the first, always.

Triton reads TRITON_INTERPRET where @triton.jit stands, so `switch_on` must run before a kernel module is imported.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

VARIABLE = "TRITON_INTERPRET"

# Kernel tests run in the interpreter where there is no GPU, else on the GPU: Triton does one or the other in a process.
TRITON_DEVICES = [
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="host: with a GPU Triton does not interpret"),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]

Array = npt.NDArray[Any]


def switch_on() -> None:
    """Interpret Triton kernels from now on, unless there is a GPU to run them; a second call changes nothing."""
    if VARIABLE in os.environ or torch.cuda.is_available():
        return
    os.environ[VARIABLE] = "1"
    _install()


def is_on() -> bool:
    """Triton kernels take CPU tensors in this process."""
    return os.environ.get(VARIABLE) == "1"


def _flushed(x: Array) -> Array:
    """Denormals become zero of the same sign, as .ftz has it."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


# What a snippet computes, by its first word or its whole text: an array, or a tuple of them for several results. All
# rounded correctly, where hardware's approximations differ in the last bits.
INLINE_ASM: dict[str, Callable[..., Array | tuple[Array, ...]]] = {
    "rcp.approx.ftz.f32": lambda x: np.float32(1) / _flushed(x),
    "ex2.approx.ftz.f32": lambda x: np.exp2(_flushed(x)),
    "lg2.approx.ftz.f32": lambda x: np.log2(_flushed(x)),
    "rsqrt.approx.ftz.f32": lambda x: np.float32(1) / np.sqrt(_flushed(x)),
    "tanh.approx.f32": np.tanh,
}


def _install() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    plain = {
        name: getattr(builder, name)
        for name in ("binary_op", "unary_op", "cast_impl", "create_dot", "create_fma", "create_clampf")
    }
    plain_convert = interpreter._convert_float
    torch_dtypes = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    as_bits = {1: (np.uint8, torch.uint8), 2: (np.int16, torch.int16), 4: (np.int32, torch.int32)}
    narrow = (tl.bfloat16, tl.float8e4nv, tl.float8e5)  # kept as unsigned bit patterns
    bitwise = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)

    def convert(x: Array, source: Any, target: Any, rounding: Any) -> Array:
        """Bits of the nearest value, ties to even; float8 saturates, as the hardware's cast does."""
        source, target = source.scalar, target.scalar
        to_nearest = rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if source not in torch_dtypes or target not in torch_dtypes or not to_nearest:
            bits: Array = plain_convert(x, source, target, rounding)
            return bits
        numpy_bits, _ = as_bits[source.primitive_bitwidth // 8]
        values = torch.from_numpy(np.array(x, order="C").view(numpy_bits).reshape(-1)).view(torch_dtypes[source])
        values = values.float()
        if target in (tl.float8e4nv, tl.float8e5):
            largest = torch.finfo(torch_dtypes[target]).max
            values = values.clamp(-largest, largest)
        _, torch_bits = as_bits[target.primitive_bitwidth // 8]
        unsigned = f"u{target.primitive_bitwidth // 8}"
        rounded: Array = values.to(torch_dtypes[target]).view(torch_bits).numpy().view(unsigned).reshape(x.shape)
        return rounded

    def widened(x: Any) -> Any:
        if x.dtype.scalar not in narrow:
            return x
        return handle(convert(x.data, x.dtype, tl.float32, None).view(np.float32), tl.float32)

    def narrowed(values: Array, dtype: Any) -> Any:
        return handle(convert(values.astype(np.float32), tl.float32, dtype, None), dtype.scalar)

    def is_bf16(*operands: Any) -> bool:
        return all(x.dtype.scalar == tl.bfloat16 for x in operands)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in bitwise or not is_bf16(lhs, rhs):
            result = plain["binary_op"](self, lhs, rhs, op)
            return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result
        result = op(widened(lhs).data, widened(rhs).data)
        return handle(result, tl.int1) if result.dtype == np.bool_ else narrowed(result, lhs.dtype)

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        return narrowed(op(widened(x).data), x.dtype) if is_bf16(x) else plain["unary_op"](self, x, op)

    def cast_impl(self: Any, x: Any, target: Any) -> Any:
        scalar = target.scalar
        if x.dtype.scalar == scalar or not (x.dtype.scalar in narrow or scalar in narrow):
            return plain["cast_impl"](self, x, target)
        wide = widened(x)
        return narrowed(wide.data, scalar) if scalar in narrow else plain["cast_impl"](self, wide, target)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return plain["create_dot"](self, widened(a), widened(b), d, *options)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not is_bf16(x, y, z):
            return plain["create_fma"](self, x, y, z)
        return narrowed(widened(x).data.astype(np.float64) * widened(y).data + widened(z).data, z.dtype)

    def create_clampf(self: Any, x: Any, low: Any, high: Any, nan: Any) -> Any:
        if not is_bf16(x, low, high):
            return plain["create_clampf"](self, x, low, high, nan)
        return narrowed(plain["create_clampf"](self, widened(x), widened(low), widened(high), nan).data, x.dtype)

    def create_inline_asm(self: Any, asm: str, constraints: str, values: Any, types: Any, pure: bool, pack: int) -> Any:
        stand_in = INLINE_ASM.get(asm) or INLINE_ASM.get(asm.split()[0])
        if stand_in is None:
            raise NotImplementedError(f"no stand-in for the inline assembly {asm!r}: add it to INLINE_ASM")
        with np.errstate(all="ignore"):
            results = stand_in(*(value.data for value in values))
        listed = results if isinstance(results, tuple) else (results,)
        return _AsmCall(
            [
                handle(np.asarray(result, interpreter._get_np_dtype(kind)), kind.scalar)
                for result, kind in zip(listed, types, strict=True)
            ]
        )

    def apply_impl(self: Any, tensors: Any) -> Any:
        """Reductions and scans of bfloat16 in float32, rounded at the end."""
        dtypes = [x.dtype for x in tensors]
        wide = tuple(tl.tensor(widened(x.handle), _with_scalar(tl, x.type, widened(x.handle).dtype)) for x in tensors)
        results = self._plain_apply_impl(wide)
        listed = list(results) if isinstance(results, list | tuple) else [results]
        for idx, (result, dtype) in enumerate(zip(listed, dtypes, strict=False)):
            if dtype in narrow:
                listed[idx] = tl.tensor(narrowed(result.handle.data, dtype), _with_scalar(tl, result.type, dtype))
        return listed

    for name, replacement in (
        ("binary_op", binary_op),
        ("unary_op", unary_op),
        ("cast_impl", cast_impl),
        ("create_dot", create_dot),
        ("create_fma", create_fma),
        ("create_clampf", create_clampf),
        ("create_inline_asm", create_inline_asm),
    ):
        setattr(builder, name, replacement)
    interpreter._convert_float = convert
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind._plain_apply_impl = kind.apply_impl
        kind.apply_impl = apply_impl
    # There is no kernel before or after. Triton makes two modules of this one name.
    cuda: Any
    for cuda in (tl.extra.cuda, sys.modules["triton.language.extra.cuda"]):
        cuda.gdc_wait = cuda.gdc_launch_dependents = _do_nothing


class _AsmCall:
    """What Triton's builder returns for inline assembly: an operation and its results."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def get_result(self, idx: int) -> Any:
        return self._results[idx]


def _with_scalar(tl: Any, shaped: Any, scalar: Any) -> Any:
    return tl.block_type(scalar, shaped.shape) if shaped.is_block() else scalar


def _do_nothing() -> None:
    return None
