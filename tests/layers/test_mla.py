"""The layer of latent attention over head shards: every tp size gives the whole layer, expanded or absorbed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.config import MlaConfig, RopeConfig
from dist_infer.errors import UsageError
from dist_infer.layers.attention import AttentionStep
from dist_infer.layers.mla import LatentLayer, MlaAttention, MlaPlanner
from dist_infer.layers.rope import RotaryAngles
from tests.batches import Part, make_batch
from tests.fake_collectives import run_group
from tests.layers.setups import CONFIG, close, fill, random, setup_of
from tests.paged_steps import paged_step

N, D = 5, CONFIG.hidden_size
MLA = MlaConfig(q_lora_rank=7, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
NUM_TOKENS = 7
BLOCK_SIZE = 4
ROWS = {
    "q_a_proj": (7, D),
    "q_b_proj": (N * 6, 7),
    "q_proj": (N * 6, D),
    "kv_a_proj_with_mqa": (8, D),
    "kv_b_proj": (N * 7, 6),
    "o_proj": (D, N * 3),
    "q_a_layernorm": (7,),
    "kv_a_layernorm": (6,),
}
TENSORS = {f"a.{name}.weight": random(*shape, seed=seed) for seed, (name, shape) in enumerate(ROWS.items())}
TENSORS |= {f"a.{name}.bias": random(*ROWS[name][:1], seed=9) for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + MLA.norm_eps) * weight


def dense(x: Tensor, q_lora_rank: int | None, score_factor: float) -> Tensor:
    """The layer without pages or shards."""
    w = {name.removeprefix("a."): tensor for name, tensor in TENSORS.items()}
    if q_lora_rank is None:
        q = x @ w["q_proj.weight"].T
    else:
        down = x @ w["q_a_proj.weight"].T + w["q_a_proj.bias"]
        q = norm(down, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T
    kv = x @ w["kv_a_proj_with_mqa.weight"].T + w["kv_a_proj_with_mqa.bias"]
    made = norm(kv[:, :6], w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T
    angle = torch.arange(NUM_TOKENS, dtype=torch.float64)[:, None]

    def turn(y: Tensor) -> Tensor:
        low, high = y.chunk(2, -1)
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)

    q, made, key = q.view(NUM_TOKENS, N, 6), made.view(NUM_TOKENS, N, 7), turn(kv[:, 6:])
    outs = []
    for head in range(N):
        queries = torch.cat([q[:, head, :4], turn(q[:, head, 4:])], 1)
        scores = queries @ torch.cat([made[:, head, :4], key], 1).T * 6**-0.5 * score_factor
        scores = scores.masked_fill(torch.ones(NUM_TOKENS, NUM_TOKENS).triu(1).bool(), -torch.inf)
        outs.append(scores.softmax(-1) @ made[:, head, 4:])
    return torch.cat(outs, 1) @ w["o_proj.weight"].T + w["o_proj.bias"]


@pytest.mark.parametrize("q_lora_rank", [7, None])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shards_give_the_whole_layer(size: int, q_lora_rank: int | None) -> None:
    x = random(NUM_TOKENS, D, seed=20)
    config = replace(
        CONFIG,
        num_heads=N,
        num_kv_heads=N,
        head_dim=6,
        mla=replace(MLA, q_lora_rank=q_lora_rank),
        rope=RopeConfig(rotary_dim=2, score_factor=1.3),
    )

    def main(tp: Collectives) -> tuple[Tensor, Tensor]:
        setup = setup_of(tp)
        layer = MlaAttention(config, setup)
        fill(layer.weight_slots("a."), TENSORS)
        kv = LatentLayer(torch.zeros(4 * BLOCK_SIZE, 8, dtype=torch.float64))
        parts = []
        for start, stop in ((0, 4), (4, 6), (6, 7)):  # prefill, extend, decode
            batch = make_batch([Part(token_ids=[0] * (stop - start), start=start, pages=[3, 1])], block_size=BLOCK_SIZE)
            cos, sin = RotaryAngles(config.rope, config.head_dim, setup)(torch.from_numpy(batch.positions))
            attend = MlaPlanner(config, setup)(paged_step(batch, BLOCK_SIZE))
            step = AttentionStep(cos=cos, sin=sin, slots=torch.from_numpy(batch.slots), attend=attend)
            parts.append(tp.all_reduce(layer(x[start:stop], step, kv)))
        return torch.cat(parts), kv.latent

    results = run_group(size, main)
    for out, latents in results:
        close(out, dense(x, q_lora_rank, 1.3))
        assert torch.equal(latents, results[0][1])


def test_a_model_without_latents_is_refused() -> None:
    with pytest.raises(UsageError, match="has no latent attention"):
        run_group(1, lambda tp: MlaAttention(CONFIG, setup_of(tp)))
