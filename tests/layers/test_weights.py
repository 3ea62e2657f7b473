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


def test_only_a_vocabulary_may_be_longer_in_the_file() -> None:
    slot = WeightSlot("w", (10, 4), (range(3, 5), range(4)), torch.empty(2, 4))
    padded = WeightSlot("w", (10, 4), (range(3, 5), range(4)), torch.empty(2, 4), pads_rows=True)
    assert slot.fits((10, 4)) and not slot.fits((16, 4))
    assert padded.fits((10, 4)) and padded.fits((16, 4))
    assert not any(padded.fits(shape) for shape in ((9, 4), (16, 5), (16,), (10, 4, 1)))
