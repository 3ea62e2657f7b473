"""Small launches of the kernels in CuTe DSL, for compute-sanitizer (see sanitize.py); they check nothing themselves.

python -m tests.kernels.cute.sanitized_launches NAME
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute import grouped_gemm, quantized_gemm
from dist_infer.kernels.cute.grouped_gemm_parts import Variant
from dist_infer.kernels.cute.moe_align import align
from dist_infer.kernels.cute.moe_forms import Form
from dist_infer.kernels.cute.staged_linear import staged_linear
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.kernels.staged_weight import stage_weight
from tests.kernels.cute import test_mla_narrow as narrow
from tests.kernels.cute import test_quantized_gemm as quantized_gemms
from tests.kernels.cute import test_staged_linear as staged
from tests.kernels.cute.mla_cases import Case
from tests.kernels.cute.race_patterns import PATTERNS, run_pattern
from tests.kernels.cute.ragged_pairs import COUNTS, TOP_K, normal, ragged
from tests.kernels.quantized_weights import quantized

_DECODES = (  # sequences, heads, query tokens, page: cut and whole ones, empty ones, all numbers of rows
    ([700, 3, 0, 200], 16, 1, 64),
    ([300, 40], 16, 2, 16),
    ([129, 1], 6, 1, 128),
    ([400, 0, 70], 64, 1, 64),
    ([500, 3], 128, 1, 64),
    ([130, 64], 128, 2, 16),
)
_FORMS = (
    Form((8, 16), 6, 64, 2),
    Form((8, 24, 32), 4, 64, 1),
    Form((16, 40, 64), 4, 128, 1, cluster=2),
)
_LAYERS = ((4, 9, 2, 128, 128), (3, 150, 2, 256, 320), (2, 1, 1, 128, 128))  # experts, rows, top k, model, channels
_PRODUCTS = (GatedActivation.SILU, None)  # gate and up, down
_LINEARS = ((5, 300, 1024), (1, 40, 160), (129, 300, 512))  # tokens, outputs, inputs: cut blocks and whole ones


def decodes() -> None:
    """Latent decode of 16-bit caches."""
    for lens, heads, query_len, page_size in _DECODES:
        case = Case.make(lens, heads=heads, query_len=query_len, page_size=page_size)
        space = case.workspace()
        for _ in range(2):  # the second finds the state that the first has left
            case.run(space)


def narrow_decodes() -> None:
    """Latent decode of caches of E4M3."""
    for lens, heads, query_len, page_size in _DECODES:
        q, cache, table, kv_lens = narrow.make(lens, heads, query_len, page_size)
        scale = torch.tensor([0.5], device="cuda")
        for rounded in {False, heads == 64}:
            narrow.decode(
                q,
                cache,
                table,
                kv_lens,
                query_len=query_len,
                page_size=page_size,
                cache_scale=scale,
                rounded=rounded,
            )


def grouped_products() -> None:
    """Both products of experts in 16 bits, by each kind of form: the first one puts the pairs in order itself."""
    for experts, rows, top_k, width, inner in _LAYERS:
        ids = torch.rand(rows, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
        x = torch.randn(rows, width, device="cuda").bfloat16()
        up = torch.randn(experts, 2 * inner, width, device="cuda").bfloat16()
        down = torch.randn(experts, width, inner, device="cuda").bfloat16()
        for form in _FORMS:
            orders = form is _FORMS[0]
            first, second = (
                Variant(activation=kind, dtype=x.dtype, orders=orders, **form._asdict()) for kind in _PRODUCTS
            )
            pairs = (ids.flatten(), ids.flatten()) if orders else align(ids, experts)
            hidden = grouped_gemm.gate_up(x, up, *pairs, top_k, first)
            grouped_gemm.down(hidden, down, *pairs, second)


def quantized_products(weight_format: WeightFormat) -> None:
    """Both products of experts with quantised weights: by two warpgroups, and by one that puts the pairs in order."""
    inner = quantized_gemms.INNER
    for counts, num_dead in COUNTS[:3]:
        order, firsts = ragged(counts, num_dead)
        ids = torch.randint(-1, len(counts) + 1, (len(order),), device="cuda", dtype=torch.int32)
        for num_groups, width, pairs in ((2, quantized_gemms.WIDTH, (order, firsts)), (1, 2 * inner, (ids, ids))):
            x, hidden = (
                quantized_gemms.operand(normal(rows, columns), weight_format)
                for rows, columns in ((len(order) // TOP_K, width), (len(order), inner))
            )
            up, down = (
                quantized(normal(len(counts) * rows, columns), weight_format)
                for rows, columns in ((2 * inner, width), (width, inner))
            )
            first, second = (
                replace(quantized_gemms.variant(weight_format, kind, num_groups, columns), orders=num_groups == 1)
                for kind, columns in zip(_PRODUCTS, (width, inner), strict=True)
            )
            quantized_gemm.gate_up(x, up, len(counts), *pairs, TOP_K, first)
            quantized_gemm.down(hidden, down, len(counts), *pairs, second)


def staged_products(kind: str) -> None:
    """Products with staged weights: of few tokens, and of several blocks of them."""
    for tokens, outputs, inputs in _LINEARS:
        weight = stage_weight(staged.weight_of(kind, outputs, inputs))
        x = torch.randn(tokens, inputs, device="cuda").bfloat16()
        bias = torch.randn(outputs, device="cuda").bfloat16()
        for _ in range(2):  # the second finds the flags that the first has left
            staged_linear(x, weight, bias, x.dtype)


def patterns() -> None:
    """The minimal kernels of race_patterns."""
    for name in PATTERNS:
        run_pattern(name)


LAUNCHES: Mapping[str, Callable[[], None]] = {
    "decodes": decodes,
    "narrow_decodes": narrow_decodes,
    "grouped_products": grouped_products,
    "fp8_products": partial(quantized_products, WeightFormat.FP8_BLOCK),
    "mxfp8_products": partial(quantized_products, WeightFormat.MXFP8),
    "nvfp4_products": partial(quantized_products, WeightFormat.NVFP4),
    "staged_mxfp8": partial(staged_products, "mxfp8"),
    "staged_steep": partial(staged_products, "steep"),
    "staged_nvfp4": partial(staged_products, "nvfp4"),
    "patterns": patterns,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    LAUNCHES[sys.argv[1]]()
    torch.cuda.synchronize()
    sys.stdout.write(f"{sys.argv[1]}: all launched\n")
