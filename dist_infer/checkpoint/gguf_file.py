"""Checked access to a GGUF file.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from dist_infer.errors import CheckpointError

T = TypeVar("T")


class GGUFFile:
    """Metadata and tensors; what is missing or of another type is an error that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
            raise CheckpointError(f"{path}: truncated or no GGUF file: {error}") from error
        self.tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, kind: type[T]) -> T | None:
        """A metadata value, None when it is absent."""
        field = self._reader.get_field(key)
        if field is None:
            return None
        value = field.contents()
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.path}: {key} is {type(value).__name__}, not {kind.__name__}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """A metadata value that must be there."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        return value

    def refuse(self, key: str, value: object, known: object) -> CheckpointError:
        """The error for a value that can't be converted."""
        return CheckpointError(f"{self.path}: {key} = {value!r} can't be converted, only {known}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Rows first; GGUF writes the fastest dim first."""
        return tuple(int(size) for size in reversed(self._tensor(name).shape))

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """The dequantised values, exactly."""
        tensor = self._tensor(name)
        try:
            return dequantize(tensor.data, tensor.tensor_type).reshape(self.shape(name))
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} of type {tensor.tensor_type.name} can't be read: {error}"
            ) from error

    def _tensor(self, name: str) -> ReaderTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self.tensors[name]
