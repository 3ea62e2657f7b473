"""A slot that doesn't fit is a defect of the layer that made it."""

import pytest
import torch

from dist_infer.layers.weights import WeightSlot


def test_part_of_a_tensor() -> None:
    slot = WeightSlot("w", (10, 4), (range(3, 5), range(4)), torch.empty(2, 4))
    assert (slot.name, slot.shape) == ("w", (10, 4))


@pytest.mark.parametrize(
    ("shape", "take", "into"),
    [
        ((10, 4), (range(3, 5), range(4)), (3, 4)),
        ((10, 4), (range(9, 11), range(4)), (2, 4)),
        ((10, 4), (range(-1, 1), range(4)), (2, 4)),
        ((10,), (range(2),), (2, 1)),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], take: tuple[range, ...], into: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="w: part"):
        WeightSlot("w", shape, take, torch.empty(into))
