"""RMSNorm of queries and keys before the rotation.

T tokens, N and K query and KV heads of this rank, H head dim.
"""

from collections.abc import Iterator

from torch import Tensor

from dist_infer.comm.mesh import HeadShard, split_heads
from dist_infer.comm.peer_collectives import PeerCollectives
from dist_infer.config import ModelConfig
from dist_infer.kernels import qk_norm as op
from dist_infer.kernels.carriers import QkNorm, Rotation
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
        head_dim = config.head_dim
        self._totals = (config.num_heads * head_dim, config.num_kv_heads * head_dim)
        self._held = tuple(
            range(heads.start * head_dim, heads.stop * head_dim) for heads in (shard.heads, shard.kv_heads)
        )
        self.q_weight, self.k_weight = (setup.empty(len(held)) for held in self._held)
        self._eps = config.rms_norm_eps
        self._tp = setup.tp
        self._counts_keys = _is_first_holder(config, setup)
        sizes = {"heads": len(shard.heads), "kv_heads": len(shard.kv_heads), "head_dim": head_dim}
        self._squares = setup.choose("head_squares", op.SQUARES_LIBRARIES, **sizes)
        self._finish = setup.choose("norm_rotary", op.NORM_ROTARY_LIBRARIES, **sizes)

    def __call__(self, qkv: Tensor, rotation: Rotation) -> Tensor:
        """The queries, normed and turned; normed and turned keys and the values are in the caches afterwards.

        Where the group sums through peer memory, all of it is one kernel, byte for byte the same.

        Shapes: qkv [T, N + 2 * K, H] -> [T, N, H].
        Ranks: collective over tp.
        """
        norm = QkNorm(
            q_weight=self.q_weight,
            k_weight=self.k_weight,
            num_q_channels=self._totals[0],
            num_k_channels=self._totals[1],
            eps=self._eps,
            counts_keys=(self._counts_keys,),
        )
        if isinstance(self._tp, PeerCollectives) and self._tp.reducer.takes_heads(qkv):
            return self._tp.reducer.norm_rotary(qkv, norm, rotation)
        num_kv_heads = rotation.k_cache.shape[1]
        squares = op.head_squares(qkv, num_kv_heads, counts_keys=self._counts_keys, library=self._squares)
        return op.norm_rotary(qkv, self._tp.all_reduce(squares), norm, rotation, library=self._finish)

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
