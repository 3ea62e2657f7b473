"""The paged KV cache of one rank. K KV heads of this rank, H head dim, L latent and R rotated channels.

A page id names `block_size` consecutive flat slots in every cache of the rank: keys and values of each layer, or with
latent attention one row of latent and rotated key, which all ranks of a group hold alike. So a page costs `block_bytes`
in all. The ids are logical and come from the scheduler; nothing here knows who owns a page.
"""

from math import prod

import numpy as np
import torch

from dist_infer.comm.mesh import HeadShard
from dist_infer.config import ModelConfig
from dist_infer.errors import UsageError
from dist_infer.layers.attention import KVLayer
from dist_infer.layers.mla import LatentLayer


class KVCache:
    """What all layers cache by flat slot, zero at first. Latents may be E4M3, then each layer has a scale, 1.

    Shapes: each of `layers` holds k and v [num_blocks * block_size, K, H], or latent [num_blocks * block_size, L + R].
    Errors: UsageError when the device has no room for them.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: HeadShard,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_bytes = num_blocks * block_bytes(config, shard, block_size, dtype)
        shape = (num_blocks * block_size, *_slot_shape(config, shard))
        narrow = dtype == torch.float8_e4m3fn
        self.layers: tuple[KVLayer, ...] | tuple[LatentLayer, ...]
        try:
            if config.mla is None:
                self.layers = tuple(
                    KVLayer(*(_zeros(shape, dtype, device) for _ in range(2))) for _ in range(config.num_layers)
                )
            else:
                self.layers = tuple(
                    LatentLayer(_zeros(shape, dtype, device), torch.ones(1, device=device) if narrow else None)
                    for _ in range(config.num_layers)
                )
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise UsageError(
                f"the KV cache of {num_blocks} blocks takes {self.num_bytes / 2**20:.0f} MiB, more than {device} has"
                " left: lower --num-kv-blocks or --kv-memory-fraction"
            ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory comes from calloc, page by page as it is written: torch.zeros would write all of it at start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def block_bytes(config: ModelConfig, shard: HeadShard, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page on this rank, over all layers."""
    num_tensors = 2 if config.mla is None else 1
    return num_tensors * config.num_layers * block_size * prod(_slot_shape(config, shard)) * dtype.itemsize


def _slot_shape(config: ModelConfig, shard: HeadShard) -> tuple[int, ...]:
    """Of one token in one tensor of a layer."""
    if config.mla is not None:
        return (config.mla.latent_dim,)
    return (len(shard.kv_heads), config.head_dim)


def num_blocks_for(
    memory_bytes: int, config: ModelConfig, shard: HeadShard, block_size: int, dtype: torch.dtype
) -> int:
    """The pages that fit into `memory_bytes` on this rank; the ranks of a group then agree on their minimum.

    Errors: UsageError when not even one fits.
    """
    page_bytes = block_bytes(config, shard, block_size, dtype)
    if memory_bytes < page_bytes:
        raise UsageError(
            f"a KV block of {block_size} tokens takes {page_bytes / 2**20:.1f} MiB on this rank and only"
            f" {memory_bytes / 2**20:.1f} MiB are left for the cache: raise --kv-memory-fraction or lower --block-size"
        )
    return memory_bytes // page_bytes
