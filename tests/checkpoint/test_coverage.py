"""The interval check against a count per element."""

import pytest
import torch
from torch import Tensor

from dist_infer.checkpoint.coverage import check_coverage
from dist_infer.errors import CheckpointError
from dist_infer.layers.weights import WeightSlot


def slots_of(*views: Tensor) -> list[WeightSlot]:
    return [
        WeightSlot(f"w{i}", tuple(view.shape), tuple(range(size) for size in view.shape), view)
        for i, view in enumerate(views)
    ]


def counts(storage: Tensor, views: list[Tensor]) -> Tensor:
    """How often each element of a parameter is written, by writing."""
    storage.zero_()
    for view in views:
        view.add_(1)
    return storage.clone()


def test_dense_parts_of_every_kind_are_accepted() -> None:
    packed, columns, cube = torch.empty(6, 4), torch.empty(6, 4), torch.empty(3, 4, 5)
    check_coverage(slots_of(packed[:1], packed[1:6]))
    check_coverage(slots_of(columns[:, :1], columns[:, 1:3], columns[:, 3:]))
    check_coverage(slots_of(packed.T))
    check_coverage(slots_of(cube[:, :2], cube[:, 2:, 3:], cube[:, 2:, :3]))
    check_coverage(slots_of(cube.permute(2, 0, 1)[:, :, ::2], cube.permute(2, 0, 1)[:, :, 1::2]))
    check_coverage(slots_of(torch.empty(0, 4), torch.empty(()), torch.empty(1, 1)))
    check_coverage([])


@pytest.mark.parametrize("seed", range(40))
def test_random_views_agree_with_a_count_per_element(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    storage = torch.zeros(draw(1, 4), draw(1, 4), draw(1, 3))
    cut, dim = draw(0, 4), draw(0, 2)
    views = [storage.narrow(dim, 0, min(cut, storage.shape[dim])).transpose(0, 2)]
    if draw(0, 3):
        start = min(cut + draw(-1, 0) * draw(0, 1), storage.shape[dim])
        views.append(storage.narrow(dim, max(0, start), storage.shape[dim] - max(0, start)))
    once = bool((counts(storage, views) == 1).all())
    named = [("p", storage)]
    for parameters in [named, []] if any(view.numel() for view in views) else [named]:
        if once:
            check_coverage(slots_of(*views), parameters)
        else:
            with pytest.raises(CheckpointError, match=r"same elements|no tensor of the checkpoint fills"):
                check_coverage(slots_of(*views), parameters)


def test_overlap_names_both_tensors() -> None:
    packed = torch.empty(6, 4)
    with pytest.raises(CheckpointError, match="'w0' and 'w1'"):
        check_coverage(slots_of(packed[:4], packed[3:]))
    with pytest.raises(CheckpointError, match="'w0' and 'w0'"):
        check_coverage(slots_of(torch.empty(1, 4).expand(3, 4)))


def test_gap_names_the_parameter() -> None:
    first, second = torch.empty(4), torch.empty(6)
    with pytest.raises(CheckpointError, match="'second'"):
        check_coverage(slots_of(first, second[:5]), [("first", first), ("second", second)])
    with pytest.raises(CheckpointError, match="'second'"):
        check_coverage(slots_of(first), [("first", first), ("second", second)])


def test_parameters_may_share_a_storage_with_gaps_and_be_listed_twice() -> None:
    flat = torch.empty(16)
    a, b = flat[:5], flat[8:16].view(2, 4)
    check_coverage(slots_of(a, b), [("a", a), ("b", b), ("b again", b)])
    with pytest.raises(CheckpointError, match="'b'"):
        check_coverage(slots_of(a, b[:1]), [("a", a), ("b", b)])
    with pytest.raises(CheckpointError, match="beyond the parameters"):
        check_coverage(slots_of(flat), [("a", a), ("b", b)])
    with pytest.raises(CheckpointError, match="'w1' would be loaded into memory that is no parameter"):
        check_coverage(slots_of(a, torch.empty(3)), [("a", a)])
