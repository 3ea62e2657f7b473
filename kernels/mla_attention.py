"""Causal latent attention over a paged cache: prefill, extend (a chunk with history) and decode in one op.

Every token has one cached row: its normed latent, then the rotated key that all heads share. Keys and values of a head
are made of the latent by its part of kv_b. A long chunk makes them once for its whole past (expands); a decode folds
kv_b into its query and into its result instead (absorbs), and reads each cached row once for all heads.

S sequences, T tokens, N heads, L latent, R rotated, P plain and V value channels, C slots of the cache.
"""

from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dist_infer.kernels import quantize as quantize_op
from dist_infer.kernels.carriers import PagedStep, QuantizedTensor
from dist_infer.kernels.dispatch import Library, Phase, Sizes, Target, deferred, on_cute, on_triton
from dist_infer.kernels.phases import Attend, Plan, num_seqs_by_phase, plan_by_phase
from dist_infer.kernels.quantize import INPUT_DTYPES, QuantizeFunction
from dist_infer.kernels.reference.mla_attention import plan_mla_attention as reference_plan

_CUTE_PAGES = (16, 32, 64, 128)
_CUTE_TACTICS = tuple({"num_workers": count} for count in (8, 16, 32, 64))


class PlanFunction(Protocol):
    """(step, kv_lora_rank, scale, batch_invariant) -> attend(q, cache, kv_b, cache_scale, quantized).

    With `quantized` that is filled, and what attend gives is anything.
    """

    def __call__(self, step: PagedStep, *, kv_lora_rank: int, scale: float, batch_invariant: bool = False) -> Attend:
        """Plans a step whose sequences have been checked."""
        ...


def _on_latents_of_deepseek(target: Target) -> str | None:
    geometry = target.geometry
    sizes = geometry.get("kv_lora_rank"), geometry.get("rope_dim")
    if sizes != (512, 64):
        return f"takes latents of 512 and rotated keys of 64, not {sizes[0]} and {sizes[1]}"
    if geometry.get("batch_invariant"):
        return "cuts sequences by the batch"
    if geometry.get("cache_bytes") == 1 and target.dtype != torch.bfloat16:
        return f"takes a cache of E4M3 with bfloat16, not {target.dtype}"
    if geometry.get("heads", 0) > 128:
        return f"takes up to 128 heads, not {geometry['heads']}"
    return on_cute(target)


def _on_latents_up_to_512(target: Target) -> str | None:
    latent_dim = target.geometry.get("kv_lora_rank", 0)
    if target.geometry.get("batch_invariant") and target.dtype == torch.float32:
        return "its products with kv_b in float32 depend on the batch"
    return on_triton(target) if latent_dim <= 512 else f"takes latents of up to 512, not {latent_dim}"


def _on_pages_of_cute(sizes: Sizes) -> str | None:
    block_size = sizes.get("block_size", _CUTE_PAGES[0])
    return None if block_size in _CUTE_PAGES else f"takes pages of {_CUTE_PAGES}, not {block_size}"


LIBRARIES: tuple[Library[PlanFunction], ...] = (
    Library(
        name="cute",
        function=deferred("dist_infer.kernels.cute.mla_attention", "plan_mla_attention"),
        is_available=_on_latents_of_deepseek,
        supports=_on_pages_of_cute,
        graph_safe=True,
        phases=(Phase.GENERATION,),
        tactics=_CUTE_TACTICS,
    ),
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.mla_attention", "plan_mla_attention"),
        is_available=_on_latents_up_to_512,
        graph_safe=True,
    ),
    Library(name="reference", function=reference_plan),
)


