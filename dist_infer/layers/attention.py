"""Grouped-query attention with rotary positions over the paged cache.

T tokens, D hidden, N and K query and KV heads of this rank, H head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dist_infer.comm.mesh import split_heads
from dist_infer.config import ModelConfig
from dist_infer.kernels import paged_attention as attention_op
from dist_infer.kernels import rotary as rotary_op
from dist_infer.kernels.carriers import Fp8Tensor, PagedStep, Rotation
from dist_infer.kernels.phases import Attend
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.linear import ColumnParallelLinear, OutputRows, RowParallelLinear
from dist_infer.layers.qk_norm import HeadNorm, ProjectionNorm, make_qk_norm
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's cache on this rank: keys and values by flat slot, each [slots, K, H]."""

    k: Tensor
    v: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is cached."""
        return self.k, self.v


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """What all attention layers of a step share."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    attend: Attend


class AttentionPlanner:
    """Plans the attention of a step once for all layers of a model."""

    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        shard = split_heads(config.num_heads, config.num_kv_heads, setup.tp.size, setup.tp.rank)
        self._num_kv_heads = len(shard.kv_heads)
        self._scale = config.head_dim**-0.5 * config.rope.score_factor
        self._window = config.sliding_window
        self._batch_invariant = setup.batch_invariant
        self._libraries = setup.choose_phases(
            "paged_attention",
            attention_op.LIBRARIES,
            sizes={"seqs": 1},
            heads=len(shard.heads),
            kv_heads=len(shard.kv_heads),
            head_dim=config.head_dim,
            window=self._window or 0,
        )

    def __call__(self, step: PagedStep) -> Attend:
        """(q, k_cache, v_cache) -> out for this step.

        Ranks: local.
        """
        context, generation = self._libraries.pick_both(step)
        return attention_op.plan_paged_attention(
            step,
            num_kv_heads=self._num_kv_heads,
            scale=self._scale,
            window=self._window,
            library=context,
            generation=generation,
            batch_invariant=self._batch_invariant,
        )


class Attention:
    """Whole query heads of one group size on each rank; a KV head that several ranks need is held by each of them."""

    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        shard = split_heads(config.num_heads, config.num_kv_heads, setup.tp.size, setup.tp.rank)
        self._head_dim = config.head_dim
        self._num_qkv_heads = len(shard.heads) + 2 * len(shard.kv_heads)
        query = OutputRows("q_proj", config.num_heads * config.head_dim, _channels(shard.heads, config.head_dim))
        kv_total, kv_held = config.num_kv_heads * config.head_dim, _channels(shard.kv_heads, config.head_dim)
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (query, OutputRows("k_proj", kv_total, kv_held), OutputRows("v_proj", kv_total, kv_held)),
            bias=config.attention_bias,
            setup=setup,
        )
        self.output = RowParallelLinear(
            query.total, query.held, config.hidden_size, bias=config.output_bias, setup=setup
        )
        self.qk_norm = make_qk_norm(config, shard, setup)
        self._interleaved = config.rope.interleaved
        self._rotary = setup.choose("rotary", rotary_op.LIBRARIES, head_dim=config.head_dim)

    @property
    def input_format(self) -> QuantFormat | None:
        """What `hidden` is quantised to; None: it is taken as it is."""
        return self.qkv.input_format

    def __call__(self, hidden: Tensor | Fp8Tensor, step: AttentionStep, kv: KVLayer) -> Tensor:
        """This rank's part of the attention output, whose sum over the group is the whole.

        This step's keys and values are in `kv` afterwards. `hidden` may be quantised already.

        Shapes: hidden [T, D] -> [T, D].
        Ranks: local, but for a QK norm over the whole projection: collective over tp.
        """
        qkv = self.qkv(hidden).view(hidden.shape[0], self._num_qkv_heads, self._head_dim)
        return self.output(step.attend(self._rotated(qkv, step, kv), kv.k, kv.v).flatten(1))

    def _rotated(self, qkv: Tensor, step: AttentionStep, kv: KVLayer) -> Tensor:
        """The queries, normed where the model norms them; keys and values are in `kv` afterwards."""
        if isinstance(self.qk_norm, ProjectionNorm):
            rotation = Rotation(
                cos=step.cos,
                sin=step.sin,
                slots=step.slots,
                k_cache=kv.k,
                v_cache=kv.v,
                interleaved=self._interleaved,
            )
            return self.qk_norm(qkv, rotation)
        by_head = self.qk_norm if isinstance(self.qk_norm, HeadNorm) else None
        return rotary_op.rotary(
            qkv,
            step.cos,
            step.sin,
            step.slots,
            kv.k,
            kv.v,
            interleaved=self._interleaved,
            q_weight=by_head.q_weight if by_head else None,
            k_weight=by_head.k_weight if by_head else None,
            eps=by_head.eps if by_head else 0.0,
            library=self._rotary,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """`q_proj`, `k_proj`, `v_proj`, `o_proj`, and `q_norm` and `k_norm` where there are any, under `prefix`."""
        yield from self.qkv.weight_slots(prefix)
        yield from self.output.weight_slots(f"{prefix}o_proj.")
        if self.qk_norm is not None:
            yield from self.qk_norm.weight_slots(prefix)


def _channels(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
