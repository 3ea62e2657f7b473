"""Orders of libraries as a user writes them, `OP=LIST`, and the ops that there are. Without torch: options read it.

The grammar of a list is that of `kernels.dispatch.order_libraries`. An op of attention has phases, of which each may
have an order of its own, as in `mla_attention.generation=triton`; it goes before that of the whole op.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dist_infer.errors import UsageError

# op -> (module in kernels, its tuple of libraries)
OPS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "added_linear": ("added_linear", "LIBRARIES"),
        "embedding": ("embedding", "LIBRARIES"),
        "gated_linear": ("gated_linear", "LIBRARIES"),
        "head_squares": ("qk_norm", "SQUARES_LIBRARIES"),
        "linear": ("linear", "LIBRARIES"),
        "mla_attention": ("mla_attention", "LIBRARIES"),
        "mla_rotary": ("mla_rotary", "LIBRARIES"),
        "moe_experts": ("moe_experts", "LIBRARIES"),
        "moe_finalize": ("moe_finalize", "LIBRARIES"),
        "moe_route": ("moe_route", "LIBRARIES"),
        "norm_rotary": ("qk_norm", "NORM_ROTARY_LIBRARIES"),
        "paged_attention": ("paged_attention", "LIBRARIES"),
        "quantize": ("quantize", "LIBRARIES"),
        "quantized_experts": ("quantized_experts", "LIBRARIES"),
        "rms_norm": ("rms_norm", "LIBRARIES"),
        "rms_norm_quant": ("rms_norm_quant", "LIBRARIES"),
        "rotary": ("rotary", "LIBRARIES"),
        "rotary_angles": ("rotary_angles", "LIBRARIES"),
        "router_gemm": ("router_gemm", "LIBRARIES"),
        "sample": ("sample", "LIBRARIES"),
        "sample_filtered": ("sample_filtered", "LIBRARIES"),
        "scaled_linear": ("scaled_linear", "LIBRARIES"),
        "silu_mul": ("silu_mul", "LIBRARIES"),
        "top_k": ("top_k", "LIBRARIES"),
    }
)
PHASED_OPS = ("mla_attention", "paged_attention")
PHASES = ("context", "generation")
# Their results are copies on several ranks, or their sizes are the same on all: so they run on one library everywhere.
SAME_ON_ALL_RANKS = (
    "mla_attention.context",
    "mla_attention.generation",
    "mla_rotary",
    "moe_route",
    "paged_attention.context",
    "paged_attention.generation",
    "rms_norm",
    "rotary_angles",
    "router_gemm",
    "sample",
    "sample_filtered",
    "top_k",
)
NAMES = (*OPS, *(f"{op}.{phase}" for op in PHASED_OPS for phase in PHASES))


def parse_orders(texts: Sequence[str]) -> Mapping[str, str]:
    """Order by op, or op and phase.

    Errors: UsageError for what is no OP=LIST, for an op that there is not, and for one that has two orders.
    """
    orders: dict[str, str] = {}
    for text in texts:
        name, equals, order = (part.strip() for part in text.partition("="))
        if not equals or not order.strip(" ,"):
            raise UsageError(f"--kernels {text!r}: it must be OP=LIST, for example rms_norm=torch or linear=-triton")
        if name not in NAMES:
            raise UsageError(f"--kernels {text!r}: there is no op {name!r}, choose from {', '.join(NAMES)}")
        if name in orders:
            raise UsageError(f"--kernels gives {name} twice, {orders[name]!r} and {order!r}: give one of them")
        orders[name] = order
    return MappingProxyType(orders)


def order_of(orders: Mapping[str, str], op: str, phase: str | None = None) -> str:
    """The user's order, "" where there is none."""
    whole = orders.get(op, "")
    return whole if phase is None else orders.get(f"{op}.{phase}", whole)
