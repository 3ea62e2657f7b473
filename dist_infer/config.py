"""Configuration, resolved once before anything starts: frozen, keyword-only, free of torch."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` "default" uses only `theta`; "llama3" scales low frequencies by `factor`."""

    kind: Literal["default", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry of a dense decoder, as a Hugging Face config.json gives it."""

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
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: DType = "float32"  # the checkpoint's own
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


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
