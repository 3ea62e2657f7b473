"""Small launches of the kernels in CuTe DSL, for compute-sanitizer (see sanitize.py); they check nothing themselves.

python -m tests.kernels.cute.sanitized_launches NAME
"""

import sys
from collections.abc import Callable, Mapping

import torch

from dist_infer.kernels.carriers import GatedActivation
from dist_infer.kernels.cute import grouped_gemm
from dist_infer.kernels.cute.grouped_gemm_parts import Variant
from dist_infer.kernels.cute.moe_forms import Form
from dist_infer.kernels.triton.moe_align import align
from tests.kernels.cute import test_mla_narrow as narrow
from tests.kernels.cute.mla_cases import Case
from tests.kernels.cute.race_patterns import PATTERNS, run_pattern

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


def decodes() -> None:
    """Latent decode of 16-bit caches."""
    for lens, heads, query_len, page_size in _DECODES:
        case = Case.make(lens, heads=heads, query_len=query_len, page_size=page_size)
        space = case.workspace()
        for _ in range(2):  # the second finds the state that the first has left
            case.run(space)


def narrow_decodes() -> None:
    """Latent decode of caches of E4M3."""
    for lens, heads, query_len, page_size in _DECODES[:4]:
        q, cache, table, kv_lens = narrow.make(lens, heads, query_len, page_size)
        scale = torch.tensor([0.5], device="cuda")
        narrow.decode(q, cache, table, kv_lens, query_len=query_len, page_size=page_size, cache_scale=scale)


def grouped_products() -> None:
    """Both products of experts in 16 bits, by each kind of form."""
    for experts, rows, top_k, width, inner in _LAYERS:
        ids = torch.rand(rows, experts, device="cuda").argsort(1)[:, :top_k].int().contiguous()
        x = torch.randn(rows, width, device="cuda").bfloat16()
        up = torch.randn(experts, 2 * inner, width, device="cuda").bfloat16()
        down = torch.randn(experts, width, inner, device="cuda").bfloat16()
        pairs = align(ids, experts, 128)
        for form in _FORMS:
            first, second = (
                Variant(activation=kind, dtype=x.dtype, **form._asdict()) for kind in (GatedActivation.SILU, None)
            )
            hidden = grouped_gemm.gate_up(x, up, pairs.order, pairs.firsts, top_k, first)
            grouped_gemm.down(hidden, down, pairs.order, pairs.firsts, second)


def patterns() -> None:
    """The minimal kernels of race_patterns."""
    for name in PATTERNS:
        run_pattern(name)


LAUNCHES: Mapping[str, Callable[[], None]] = {
    "decodes": decodes,
    "narrow_decodes": narrow_decodes,
    "grouped_products": grouped_products,
    "patterns": patterns,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    LAUNCHES[sys.argv[1]]()
    torch.cuda.synchronize()
    sys.stdout.write(f"{sys.argv[1]}: all launched\n")
