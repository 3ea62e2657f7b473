"""Pairs of experts in several numbers, for tests of grouped products."""

import torch
from torch import Tensor

TOP_K = 3
COUNTS = [
    ([1], 0),
    ([0, 16, 0, 0, 17, 0], 5),
    ([48, 49, 95, 96, 97, 0, 1, 15], 100),
    ([1000], 3),
    ([0] * 255 + [33], 0),
    ([idx * 37 % 130 for idx in range(256)], 11),
]


def ragged(counts: list[int], num_dead: int) -> tuple[Tensor, Tensor]:
    """(order, firsts) of rows in a random order, and pairs behind them that no expert has."""
    generator = torch.Generator().manual_seed(len(counts))
    total = sum(counts)
    num_rows = -(-(total + num_dead) // TOP_K)
    order = torch.randperm(num_rows * TOP_K, generator=generator).int()
    firsts = torch.tensor([0, *counts]).cumsum(0).int()
    order[total:] = torch.iinfo(torch.int32).max
    return order.cuda(), firsts.cuda()


def normal(*shape: int) -> Tensor:
    """bfloat16 that make sums of about 1 with numbers of about 1."""
    generator = torch.Generator("cuda").manual_seed(shape[0])
    return torch.randn(shape, generator=generator, device="cuda").div_(shape[-1] ** 0.5).bfloat16()
