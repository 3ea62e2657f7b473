"""RMSNorm of queries and keys before the rotation.

T tokens, N and K query and KV heads of this rank, H head dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dist_infer.comm.mesh import HeadShard, split_heads
from dist_infer.config import ModelConfig
from dist_infer.kernels import sharded_rms_norm as op
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot


class HeadNorm:
    """Each head on its own, all with one weight, replicated on all ranks. The op that rotates norms before it does."""

    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        self.q_weight = setup.empty(config.head_dim)
        self.k_weight = setup.empty(config.head_dim)
        self.eps = config.rms_norm_eps

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`q_norm` and `k_norm` under `prefix`."""
        for name, weight in (("q_norm", self.q_weight), ("k_norm", self.k_weight)):
            yield WeightSlot(f"{prefix}{name}.weight", (len(weight),), (range(len(weight)),), weight)


class ProjectionNorm:
    """All heads of a token as one: the sums of squares are added over the group, each KV head counted once."""

    def __init__(self, config: ModelConfig, shard: HeadShard, setup: LayerSetup) -> None:
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        self._totals = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
        self._held = tuple(
            range(heads.start * config.head_dim, heads.stop * config.head_dim)
            for heads in (shard.heads, shard.kv_heads)
        )
        self.q_weight, self.k_weight = (setup.empty(len(held)) for held in self._held)
        self._tp = setup.tp
        self._counts_keys = _is_first_holder(config, setup)
        self._square_sum = setup.choose("square_sum", op.SQUARE_SUM_LIBRARIES, channels=len(self._held[0]))
        self._scale_rows = setup.choose("scale_rows", op.SCALE_ROWS_LIBRARIES, channels=len(self._held[0]))

    def __call__(self, qkv: Tensor) -> Tensor:
        """Queries and keys normed, values as they are.

        Shapes: [T, N + 2 * K, H] -> the same.
        Ranks: collective over tp.
        """
        flat = qkv.flatten(1)
        num_query, num_key = len(self._held[0]), len(self._held[1])
        q, k, v = flat.split_with_sizes((num_query, num_key, num_key), 1)
        q_squares = op.square_sum(q, library=self._square_sum)
        k_squares = op.square_sum(k, library=self._square_sum)
        if not self._counts_keys:
            k_squares = torch.zeros_like(k_squares)
        squares = self._tp.all_reduce(torch.stack([q_squares, k_squares]))
        normed = [
            op.scale_rows(x, squares[idx], self._totals[idx], weight, self._eps, library=self._scale_rows)
            for idx, (x, weight) in enumerate(((q, self.q_weight), (k, self.k_weight)))
        ]
        return torch.cat([*normed, v], 1).view(qkv.shape)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`q_norm` and `k_norm` under `prefix`."""
        yield WeightSlot(f"{prefix}q_norm.weight", (self._totals[0],), (self._held[0],), self.q_weight)
        yield WeightSlot(f"{prefix}k_norm.weight", (self._totals[1],), (self._held[1],), self.k_weight)


def _is_first_holder(config: ModelConfig, setup: LayerSetup) -> bool:
    """Whether no rank before this one holds this rank's KV heads: ranks of one KV head all hold it."""
    tp = setup.tp
    if tp.rank == 0:
        return True
    own, before = (split_heads(config.num_heads, config.num_kv_heads, tp.size, rank) for rank in (tp.rank, tp.rank - 1))
    return own.kv_heads != before.kv_heads


def make_qk_norm(config: ModelConfig, shard: HeadShard, setup: LayerSetup) -> HeadNorm | ProjectionNorm | None:
    """The norm that a model has, None where it has none."""
    if config.qk_norm == "none":
        return None
    if config.qk_norm == "head":
        return HeadNorm(config, setup)
    return ProjectionNorm(config, shard, setup)
