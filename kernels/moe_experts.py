"""The experts that a rank holds, on the tokens that are routed to them.

R rows, K experts a row, E experts held, D model, I intermediate channels held.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from dist_infer.kernels.carriers import ExpertOutputs, GatedActivation
from dist_infer.kernels.dispatch import Library, Target, deferred, on_cute, on_triton
from dist_infer.kernels.reference.moe_experts import expert_outputs as reference_expert_outputs
from dist_infer.kernels.reference.moe_experts import moe_experts as reference_moe_experts

MoeExpertsFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, GatedActivation], Tensor]
ExpertOutputsFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, GatedActivation], Tensor]

F = TypeVar("F", bound=Callable[..., Tensor])

_CUTE_CHANNELS, _CUTE_EXPERTS = 64, 256
_TRITON_TACTICS = tuple({"tiles": place} for place in range(4))
_CUTE_TACTICS = tuple({"form": place} for place in range(5))


def misfit_of_cute(target: Target, channels: int = _CUTE_CHANNELS) -> str | None:
    """Why grouped products in CuTe DSL, whose stages have so many channels, can't be used there."""
    width, inner = (target.geometry.get(name, 0) for name in ("width", "intermediate"))
    if not width or not inner or width % channels or inner % channels:
        return f"takes channels in multiples of {channels}, not {width} and {inner}"
    if target.geometry.get("experts", 0) > _CUTE_EXPERTS:
        return f"takes up to {_CUTE_EXPERTS} experts, not {target.geometry['experts']}"
    return on_cute(target)


def _libraries(name: str, reference: F) -> tuple[Library[F], ...]:
    """Those that have a function of this name."""
    by_triton: Any = deferred("dist_infer.kernels.triton.moe_experts", name)
    by_cute: Any = deferred("dist_infer.kernels.cute.moe_experts", name)
    return (
        Library(
            name="triton",
            function=by_triton,
            is_available=on_triton,
            graph_safe=True,
            tactics=_TRITON_TACTICS,
        ),
        Library(
            name="cute",
            function=by_cute,
            is_available=misfit_of_cute,
            graph_safe=True,
            tactics=_CUTE_TACTICS,
        ),
        Library(name="torch", function=reference),
    )


LIBRARIES: tuple[Library[MoeExpertsFunction], ...] = _libraries("moe_experts", reference_moe_experts)
OUTPUTS_LIBRARIES: tuple[Library[ExpertOutputsFunction], ...] = _libraries("expert_outputs", reference_expert_outputs)


def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    activation: GatedActivation = GatedActivation.SILU,
    library: Library[MoeExpertsFunction],
) -> Tensor:
    """The sum over k of weights[r, k] * down(silu(gate(x[r])) * up(x[r])) of expert expert_ids[r, k].

    The activation may be another one.

    An id of -1 is no expert of this rank: nothing is computed for it, and whatever stands in its row or weight, NaN
    included, shows nowhere. A row without experts gives zeros. Each expert's output is rounded to the dtype of `x`;
    the sum runs over k upwards in float32 (float64 for float64) and is rounded once.

    Shapes: x [R, D], expert_ids [R, K] int32 or int64, weights [R, K] float32 or float64, w_gate_up [E, 2 * I, D], the
        gates first, w_down [E, D, I] -> [R, D]; any of R, E, I may be 0.
    Errors: ValueError for shapes or dtypes that don't fit, and, where the library reads ids, for an id that is neither
        -1 nor one of the E.
    Source: Shazeer et al., Outrageously Large Neural Networks (2017).
    """
    _check("moe_experts", x, expert_ids, weights, w_gate_up, w_down)
    return library.function(x, expert_ids, weights, w_gate_up, w_down, activation)


def expert_outputs(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    activation: GatedActivation = GatedActivation.SILU,
    library: Library[ExpertOutputsFunction],
) -> ExpertOutputs:
    """What moe_experts adds up, for kernels/moe_finalize or an all-reduce to do it: then the bytes are the same.

    Shapes and errors: as moe_experts; ids int32.
    """
    _check("expert_outputs", x, expert_ids, weights, w_gate_up, w_down)
    outputs = library.function(x, expert_ids, w_gate_up, w_down, activation)
    return ExpertOutputs(outputs=outputs, ids=expert_ids, weights=weights, num_experts=len(w_down))


def _check(name: str, x: Tensor, expert_ids: Tensor, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> None:
    num_rows, width = x.shape if x.dim() == 2 else (-1, -1)
    if num_rows < 0 or expert_ids.dim() != 2 or len(expert_ids) != num_rows or weights.shape != expert_ids.shape:
        raise ValueError(
            f"{name}: x {list(x.shape)}, ids {list(expert_ids.shape)} and weights {list(weights.shape)} are not"
            " [R, D], [R, K] and [R, K]"
        )
    num_experts, inner = w_down.shape[0], w_down.shape[-1]
    if w_gate_up.shape != (num_experts, 2 * inner, width) or w_down.shape != (num_experts, width, inner):
        raise ValueError(
            f"{name}: weights {list(w_gate_up.shape)} and {list(w_down.shape)} are not [E, 2 I, {width}] and"
            f" [E, {width}, I]"
        )
    if not x.dtype == w_gate_up.dtype == w_down.dtype:
        raise ValueError(f"{name}: x {x.dtype} meets weights {w_gate_up.dtype} and {w_down.dtype}")
    if expert_ids.dtype not in (torch.int32, torch.int64) or weights.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: ids {expert_ids.dtype} or weights {weights.dtype} are of another kind")
