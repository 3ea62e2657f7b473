"""The norm layer."""

import torch

from dist_infer.comm.collectives import SingleCollectives
from dist_infer.layers.norm import RmsNorm
from tests.layers.setups import close, fill, random, setup_of


def test_norm_of_the_sum() -> None:
    norm = RmsNorm(5, 1e-3, setup_of(SingleCollectives()))
    fill(norm.weight_slots("n."), {"n.weight": random(5, seed=1)})
    x, residual = random(3, 5), random(3, 5, seed=2)
    normed, total = norm(x, residual)
    close(total, x + residual)
    close(normed, torch.nn.functional.rms_norm(x + residual, (5,), random(5, seed=1), 1e-3))
    close(norm(x)[0], torch.nn.functional.rms_norm(x, (5,), random(5, seed=1), 1e-3))
