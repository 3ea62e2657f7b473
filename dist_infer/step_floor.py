"""What a decode step has to read: the least bytes, and the time that they take on a device whose speed is known."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import torch

from dist_infer.config import ModelConfig
from dist_infer.kv_cache import block_bytes
from dist_infer.shard import Shard, ShardPlan

READ_TB_PER_S: Mapping[str, float] = MappingProxyType({"NVIDIA H200": 4.534})
"""What reading reaches at best, as measured, by the name that the driver gives the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """What a rank reads in a step: parameters once, experts as many as are hit, the KV cache of its sequences.

    Units: bytes of this rank; `expert_bytes` are those of all its routed experts.
    """

    dense_bytes: float
    expert_bytes: float
    share_of_token: float  # of the experts that one token goes to
    kv_token_bytes: float

    @classmethod
    def of(cls, plan: ShardPlan, shard: Shard) -> Self:
        """Of a loaded shard. Of the embedding's table few rows are read, so it doesn't count unless it is the head."""
        config, size = plan.config, plan.dtype.itemsize
        table = 0.0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * size / plan.mesh.tp
        experts = routed_parameters(config) * size / plan.mesh.world
        return cls(
            dense_bytes=shard.parameter_bytes - table - experts,
            expert_bytes=experts,
            share_of_token=0.0 if config.moe is None else config.moe.top_k / config.moe.num_experts,
            kv_token_bytes=block_bytes(config, plan.heads, 1, plan.cache_dtype),
        )

    def share_hit(self, num_tokens: int) -> float:
        """The share of the experts that so many evenly routed tokens are expected to hit."""
        return 1 - (1 - self.share_of_token) ** num_tokens

    def read_bytes(self, *, num_tokens: int, kv_tokens: int) -> float:
        """Of a step of `num_tokens` tokens of all ranks, and sequences of `kv_tokens` together on this one."""
        return self.dense_bytes + self.expert_bytes * self.share_hit(num_tokens) + self.kv_token_bytes * kv_tokens


def routed_parameters(config: ModelConfig) -> int:
    """Of all routed experts of all layers."""
    if config.moe is None:
        return 0
    each = 3 * config.hidden_size * config.moe.expert_intermediate_size
    return len(config.moe.moe_layers) * config.moe.num_experts * each


def read_speed(device: torch.device) -> float | None:
    """Terabytes a second that the device reads at best; None where nobody has measured it."""
    return READ_TB_PER_S.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
