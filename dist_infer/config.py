"""Configuration, resolved once before anything starts: frozen, keyword-only, free of torch."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` "default" uses only `theta`; "llama3" and "yarn" scale low frequencies by `factor`."""

    kind: Literal["default", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    rotary_dim: int | None = None  # the first channels of a head that turn, None: all of them; the last ones in MLA
    interleaved: bool = False  # pairs of neighbours instead of halves
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0  # llama3 only, as the next
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn only, as all that follow
    beta_slow: float = 1.0
    truncate: bool = True
    angle_factor: float = 1.0  # cosine and sine are multiplied by it
    score_factor: float = 1.0  # the scale of the attention scores is multiplied by it


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention: one latent and one rotated key a token are cached, whatever the number of heads."""

    q_lora_rank: int | None  # None: queries come straight from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query head and of an expanded key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Cached channels of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Routed experts. With groups, only experts of the `num_kept_groups` best groups of a token are chosen from.

    score = scoring(logits); choice by score + bias; weight = score, divided by (sum of the chosen ones +
    `renorm_epsilon`) when `renormalise`, times `routed_scaling_factor`.
    """

    num_experts: int
    top_k: int
    expert_intermediate_size: int
    moe_layers: tuple[int, ...]  # indices, ascending; the other layers are dense
    scoring: Literal["softmax", "sigmoid"]
    renormalise: bool
    renorm_epsilon: float = 0.0
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0  # 0: no shared expert
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    has_bias: bool = False  # a bias on the choice, one an expert


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry of a decoder, as a Hugging Face config.json gives it.

    With `mla`, num_kv_heads is num_heads and head_dim that of a query. `intermediate_size` is that of dense layers.
    """

    architecture: str  # "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of what comes out of attention
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"  # RMSNorm of queries and keys: each head, or all as one
    sliding_window: int | None = None  # keys that a query sees at most, its own among them; None: all
    all_windowed: bool = True  # in every layer, not only in some
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    num_mtp_layers: int = 0  # layers behind the last one that a checkpoint may hold and that are not used
    dtype: DType = "float32"  # the checkpoint's own
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_token_ids: int | None = None  # those of the tokenizer; None: of the whole vocabulary

    @property
    def num_sampled_ids(self) -> int:
        """Ids from here on pad the vocabulary: none of them is ever sampled."""
        return min(self.vocab_size, self.num_token_ids or self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """world = dp x tp; `ep` divides world and is used by MoE layers only."""

    dp: int = 1
    tp: int = 1
    ep: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one group's scheduler. All counts, all per group."""

    max_model_len: int  # tokens of one sequence, prompt and output
    max_num_seqs: int  # sequences of one step
    max_num_tokens: int  # tokens of one step
    block_size: int  # tokens of one KV block (page)
    num_kv_blocks: int  # pages of the pool, equal on all ranks of a group
    prefix_cache: bool = True
    depth: int = 0  # steps in flight while the next is scheduled: 0 or 1
