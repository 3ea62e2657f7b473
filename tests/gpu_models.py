"""Checkpoints of all families with the shapes of heads that real ones have, and runners of them on a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.comm.collectives import Collectives, SingleCollectives
from dist_infer.comm.mesh import HeadShard, Mesh, split_heads
from dist_infer.config import SchedulerConfig
from dist_infer.graphs import CudaCapture
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.models.decoder import Decoder
from dist_infer.shard import load_shard, plan_shard
from dist_infer.step_runner import StepRunner, build_step_runner
from tests.tiny_families import make_tiny
from tests.tiny_models import make_tiny_llama

MODELS = Path(__file__).parent / "data" / "models"  # config.json of real ones
_GROUPED: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
)
_LATENT: Mapping[str, Any] = MappingProxyType(
    {"hidden_size": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
_EXPERTS: Mapping[str, Any] = MappingProxyType({"intermediate_size": 192, "moe_intermediate_size": 64})
REAL_SHAPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {},
        "mistral": {**_GROUPED, "intermediate_size": 192, "sliding_window": 24},
        "qwen2": {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 192},
        "qwen3": {**_GROUPED, "intermediate_size": 192},
        "qwen3-moe": {**_GROUPED, **_EXPERTS, "num_experts": 16, "num_experts_per_tok": 4},
        "mixtral": {**_GROUPED, "intermediate_size": 64, "num_local_experts": 8},
        "minimax-m2": {**_GROUPED, "intermediate_size": 64, "num_local_experts": 16, "num_experts_per_tok": 4},
        "deepseek-v2-lite": {**_LATENT, **_EXPERTS, "n_routed_experts": 8, "num_experts_per_tok": 3},
        "deepseek-v2": {**_LATENT, **_EXPERTS, "q_lora_rank": 96, "n_routed_experts": 12},
        "deepseek-v3": {**_LATENT, **_EXPERTS, "q_lora_rank": 96, "n_routed_experts": 16, "num_experts_per_tok": 4},
    }
)


def make_real_shaped(folder: Path, family: str) -> Path:
    """A random checkpoint of a family, small but for its heads."""
    if family == "llama":
        return make_tiny_llama(folder, 32, 8, head_dim=128, intermediate_size=192, std=0.08)
    return make_tiny(folder, family, std=0.08, **REAL_SHAPES[family])


def make_cut_step_runner(
    folder: Path,
    config: SchedulerConfig,
    *,
    graph_sizes: Sequence[int],
    mesh: Mesh | None = None,
    tp: Collectives | None = None,
    world: Collectives | None = None,
    weight_format: WeightFormat | None = None,
) -> StepRunner:
    """Of the model in config.json, cut to its first two layers, in bfloat16 with dummy weights, maybe quantised.

    Ranks: collective over the world, if there is one.
    """
    whole = open_model_folder(folder, weights=False)
    cut = replace(whole, config={**whole.config, "num_hidden_layers": 2})
    device = torch.device("cuda", torch.cuda.current_device())
    plan = plan_shard(cut, mesh or Mesh.create(world=1, rank=0), dtype="bfloat16", device=device)
    shard = load_shard(
        plan,
        tp or SingleCollectives(),
        world=world,
        weight_format=weight_format,
        dummy_seed=0,
        on_tensor=lambda _: None,
    )
    return _captured(shard.model, config, torch.bfloat16, graph_sizes, plan.heads, shard.tp)


def make_step_runner(
    model: Decoder, config: SchedulerConfig, dtype: torch.dtype, *, graph_sizes: Sequence[int] = ()
) -> StepRunner:
    """A step runner of one rank on the GPU, with captured graphs of these sizes."""
    heads = split_heads(model.config.num_heads, model.config.num_kv_heads, 1, 0)
    return _captured(model, config, dtype, graph_sizes, heads, SingleCollectives())


def _captured(
    model: Decoder,
    config: SchedulerConfig,
    dtype: torch.dtype,
    graph_sizes: Sequence[int],
    heads: HeadShard,
    tp: Collectives,
) -> StepRunner:
    device = torch.device("cuda", torch.cuda.current_device())
    step_runner = build_step_runner(
        model, config, heads=heads, tp=tp, dtype=dtype, device=device, graph_sizes=graph_sizes
    )
    step_runner.capture(CudaCapture(device))
    return step_runner
