"""QK norms over uneven head shards: by head, and over the whole projection with each KV head counted once."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import split_heads
from dist_infer.kernels import rotary as rotary_op
from dist_infer.kernels.carriers import Rotation
from dist_infer.layers import qk_norm
from dist_infer.layers.qk_norm import HeadNorm, ProjectionNorm, make_qk_norm
from tests.fake_collectives import run_group
from tests.layers.setups import CONFIG, close, fill, random, setup_of

N, K, H = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
Q, KEY, VALUE = random(5, N, H, seed=1), random(5, K, H, seed=2), random(5, K, H, seed=3)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps) * weight


def normed(layer: HeadNorm | ProjectionNorm, qkv: Tensor, num_kv_heads: int) -> Tensor:
    """All turned by an angle of zero; keys and values read back from the caches."""
    caches = [torch.zeros(len(qkv), num_kv_heads, H, dtype=qkv.dtype) for _ in range(2)]
    cos, sin = torch.ones(len(qkv), H // 2, dtype=qkv.dtype), torch.zeros(len(qkv), H // 2, dtype=qkv.dtype)
    slots = torch.arange(len(qkv))
    if isinstance(layer, ProjectionNorm):
        kept = {"k_cache": caches[0], "v_cache": caches[1]}
        q = layer(qkv, Rotation(cos=cos, sin=sin, slots=slots, interleaved=False, **kept))
        return torch.cat([q, *caches], 1)
    q = rotary_op.rotary(
        qkv,
        cos,
        sin,
        slots,
        *caches,
        q_weight=layer.q_weight,
        k_weight=layer.k_weight,
        eps=layer.eps,
        library=rotary_op.LIBRARIES[-1],
    )
    return torch.cat([q, *caches], 1)


def run(kind: Literal["head", "projection"], size: int) -> list[tuple[range, range, Tensor]]:
    config = replace(CONFIG, qk_norm=kind)
    width = (H, H) if kind == "head" else (N * H, K * H)
    tensors = {"a.q_norm.weight": random(width[0], seed=4), "a.k_norm.weight": random(width[1], seed=5)}

    def main(tp: Collectives) -> tuple[range, range, Tensor]:
        shard = split_heads(N, K, tp.size, tp.rank)
        layer = make_qk_norm(config, shard, setup_of(tp))
        assert layer is not None
        fill(layer.weight_slots("a."), tensors)
        qkv = torch.cat((Q[:, shard.heads], KEY[:, shard.kv_heads], VALUE[:, shard.kv_heads]), 1)
        return shard.heads, shard.kv_heads, normed(layer, qkv, len(shard.kv_heads))

    return run_group(size, main)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["head", "projection"])
def test_shards_give_the_whole_norm(kind: Literal["head", "projection"], size: int) -> None:
    if kind == "head":
        truths = [norm(x, random(H, seed=seed)) for x, seed in ((Q, 4), (KEY, 5))]
    else:
        truths = [norm(x.flatten(1), random(n * H, seed=seed)).view(x.shape) for x, n, seed in ((Q, N, 4), (KEY, K, 5))]
    for heads, kv_heads, out in run(kind, size):
        close(out, torch.cat([truths[0][:, heads], truths[1][:, kv_heads], VALUE[:, kv_heads]], 1))


def test_a_kv_head_that_two_ranks_hold_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: every holder adds its squares."""
    whole = norm(KEY.flatten(1), random(K * H, seed=5)).view(KEY.shape)
    monkeypatch.setattr(qk_norm, "_is_first_holder", lambda config, setup: True)
    heads, kv_heads, out = run("projection", 4)[0]
    assert (out[:, len(heads) : len(heads) + len(kv_heads)] - whole[:, kv_heads]).abs().max() > 0.01


def test_a_model_without_one_has_none() -> None:
    assert run_group(1, lambda tp: make_qk_norm(CONFIG, split_heads(N, K, 1, 0), setup_of(tp))) == [None]
