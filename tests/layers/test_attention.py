"""The attention layer on uneven head shards: every tp size gives the whole layer's output."""

import pytest
import torch
from torch import Tensor

from dist_infer.comm.collectives import Collectives
from dist_infer.comm.mesh import split_heads
from dist_infer.layers.attention import Attention, AttentionPlanner, AttentionStep, KVLayer
from dist_infer.layers.rope import RotaryAngles
from tests.batches import Part, make_batch
from tests.fake_collectives import run_group
from tests.layers.setups import CONFIG, close, fill, random, setup_of
from tests.paged_steps import paged_step

D, H, N, K = CONFIG.hidden_size, CONFIG.head_dim, CONFIG.num_heads, CONFIG.num_kv_heads
TENSORS = {
    f"a.{name}.{kind}": random(*(shape if kind == "weight" else shape[:1]), seed=seed)
    for seed, (name, shape) in enumerate(
        {"q_proj": (N * H, D), "k_proj": (K * H, D), "v_proj": (K * H, D), "o_proj": (D, N * H)}.items()
    )
    for kind in ("weight", "bias")
}
NUM_TOKENS = 7
BLOCK_SIZE = 4


def dense(x: Tensor) -> Tensor:
    """The layer without pages or shards, by torch's own attention."""
    q, k, v = (x @ TENSORS[f"a.{n}_proj.weight"].T + TENSORS[f"a.{n}_proj.bias"] for n in "qkv")
    angles = torch.arange(NUM_TOKENS)[:, None] * 10000.0 ** (-torch.arange(0, H, 2, dtype=torch.float64) / H)

    def heads(y: Tensor, *, turned: bool) -> Tensor:
        y = y.view(NUM_TOKENS, -1, H).transpose(0, 1)
        low, high = y.chunk(2, -1)
        rotated = torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)
        return rotated if turned else y

    out = torch.nn.functional.scaled_dot_product_attention(
        heads(q, turned=True)[None],
        heads(k, turned=True).repeat_interleave(N // K, 0)[None],
        heads(v, turned=False).repeat_interleave(N // K, 0)[None],
        is_causal=True,
    )
    return out[0].transpose(0, 1).flatten(1) @ TENSORS["a.o_proj.weight"].T + TENSORS["a.o_proj.bias"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_shards_give_the_whole_layer(size: int) -> None:
    """6 heads in 3 groups over 4 ranks: two ranks share the first group, over 2: two groups and one."""
    x = random(NUM_TOKENS, D, seed=9)

    def main(tp: Collectives) -> Tensor:
        setup = setup_of(tp)
        layer = Attention(CONFIG, setup)
        fill(layer.weight_slots("a."), TENSORS)
        num_kv_heads = len(split_heads(N, K, size, tp.rank).kv_heads)
        kv = KVLayer(*(torch.zeros(4 * BLOCK_SIZE, num_kv_heads, H, dtype=torch.float64) for _ in range(2)))
        parts = []
        for start, stop in ((0, 4), (4, 6), (6, 7)):  # prefill, extend, decode
            batch = make_batch([Part(token_ids=[0] * (stop - start), start=start, pages=[3, 1])], block_size=BLOCK_SIZE)
            cos, sin = RotaryAngles(CONFIG.rope, H, setup)(torch.from_numpy(batch.positions))
            attend = AttentionPlanner(CONFIG, setup)(paged_step(batch, BLOCK_SIZE))
            step = AttentionStep(cos=cos, sin=sin, slots=torch.from_numpy(batch.slots), attend=attend)
            parts.append(tp.all_reduce(layer(x[start:stop], step, kv)))
        return torch.cat(parts)

    for out in run_group(size, main):
        close(out, dense(x))
