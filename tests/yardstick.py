"""Two-level oracle: the truth is a float64 formula, the yardstick is torch in the dtype under test."""

import torch
from torch import Tensor


def check_error(ours: Tensor, truth: Tensor, yardstick: Tensor, *, factor: float = 2.0) -> None:
    """The largest error of `ours` is at most `factor` times the yardstick's.

    Where the yardstick happens to be exact, half a unit in the last place of the largest value is allowed; in
    float64, where the truth is rounded too, sixteen units.
    """
    assert ours.dtype == yardstick.dtype
    assert ours.shape == truth.shape == yardstick.shape
    if truth.numel() == 0:
        return
    assert truth.dtype == torch.float64
    error = (ours.double() - truth).abs().max().item()
    measured = (yardstick.double() - truth).abs().max().item()
    units = 16 if ours.dtype == torch.float64 else 0.5
    floor = units * torch.finfo(ours.dtype).eps * truth.abs().max().item()
    assert error <= max(factor * measured, floor), f"error {error:.3g} is above {factor} times {measured:.3g}"


def check_rounded_once(ours: Tensor, truth: Tensor) -> None:
    """bfloat16 and float16 results are the truth rounded once: another rounding would change far more than 1 %.

    A truth that is nearer to a tie than what sums in float32 of the sizes of its row err by may be rounded either way.
    """
    if ours.numel() and ours.dtype in (torch.bfloat16, torch.float16):
        erring = 2.0**-20 * truth.abs().amax(-1, keepdim=True)
        least, most = (truth - erring).to(ours.dtype), (truth + erring).to(ours.dtype)
        wrong = (~((least <= ours) & (ours <= most))).sum().item()
        assert wrong <= max(1, ours.numel() // 100), f"{wrong} of {ours.numel()} values are not the truth rounded once"
