"""The choice of one token of each row among its likeliest: min-p, top-k and top-p. L rows, C columns.

Every row has its own options, read on the device, and is chosen as if it were alone. So one call serves a whole batch,
of which the host knows nothing but its size. Only whole rows can be filtered: top-p and min-p are shares of a whole.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, Target, deferred, on_triton
from dist_infer.kernels.reference.sample_filtered import sample_filtered as reference_sample_filtered

SampleFilteredFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def _is_available(target: Target) -> str | None:
    reason = on_triton(target)
    if reason is None and target.dtype.itemsize != 2:
        reason = f"counts the values of 16-bit logits, not of {str(target.dtype).removeprefix('torch.')}"
    return reason


LIBRARIES: tuple[Library[SampleFilteredFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.sample_filtered", "sample_filtered"),
        is_available=_is_available,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_sample_filtered, graph_safe=True),
)


def sample_filtered(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
    *,
    library: Library[SampleFilteredFunction],
) -> Tensor:
    """The best column of each row by logit + temperature * noise (see kernels/sample) among those that are in.

    The columns of a row stand in the order of their logits, the smaller column first where these are equal; NaN counts
    as -inf. Relative to the first one, a column has the weight exp((logit - first) / temperature). In are
        min-p: those of at least the weight min_p,
        top-k: of these the first top_k, 0 for all,
        top-p: of these the first ones up to the share top_p of their weights, 1 for all: those before which less lies.
    The first column is always in. A row of temperature 0 gives its first column.

    Weights are added as multiples of 2^-45, rounded to nearest, so that sums depend on no order. A sum is within 2^-46
    a column of the exact one, and a column whose place is nearer than that to the share top_p may fall on either side.

    Shapes: logits [L, C], 0 < C <= 2^18; temperature, top_p, min_p [L] float64; top_k, keys [L] int64 -> [L] int64.
    Stream: never waits for the device.
    Errors: ValueError for other shapes or dtypes.
    Source: Holtzman et al., The Curious Case of Neural Text Degeneration (2019); Nguyen et al., Turning Up the Heat:
        Min-p Sampling (2024).
    """
    if logits.dim() != 2 or not 0 < logits.shape[1] <= 2**18:
        raise ValueError(f"sample_filtered: logits {list(logits.shape)} are not [rows, 1 to 2^18 columns]")
    for name, option, dtype in (
        ("temperature", temperature, torch.float64),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float64),
        ("min_p", min_p, torch.float64),
        ("keys", keys, torch.int64),
    ):
        if option.shape != logits.shape[:1] or option.dtype != dtype:
            raise ValueError(f"sample_filtered: {name} {option.dtype} {list(option.shape)} must be {dtype} [rows]")
    return library.function(logits, temperature, top_k, top_p, min_p, keys)
