"""What the layer tests build their layers with, and a loop that fills them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.config import ModelConfig, RopeConfig
from dist_infer.layers.setup import LayerSetup
from dist_infer.layers.weights import WeightSlot

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=11,
    hidden_size=10,
    intermediate_size=7,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    attention_bias=True,
    output_bias=True,
    mlp_bias=True,
)


def setup_of(tp: Collectives, dtype: torch.dtype = torch.float64) -> LayerSetup:
    return LayerSetup(tp=tp, dtype=dtype, device=torch.device("cpu"))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fill(slots: Iterable[WeightSlot], tensors: Mapping[str, Tensor]) -> None:
    for slot in slots:
        assert tuple(tensors[slot.name].shape) == slot.shape
        slot.into.copy_(tensors[slot.name][tuple(slice(part.start, part.stop) for part in slot.take)])


def close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)
