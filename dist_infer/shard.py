"""This rank's shard of a model: planned from the folder, built, filled with weights, sized for its KV cache.

Each function is local and may fail on one rank alone; whoever calls them lets the ranks vote between two of them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from dist_infer.checkpoint.dummy import DummySource
from dist_infer.checkpoint.folder import ModelFolder
from dist_infer.checkpoint.loader import TensorSource, load_weights
from dist_infer.checkpoint.safetensors import SafetensorsSource
from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import HeadShard, Mesh, split_heads
from dist_infer.config import ModelConfig
from dist_infer.errors import UsageError
from dist_infer.kernels.choices import check_orders
from dist_infer.kernels.measured import Measured
from dist_infer.kernels.scaled_linear import WeightFormat
from dist_infer.kv_cache import num_blocks_for
from dist_infer.layers.moe import check_experts
from dist_infer.memory import free_bytes
from dist_infer.models.decoder import Decoder
from dist_infer.models.registry import build_model, parse_config

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """What is known before anything large is made; equal on all ranks but for `mesh.rank`, `heads` and `device`."""

    folder: ModelFolder
    config: ModelConfig
    mesh: Mesh
    heads: HeadShard
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype  # of the KV cache
    batch_invariant: bool = False
    tuned: Sequence[Measured] = ()  # before what is committed
    kernel_orders: Mapping[str, str] = field(default_factory=dict)  # see kernels/orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A filled model, the collectives of its group, and its size. Units: bytes."""

    model: Decoder
    tp: Collectives
    parameter_bytes: int  # on this rank
    copied_bytes: int  # among these: second forms of weights that another layer needs as they are
    model_bytes: int  # of the whole model in this dtype
    choices: Sequence[str] = ()  # of kernel libraries, a line each; steps may add to them


def plan_shard(
    folder: ModelFolder,
    mesh: Mesh,
    *,
    dtype: str,
    device: torch.device,
    max_model_len: int | None = None,
    kv_cache_dtype: str = "auto",
    batch_invariant: bool = False,
    kernel_orders: Mapping[str, str] | None = None,
    tuned: Sequence[Measured] = (),
) -> ShardPlan:
    """Check that the model can be cut over the mesh. `dtype` "auto" is the checkpoint's own, float32 on a CPU.

    `kv_cache_dtype` "auto" is the same; "fp8" is E4M3, for latent attention alone.

    A model with a sliding window serves sequences up to its window, unless `max_model_len` asks for longer ones.

    Errors: UsageError naming the field of config.json, the numbers that don't divide, or a wrong kernel order.
    """
    check_orders(kernel_orders or {})
    config = _within_window(parse_config(folder.config), max_model_len)
    config = replace(config, num_token_ids=folder.num_token_ids)
    if dtype == "auto":
        dtype = config.dtype if device.type == "cuda" else "float32"
    heads = split_heads(config.num_heads, config.num_kv_heads, mesh.tp, mesh.tp_rank)
    if config.moe is not None:
        check_experts(config.moe, mesh)
    return ShardPlan(
        folder=folder,
        config=config,
        mesh=mesh,
        heads=heads,
        dtype=getattr(torch, dtype),
        device=device,
        cache_dtype=_cache_dtype(kv_cache_dtype, config, getattr(torch, dtype)),
        batch_invariant=batch_invariant,
        kernel_orders=kernel_orders or {},
        tuned=tuned,
    )


