"""Multi-head latent attention over the paged latent cache.

T tokens, D hidden, N heads of this rank, L latent, P plain, R rotated and V value channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dist_infer.comm.mesh import split_range
from dist_infer.config import MlaConfig, ModelConfig
from dist_infer.errors import UsageError
from dist_infer.kernels import mla_attention as attention_op
from dist_infer.kernels import mla_rotary as rotary_op
from dist_infer.kernels.carriers import Fp8Tensor, PagedStep
from dist_infer.kernels.phases import Attend
from dist_infer.kernels.quantize import QuantFormat
from dist_infer.layers.attention import AttentionStep
from dist_infer.layers.linear import ColumnParallelLinear, OutputRows, RowParallelLinear
from dist_infer.layers.norm import RmsNorm
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """One layer's cache on this rank: the normed latent and the rotated key by flat slot, [slots, L + R].

    With a `scale` [1] they are E4M3, and stand for e4m3 * scale.
    """

    latent: Tensor
    scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is cached."""
        return (self.latent,)


class MlaPlanner:
    """Plans the attention of a step once for all layers of a model."""

    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        mla = latent_geometry(config)
        self._kv_lora_rank = mla.kv_lora_rank
        self._scale = mla.qk_head_dim**-0.5 * config.rope.score_factor
        self._libraries = setup.choose_phases(
            "mla_attention",
            attention_op.LIBRARIES,
            sizes={"seqs": 1},
            heads=-(-config.num_heads // setup.tp.size),  # of the first rank: all ranks choose alike
            kv_lora_rank=mla.kv_lora_rank,
            rope_dim=mla.qk_rope_head_dim,
            cache_bytes=setup.cache_dtype.itemsize,
            batch_invariant=int(setup.batch_invariant),
        )
        self._batch_invariant = setup.batch_invariant

    def __call__(self, step: PagedStep) -> Attend:
        """(q, latent cache, kv_b, scale of the cache) -> out for this step.

        Ranks: local.
        """
        context, generation = self._libraries.pick_both(step)
        return attention_op.plan_mla_attention(
            step,
            kv_lora_rank=self._kv_lora_rank,
            scale=self._scale,
            library=context,
            generation=generation,
            batch_invariant=self._batch_invariant,
        )


class MlaAttention:
    """Heads are cut over the group; what makes the latents is replicated, and so is their cache."""

    def __init__(self, config: ModelConfig, setup: LayerSetup) -> None:
        mla = latent_geometry(config)
        heads = split_range(config.num_heads, setup.tp.size, setup.tp.rank)
        self._mla = mla
        self._num_heads = len(heads)
        query = _head_rows("q_proj" if mla.q_lora_rank is None else "q_b_proj", config, heads, mla.qk_head_dim)
        down = [_whole_rows("kv_a_proj_with_mqa", mla.latent_dim)]
        if mla.q_lora_rank is not None:
            down.insert(0, _whole_rows("q_a_proj", mla.q_lora_rank))
            self.query_norm = RmsNorm(mla.q_lora_rank, mla.norm_eps, setup)
        self.down = ColumnParallelLinear(config.hidden_size, down, bias=config.attention_bias, setup=setup)
        self.query = ColumnParallelLinear(mla.q_lora_rank or config.hidden_size, (query,), bias=False, setup=setup)
        self.latent_weight = setup.empty(mla.kv_lora_rank)
        expanded = _head_rows("kv_b_proj", config, heads, mla.qk_nope_head_dim + mla.v_head_dim)
        self._expanded_rows = expanded
        self.kv_b = setup.empty(len(heads), mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        value = _head_rows("o_proj", config, heads, mla.v_head_dim)
        self.output = RowParallelLinear(
            value.total, value.held, config.hidden_size, bias=config.attention_bias, setup=setup
        )
        self._interleaved = config.rope.interleaved
        self._rotary = setup.choose("mla_rotary", rotary_op.LIBRARIES, rope_dim=mla.qk_rope_head_dim)

    @property
    def input_format(self) -> QuantFormat | None:
        """What `hidden` is quantised to; None: it is taken as it is, by one of its products at least."""
        readers = (self.down, self.query) if self._mla.q_lora_rank is None else (self.down,)
        formats = {reader.input_format for reader in readers}
        return formats.pop() if len(formats) == 1 else None

    def __call__(self, hidden: Tensor | Fp8Tensor, step: AttentionStep, kv: LatentLayer) -> Tensor:
        """This rank's part of the attention output; this step's latents are in `kv` afterwards.

        `hidden` may be quantised already.

        Shapes: hidden [T, D] -> [T, D].
        Ranks: local.
        """
        mla = self._mla
        down = self.down(hidden)
        source: Tensor | Fp8Tensor
        if mla.q_lora_rank is None:
            source = hidden
        else:
            source, _ = self.query_norm(down[:, : mla.q_lora_rank])
            down = down[:, mla.q_lora_rank :]
        q = self.query(source).view(hidden.shape[0], self._num_heads, mla.qk_head_dim)
        q = rotary_op.mla_rotary(
            q,
            down[:, : mla.kv_lora_rank],
            down[:, mla.kv_lora_rank :],
            self.latent_weight,
            mla.norm_eps,
            step.cos,
            step.sin,
            step.slots,
            kv.latent,
            interleaved=self._interleaved,
            cache_scale=kv.scale,
            library=self._rotary,
        )
        return self.output(step.attend(q, kv.latent, self.kv_b, kv.scale).flatten(1))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """All under `prefix`: `q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`; then those of the latent."""
        yield from self.down.weight_slots(prefix)
        yield from self.query.weight_slots(prefix)
        if self._mla.q_lora_rank is not None:
            yield from self.query_norm.weight_slots(f"{prefix}q_a_layernorm.")
        rows, rank = self._expanded_rows, self._mla.kv_lora_rank
        yield WeightSlot(f"{prefix}kv_a_layernorm.weight", (rank,), (range(rank),), self.latent_weight)
        yield WeightSlot(
            f"{prefix}{rows.name}.weight", (rows.total, rank), (rows.held, range(rank)), self.kv_b.view(-1, rank)
        )
        yield from self.output.weight_slots(f"{prefix}o_proj.")


def latent_geometry(config: ModelConfig) -> MlaConfig:
    """Errors: UsageError for a model without latent attention."""
    if config.mla is None:
        raise UsageError(f"{config.architecture} has no latent attention")
    return config.mla


def _head_rows(name: str, config: ModelConfig, heads: range, head_dim: int) -> OutputRows:
    return OutputRows(name, config.num_heads * head_dim, range(heads.start * head_dim, heads.stop * head_dim))


def _whole_rows(name: str, total: int) -> OutputRows:
    return OutputRows(name, total, range(total))