def plan_mla_attention(
    step: PagedStep,
    *,
    kv_lora_rank: int,
    scale: float,
    library: Library[PlanFunction],
    generation: Library[PlanFunction] | None = None,
    batch_invariant: bool = False,
) -> Attend:
    """The attention of one step as a function (q, cache, kv_b, cache_scale=None, quantized=None) -> out.

    Sequences with one query go to the library of `generation`, if it is another one; all others to `library`.

    Query t of a sequence with q queries and kv_len keys sees keys 0 .. kv_len - q + t, whatever part of them was
    written by earlier steps; its own key is among them. key of head n = [kv_b[n, :P] latent, rotated], value =
    kv_b[n, P:] latent. Products, softmax and sums are in float32 (float64 for float64), one rounding; a library may
    round what goes from one product into the next: keys, values, folded queries, softmax weights, attended latents. A
    sequence with kv_len 0 gives zeros. What lies in pages beyond kv_len, or in pages of other sequences, never shows.

    With a `cache_scale` the cache is E4M3 and its values are e4m3 * cache_scale. All products are those of a cache in
    the dtype of q, to which E4M3 widens exactly: nothing else is rounded, but that a library may round
    e4m3 * cache_scale to the dtype of q. It may multiply E4M3 itself too: queries are exact then but for what is below
    2^-17 of a row's largest number, and sums of a score's products have 13 bits or more.

    `attend` takes one argument more, `quantized`: the carrier of another format, which it fills with what `quantize`
    makes of the rounded rows, all heads side by side; the result is then anything.

    With `batch_invariant` the bits of a sequence's result don't depend on the other sequences of its step.

    In a captured step all sequences have one query, and a host length is the largest that the device's will be.

    Shapes: q [T, N, P + R], cache [C, L + R], kv_b [N, P + V, L], cache_scale [1] float32, quantized (T, N * V)
        -> [T, N, V], contiguous.
    Errors: ValueError when a sequence has fewer keys than queries (other than none) or more than its pages hold, and
        in the function for shapes or dtypes that don't fit.
    Source: DeepSeek-AI, DeepSeek-V2 (2024).
    """
    query_lens = np.diff(step.host_query_start)
    kv_lens = step.host_kv_lens
    if len(query_lens) != len(kv_lens) or (query_lens < 0).any():
        raise ValueError(
            f"mla_attention: query_start {step.host_query_start.tolist()} does not fit {len(kv_lens)} sequences"
        )
    if ((kv_lens != 0) & (kv_lens < query_lens)).any():
        raise ValueError(f"mla_attention: kv_lens {kv_lens.tolist()} are below the query lengths {query_lens.tolist()}")
    capacity = step.page_table.shape[1] * step.block_size
    if (kv_lens > capacity).any():
        raise ValueError(f"mla_attention: kv_lens {kv_lens.tolist()} are above the {capacity} slots of the page table")
    given: dict[str, Any] = {"kv_lora_rank": kv_lora_rank, "scale": scale, "batch_invariant": batch_invariant}
    context: Plan = partial(library.function, **given)
    is_mixed = False
    if generation is None or generation is library:
        planned = context(step)
    else:
        planned = plan_by_phase(step, context, partial(generation.function, **given))
        is_mixed = all(num_seqs_by_phase(step))
    quantize = _quantize_function(library)

    def attend(
        q: Tensor,
        cache: Tensor,
        kv_b: Tensor,
        cache_scale: Tensor | None = None,
        quantized: QuantizedTensor | None = None,
    ) -> Tensor:
        cache_dtype = q.dtype if cache_scale is None else torch.float8_e4m3fn
        plain_dim = q.shape[2] - (cache.shape[1] - kv_lora_rank)
        fits = (
            len(q) == step.num_tokens
            and cache.shape[1] > kv_lora_rank == kv_b.shape[2]
            and q.shape[1] == kv_b.shape[0]
            and 0 <= plain_dim < kv_b.shape[1]
            and q.dtype == kv_b.dtype
            and cache.dtype == cache_dtype
        )
        if not fits:
            found = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (q, cache, kv_b))
            raise ValueError(
                f"mla_attention: q, cache, kv_b don't fit a latent of {kv_lora_rank} and {step.num_tokens} tokens:"
                f" {found}"
            )
        if quantized is None:
            return planned(q, cache, kv_b, cache_scale)
        if quantized.shape != (len(q), len(kv_b) * (kv_b.shape[1] - plain_dim)) or q.dtype not in INPUT_DTYPES:
            raise ValueError(f"mla_attention: {q.dtype} can't fill a quantised {list(quantized.shape)}")
        if not is_mixed:
            return planned(q, cache, kv_b, cache_scale, quantized)
        out = planned(q, cache, kv_b, cache_scale)
        quantize(out.flatten(1), quantized)
        return out

    return attend


def _quantize_function(library: Library[PlanFunction]) -> QuantizeFunction:
    """What quantises where this library computes."""
    name = "torch" if library.name == "reference" else "triton"
    return next(library.function for library in quantize_op.LIBRARIES if library.name == name)
