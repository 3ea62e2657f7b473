"""The choice of the experts of each token. T tokens, E experts, K experts a token.

The methods of the known models, as fields of RoutingMethod:
    DeepSeek-V3   sigmoid, with bias; groups by top2_sum; renormalised with 1e-20; scaled
    DeepSeek-V2   softmax; plain, or groups by max (group_limited_greedy); scaled, not renormalised
    Qwen3-MoE     softmax over all experts; renormalised if the model says so
    Mixtral       softmax over all experts; renormalised
    MiniMax-M2    sigmoid, with bias, no groups; renormalised
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.carriers import RoutingMethod
from dist_infer.kernels.dispatch import Library, Target, deferred, on_triton
from dist_infer.kernels.reference.moe_route import moe_route as reference_moe_route

MoeRouteFunction: TypeAlias = Callable[
    [Tensor, Tensor | None, RoutingMethod, Tensor | None, range | None], tuple[Tensor, Tensor]
]

_MAX_UNROLLED = 32  # choices that the Triton kernel makes one after another


def _triton_takes(target: Target) -> str | None:
    top_k = target.geometry.get("top_k", 1)
    return on_triton(target) or (f"chooses {top_k} experts, above {_MAX_UNROLLED}" if top_k > _MAX_UNROLLED else None)


LIBRARIES: tuple[Library[MoeRouteFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.moe_route", "moe_route"),
        is_available=_triton_takes,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_moe_route),
)

_WIDE = (torch.float32, torch.float64)


def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    method: RoutingMethod,
    num_real: Tensor | None = None,
    *,
    held: range | None = None,
    library: Library[MoeRouteFunction],
) -> tuple[Tensor, Tensor]:
    """(expert ids, weights) of each token, the best choice first; of equal choices the smaller id comes first.

    Scores are softmax or sigmoid of the logits, in their dtype. The choice is by score + bias, the weights are the
    scores alone. NaN is chosen last; ids are always K different experts. `num_real` tells how many rows are tokens: the
    rows behind them are padding, whatever they hold, and get ids -1 and weights 0. It is read on the device.

    With `held` ids count the experts held, from the first one on; -1 is any other. Weights are as without.

    Shapes: logits [T, E], bias [E], both float32 or float64, num_real [1] int32 -> [T, K] int32, [T, K] of the logits'
        dtype.
    Errors: ValueError for shapes, dtypes or numbers that don't fit. Narrower logits or biases are refused: a bias that
        was rounded to bfloat16 chooses other experts, and no later cast repairs it.
    Source: DeepSeek-V2 (2024), DeepSeek-V3 (2024), Mixtral (2024), Qwen3 (2025), MiniMax-M2 (2025) as in transformers.
    """
    if logits.dim() != 2 or logits.dtype not in _WIDE:
        raise ValueError(f"moe_route: logits {logits.dtype} {list(logits.shape)} are not float32 or float64 [T, E]")
    if bias is not None and (bias.shape != logits.shape[1:] or bias.dtype not in _WIDE):
        raise ValueError(
            f"moe_route: bias {bias.dtype} {list(bias.shape)} is not float32 or float64 [{logits.shape[1]}]"
        )
    if num_real is not None and (num_real.shape != (1,) or num_real.dtype != torch.int32):
        raise ValueError(f"moe_route: num_real {num_real.dtype} {list(num_real.shape)} is not int32 [1]")
    method.check(logits.shape[1])
    if held is not None and not (held.step == 1 and 0 <= held.start <= held.stop <= logits.shape[1]):
        raise ValueError(f"moe_route: {held} are not experts of {logits.shape[1]}")
    return library.function(logits, bias, method, num_real, held)
