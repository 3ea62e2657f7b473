"""Proof that the weights of a checkpoint fill every element of every parameter exactly once.

Each view is turned into runs of bytes in its storage. Sorted by start, the runs of all slots must not overlap and must,
joined, be the runs of the parameters. That is exact for packed parameters (query, key and value rows in one tensor),
for column views and for transposed ones, and costs one array entry for each run: a row at worst, never an element of a
parameter that lies densely.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dist_infer.errors import CheckpointError
from dist_infer.layers.weights import WeightSlot
from dist_infer.types import Int64Array


@dataclass(frozen=True, slots=True)
class _Runs:
    """Byte runs of named views in one storage, sorted by start."""

    names: list[str]
    owner: Int64Array  # [R] index into names
    begin: Int64Array  # [R]
    end: Int64Array  # [R]


def check_coverage(slots: Iterable[WeightSlot], parameters: Iterable[tuple[str, Tensor]] = ()) -> None:
    """Compares what the slots write with the parameters; without any, with the whole storages that slots point into.

    Errors: CheckpointError naming the slot or parameter with an element that is filled twice or never.
    """
    written: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for slot in slots:
        if slot.into.numel():
            written[_storage_of(slot.into)].append((slot.name, slot.into))
    wanted: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, parameter in parameters:
        if parameter.numel():
            wanted[_storage_of(parameter)].append((name, parameter))
    if not wanted:
        wanted |= {
            storage: [(f"the storage of {views[0][0]}", _whole(views[0][1]))] for storage, views in written.items()
        }
    for storage, views in written.items():
        if storage not in wanted:
            raise CheckpointError(
                f"tensor {views[0][0]!r} would be loaded into memory that is no parameter of the model"
            )
    for storage, views in wanted.items():
        _compare(_runs_of(written.get(storage, [])), _runs_of(views))


def _compare(written: _Runs, wanted: _Runs) -> None:
    twice = np.flatnonzero(written.begin[1:] < written.end[:-1])
    if len(twice):
        first, second = (written.names[written.owner[i]] for i in (twice[0], twice[0] + 1))
        raise CheckpointError(
            f"tensors {first!r} and {second!r} would be loaded into the same elements of one parameter"
        )
    written_begin, written_end = _joined(written)
    wanted_begin, wanted_end = _joined(wanted)
    for begin, end in zip(wanted_begin, wanted_end, strict=True):
        i = int(np.searchsorted(written_begin, begin, side="right")) - 1
        if i < 0 or written_end[i] < end:
            gap = begin if i < 0 or written_end[i] <= begin else written_end[i]
            name = wanted.names[wanted.owner[np.searchsorted(wanted.begin, gap, side="right") - 1]]
            raise CheckpointError(f"parameter {name!r} has elements that no tensor of the checkpoint fills")
    if int((written_end - written_begin).sum()) != int((wanted_end - wanted_begin).sum()):
        raise CheckpointError(f"tensor {written.names[0]!r} would be loaded beyond the parameters of its storage")


def _joined(runs: _Runs) -> tuple[Int64Array, Int64Array]:
    """Adjacent and overlapping runs merged."""
    if not len(runs.begin):
        return runs.begin, runs.end
    reach = np.maximum.accumulate(runs.end)
    starts = np.concatenate([[True], runs.begin[1:] > reach[:-1]])
    lasts = np.concatenate([starts[1:], [True]])
    return runs.begin[starts], reach[lasts]


def _runs_of(views: list[tuple[str, Tensor]]) -> _Runs:
    begins, ends, owners = [], [], []
    for i, (_, view) in enumerate(views):
        begin, length = _runs_of_view(view)
        begins.append(begin)
        ends.append(begin + length)
        owners.append(np.full(len(begin), i, np.int64))
    if not views:
        nothing = np.zeros(0, np.int64)
        return _Runs([], nothing, nothing, nothing)
    begin, end, owner = np.concatenate(begins), np.concatenate(ends), np.concatenate(owners)
    order = np.argsort(begin, kind="stable")
    return _Runs([name for name, _ in views], owner[order], begin[order], end[order])


def _runs_of_view(view: Tensor) -> tuple[Int64Array, int]:
    """Starts and the common length, in bytes, of the contiguous runs of a view that has elements."""
    dims = sorted((stride, size) for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    begin = np.array([view.storage_offset()], np.int64)
    for stride, size in dims:
        begin = (begin[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return begin * view.element_size(), length * view.element_size()


def _whole(view: Tensor) -> Tensor:
    num_elements = view.untyped_storage().nbytes() // view.element_size()
    return view.detach().as_strided((num_elements,), (1,), 0)


def _storage_of(view: Tensor) -> int:
    return view.untyped_storage().data_ptr()
