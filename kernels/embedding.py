"""Rows of a vocabulary shard. T tokens, V rows held, D hidden."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from dist_infer.kernels.dispatch import Library, deferred, on_triton
from dist_infer.kernels.reference.embedding import embedding as reference_embedding

EmbeddingFunction: TypeAlias = Callable[[Tensor, Tensor, int], Tensor]

LIBRARIES: tuple[Library[EmbeddingFunction], ...] = (
    Library(
        name="triton",
        function=deferred("dist_infer.kernels.triton.embedding", "embedding"),
        is_available=on_triton,
        graph_safe=True,
    ),
    Library(name="torch", function=reference_embedding),
)


def embedding(token_ids: Tensor, weight: Tensor, first_id: int, *, library: Library[EmbeddingFunction]) -> Tensor:
    """Row `id - first_id` of `weight` for each id; zeros for an id that this shard doesn't hold, so that shards add up.

    Shapes: token_ids [T] int64, weight [V, D] (V may be 0) -> [T, D].
    Errors: ValueError for other shapes or ids that are not int64.
    """
    if token_ids.dim() != 1 or token_ids.dtype != torch.int64 or weight.dim() != 2:
        raise ValueError(
            f"embedding: token_ids {token_ids.dtype} {list(token_ids.shape)} must be int64 [tokens] and weight"
            f" {list(weight.shape)} [rows, hidden]"
        )
    return library.function(token_ids, weight, first_id)
