"""Causal attention over paged keys and values: prefill, extend (a chunk with history) and decode in one op.

S sequences, T tokens, N query heads, K KV heads, H head dim, C slots of the cache, P pages of the longest sequence.

An implementation is a function that plans one step (index tensors, splits, masks) and returns what every layer then
calls with its own cache. So the work that all layers share is done once a step, before the layers run.
"""

from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.dispatch import Library, Target, deferred, on_triton
from dist_infer.kernels.phases import Attend, Plan, plan_by_phase
from dist_infer.kernels.reference.paged_attention import plan_paged_attention as reference_plan


class PlanFunction(Protocol):
    """(step, num_kv_heads, scale, window, batch_invariant) -> attend(q, k_cache, v_cache)."""

    def __call__(
        self,
        step: PagedStep,
        *,
        num_kv_heads: int,
        scale: float,
        window: int | None = None,
        batch_invariant: bool = False,
    ) -> Attend:
        """Plans a step whose sequences have been checked. Without a window it isn't given one."""
        ...


def _on_triton(target: Target) -> str | None:
    head_dim = target.geometry.get("head_dim", 0)
    return on_triton(target) if head_dim <= 256 else f"takes heads of up to 256 channels, not {head_dim}"


LIBRARIES: tuple[Library[PlanFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.paged_attention", "plan_paged_attention"),
        is_available=_on_triton,
        graph_safe=True,
    ),
    Library(name="reference", function=reference_plan),
)


def plan_paged_attention(
    step: PagedStep,
    *,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    library: Library[PlanFunction],
    generation: Library[PlanFunction] | None = None,
    batch_invariant: bool = False,
) -> Attend:
    """The attention of one step as a function (q, k_cache, v_cache) -> out.

    Sequences with one query go to the library of `generation`, if it is another one; all others to `library`.

    Query t of a sequence with q queries and kv_len keys sees keys 0 .. kv_len - q + t; its own key is among them, so
    it has been written before. With a `window` it sees the last `window` of these. Query head n reads KV head
    n // (N / K). Scores, softmax and the sum are in float32 (float64 for float64), one rounding; a library may round
    the softmax weights too, to the dtype of the values. A sequence with kv_len 0 gives zeros. What lies in pages beyond
    kv_len, or in pages of other sequences, never shows.

    With `batch_invariant` the bits of a sequence's result don't depend on the other sequences of its step.

    In a captured step all sequences have one query, and a host length is the largest that the device's will be.

    Shapes: q [T, N, H], caches [C, K, H] -> out [T, N, H], contiguous.
    Errors: ValueError when a sequence has fewer keys than queries (other than none) or more than its pages hold, and
        in the function for shapes or dtypes that don't fit.
    Source: Kwon et al., PagedAttention (2023); Ainslie et al., GQA (2023).
    """
    query_lens = np.diff(step.host_query_start)
    kv_lens = step.host_kv_lens
    if len(query_lens) != len(kv_lens) or (query_lens < 0).any():
        raise ValueError(
            f"paged_attention: query_start {step.host_query_start.tolist()} does not fit {len(kv_lens)} sequences"
        )
    if ((kv_lens != 0) & (kv_lens < query_lens)).any():
        raise ValueError(
            f"paged_attention: kv_lens {kv_lens.tolist()} are below the query lengths {query_lens.tolist()}"
        )
    capacity = step.page_table.shape[1] * step.block_size
    if (kv_lens > capacity).any():
        raise ValueError(
            f"paged_attention: kv_lens {kv_lens.tolist()} are above the {capacity} slots of the page table"
        )
    given: dict[str, Any] = {"num_kv_heads": num_kv_heads, "scale": scale, "batch_invariant": batch_invariant}
    if window is not None:
        given["window"] = window
    context: Plan = partial(library.function, **given)
    if generation is None or generation is library:
        planned = context(step)
    else:
        planned = plan_by_phase(step, context, partial(generation.function, **given))

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        if (
            k_cache.shape != v_cache.shape
            or k_cache.shape[1:] != (num_kv_heads, q.shape[2])
            or q.shape[1] % num_kv_heads
        ):
            shapes = ", ".join(str(list(x.shape)) for x in (q, k_cache, v_cache))
            raise ValueError(f"paged_attention: shapes of q, k_cache, v_cache don't fit: {shapes}")
        if not (q.dtype == k_cache.dtype == v_cache.dtype and len(q) == step.num_tokens):
            raise ValueError(
                f"paged_attention: q {q.dtype} {list(q.shape)}, cache {k_cache.dtype}, {step.num_tokens} tokens"
            )
        return planned(q, k_cache, v_cache)

    return attend