def _cache_dtype(asked: str, config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    if asked == "fp8" and config.mla is None:
        raise UsageError(
            f"--kv-cache-dtype fp8: {config.architecture} caches keys and values by head, which are kept in the dtype"
            " of the activations; fp8 is for latent attention (DeepSeek-V2, V3)"
        )
    if asked == "bf16" and dtype != torch.bfloat16:
        raise UsageError(
            f"--kv-cache-dtype bf16: activations are {str(dtype).removeprefix('torch.')} here, and the cache is kept in"
            " their dtype or in fp8; give --dtype bfloat16 too"
        )
    return torch.float8_e4m3fn if asked == "fp8" else dtype


def _within_window(config: ModelConfig, asked: int | None) -> ModelConfig:
    """Sequences that fit into the window need none, and the fastest attention has none."""
    window = config.sliding_window
    if window is None:
        return config
    if asked is None or asked <= window:
        return replace(config, sliding_window=None, max_position_embeddings=window)
    if not config.all_windowed:
        raise UsageError(
            f"--max-model-len {asked} is more than the sliding window of {window} tokens, which only some layers of the"
            f" model have: that is not supported, ask for {window} at most"
        )
    return config


def load_shard(
    plan: ShardPlan,
    tp: Collectives,
    *,
    world: Collectives | None = None,
    max_moe_tokens: int | None = None,
    uniform_routing: bool = False,
    weight_format: WeightFormat | None = None,
    dummy_seed: int | None = None,
    on_tensor: Callable[[str], None],
) -> Shard:
    """Build this rank's model and fill it from the folder, or with random weights of `dummy_seed`.

    `world` are all ranks, which experts are dealt to; None: the group is the world. `max_moe_tokens` and
    `uniform_routing`: see build_model. With a `weight_format` linear layers are quantised when all is loaded.

    Errors: UsageError, CheckpointError naming file and tensor.
    """
    on_loaded: list[Callable[[], int]] = []
    choices: list[str] = []

    def note_choice(line: str) -> None:
        _log.debug("%s", line)
        choices.append(line)

    model = build_model(
        plan.config,
        tp=tp,
        dtype=plan.dtype,
        device=plan.device,
        mesh=plan.mesh,
        world=world,
        max_moe_tokens=max_moe_tokens,
        uniform_routing=uniform_routing,
        weight_format=weight_format,
        on_loaded=on_loaded,
        kernel_orders=plan.kernel_orders,
        cached_as=plan.cache_dtype,
        batch_invariant=plan.batch_invariant,
        tuned=plan.tuned,
        on_choice=note_choice,
    )
    slots = list(model.weight_slots())
    source: TensorSource = SafetensorsSource(plan.folder.path) if dummy_seed is None else DummySource(slots, dummy_seed)
    parameter_bytes = load_weights(
        slots, source, ignored=model.ignored_weights, tied=model.tied_weights, on_tensor=on_tensor
    )
    tensor_bytes = {slot.name: prod(slot.shape) * slot.into.element_size() for slot in slots}
    model_bytes = sum(tensor_bytes.values())
    del slots, source  # they hold the weights
    freed = [finish() for finish in on_loaded]
    return Shard(
        model=model,
        tp=tp,
        parameter_bytes=parameter_bytes - sum(freed),
        copied_bytes=-sum(num_bytes for num_bytes in freed if num_bytes < 0),
        model_bytes=model_bytes,
        choices=choices,
    )


def num_kv_blocks(
    plan: ShardPlan, *, block_size: int, memory_fraction: float, sharers: int, reserved_bytes: int = 0
) -> int:
    """KV blocks that fit into this share of the memory that is free now; the ranks agree on their minimum.

    `sharers` ranks share the memory; `reserved_bytes` is what steps of this rank take beside the cache.

    Errors: UsageError when not even one fits.
    """
    free = free_bytes(plan.device, sharers=sharers) - reserved_bytes
    return num_blocks_for(max(0, int(free * memory_fraction)), plan.config, plan.heads, block_size, plan.cache_dtype)


def max_model_len(config: ModelConfig, asked: int | None, *, num_kv_tokens: int) -> int:
    """Tokens of the longest sequence: what was asked for, else what the model and the KV cache allow.

    Errors: UsageError when more was asked for than either allows.
    """
    if asked is None:
        return min(config.max_position_embeddings, num_kv_tokens)
    if asked > config.max_position_embeddings:
        raise UsageError(
            f"--max-model-len {asked} is more than the model's {config.max_position_embeddings} positions"
            " (max_position_embeddings of its config.json)"
        )
    if asked > num_kv_tokens:
        raise UsageError(
            f"--max-model-len {asked} is more than the {num_kv_tokens} tokens that the KV cache holds:"
            " lower it, or raise --num-kv-blocks or --kv-memory-fraction"
        )
    return asked
