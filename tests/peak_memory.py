"""How much memory the tensors of a piece of code take at most, on any device and in any thread."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the storages that are made inside it and still live, after each op.

    What an op takes and gives back inside itself is not seen.

    Units: bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        known = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._live = {
            address: entry
            for address, entry in self._live.items()
            if not entry[0].expired()  # type: ignore[no-untyped-call]
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and _address(leaf) not in known and _address(leaf) not in self._live:
                storage = leaf.untyped_storage()
                self._live[_address(leaf)] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._live.values()))
        return out


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that `run` holds at a time, without what was there before."""
    memory = PeakMemory()
    with torch.no_grad(), memory:
        run()
    return memory.peak_bytes
