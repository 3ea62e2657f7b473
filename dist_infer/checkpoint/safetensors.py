"""Reads parts of tensors from safetensors files, with or without an index, and writes such a file tensor by tensor.

Only the bytes of the wanted part are read, with pread into the memory of the result: a rank needs its shard plus one
part, and a file that ends early or an I/O error is a message with file and tensor. The safetensors package can't give
both: its memory map dies by SIGBUS when a file shrinks or a network file system fails, and its pages count as the
rank's memory; its pread backend reads the whole tensor for each slice.

A file is 8 bytes with the length of the header, the header (JSON: dtype, shape and byte range of each tensor) and the
bytes of the tensors without holes.

Source: https://github.com/huggingface/safetensors, README.md, "Format".
"""

import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_infer.errors import CheckpointError, UsageError
from dist_infer.types import Int64Array

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one tensor lies."""

    path: Path
    file_bytes: int  # size of the file when its header was read
    dtype: str  # as the format names it
    shape: tuple[int, ...]
    begin: int  # in bytes from the start of the file


class SafetensorsSource:
    """The tensors of a model folder (`model.safetensors`, an index, or one file of another name) or of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, _Entry] = {}
        weights = find_weights(path)
        weight_map = _read_weight_map(weights) if weights.name == INDEX_NAME else {}
        for file in [path / name for name in sorted(set(weight_map.values()))] or [weights]:
            for name, entry in _read_header(file).items():
                if name in self._entries:
                    raise CheckpointError(f"{file}: tensor {name!r} is also in {self._entries[name].path.name}")
                self._entries[name] = entry
        for name, file_name in weight_map.items():
            if name not in self._entries or self._entries[name].path.name != file_name:
                raise CheckpointError(
                    f"{path / file_name}: tensor {name!r} is missing, but {INDEX_NAME} says that it is there"
                )

    @property
    def location(self) -> str:
        """The folder or file."""
        return str(self._path)

    def names(self) -> Collection[str]:
        """All tensors of all files."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype."""
        entry = self._entry(name)
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{entry.path}: tensor {name!r} has the unsupported dtype {entry.dtype}")
        return _DTYPES[entry.dtype]

    def file_of(self, name: str) -> str:
        """The file that holds the tensor."""
        return str(self._entry(name).path)

    def read(self, name: str, take: tuple[range, ...]) -> Tensor:
        """Reads the part that `take` cuts out.

        Errors: CheckpointError when the file has changed or can't be read.
        """
        entry, dtype = self._entry(name), self.dtype(name)
        _check_take(name, entry, take)
        part = torch.empty([len(r) for r in take], dtype=dtype)
        if part.numel():
            offsets, run_len = _runs(entry.shape, take)
            target = memoryview(part.reshape(-1).view(torch.uint8).numpy().data)
            try:
                _read_runs(entry, entry.begin + offsets * dtype.itemsize, run_len * dtype.itemsize, target)
            except (OSError, EOFError) as error:
                raise CheckpointError(f"{entry.path}: can't read tensor {name!r}: {error}") from error
        return part

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self._path}: tensor {name!r} is missing")
        return self._entries[name]


def find_weights(path: Path) -> Path:
    """The index of a model folder, or the one file with all weights.

    Errors: UsageError when there is none, or only pickled weights; CheckpointError when it isn't clear which files
        belong together.
    """
    if path.is_file():
        return path
    for name in (SINGLE_NAME, INDEX_NAME):
        if (path / name).is_file():
            return path / name
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{path}: there are {len(found)} .safetensors files, but no {INDEX_NAME}")
    pickled = sorted(file for pattern in _PICKLED for file in path.glob(pattern))
    if pickled:
        raise UsageError(
            f"{pickled[0]}: pickled weights are never loaded, because a pickle can run any code; "
            "convert the model to .safetensors"
        )
    raise UsageError(f"{path}: no .safetensors file; without weights only --load-format dummy works")


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _parse_json(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map")
    for tensor, file in weight_map.items():
        plain = (
            isinstance(file, str)
            and file == os.path.basename(file)
            and "\\" not in file
            and file.endswith(".safetensors")
        )
        if not plain:
            raise CheckpointError(
                f"{index}: tensor {tensor!r} is said to be in {file!r}, which is no plain .safetensors file name"
            )
    return weight_map


def _read_header(path: Path) -> dict[str, _Entry]:
    """All entries of one file, checked against the format and the size of the file."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            prefix = file.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else _MAX_HEADER_BYTES
            data_begin = _LENGTH.size + header_bytes
            if data_begin > min(file_bytes, _MAX_HEADER_BYTES + _LENGTH.size):
                raise CheckpointError(
                    f"{path}: truncated or no safetensors file: no header within its {file_bytes} bytes"
                )
            header = _parse_json(file.read(header_bytes), path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    entries: dict[str, _Entry] = {}
    data_end = data_begin
    ranges: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        dtype, shape, begin, end = _checked_fields(path, name, fields)
        ranges.append((begin, end, name))
        entries[name] = _Entry(path, file_bytes, dtype, shape, data_begin + begin)
    for begin, end, name in sorted(ranges):
        if data_begin + begin != data_end:
            raise CheckpointError(
                f"{path}: corrupt header: the bytes of tensor {name!r} overlap another tensor or leave a hole"
            )
        data_end = data_begin + end
        if data_end > file_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {data_end}, but the file has {file_bytes} bytes"
            )
    if data_end != file_bytes:
        raise CheckpointError(f"{path}: corrupt: {file_bytes - data_end} bytes after the last tensor")
    return entries


def _checked_fields(path: Path, name: str, fields: object) -> tuple[str, tuple[int, ...], int, int]:
    try:
        found = dict(fields)  # type: ignore[call-overload]
        dtype, shape, (begin, end) = found["dtype"], tuple(found["shape"]), found["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: corrupt header: tensor {name!r} has no dtype, shape and data_offsets") from None
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers) or end < begin:
        raise CheckpointError(f"{path}: corrupt header: tensor {name!r} has a wrong dtype, shape or data_offsets")
    if dtype in _DTYPES and end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{path}: corrupt header: tensor {name!r} of shape {list(shape)}, {dtype} can't have {end - begin} bytes"
        )
    return dtype, shape, begin, end


def _parse_json(data: bytes, path: Path) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            raise CheckpointError(f"{path}: {next(n for n in names if names.count(n) > 1)!r} is there twice")
        return fields

    try:
        fields = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: truncated or corrupt: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: truncated or corrupt: no JSON object")
    return fields


def _check_take(name: str, entry: _Entry, take: tuple[range, ...]) -> None:
    fits = len(take) == len(entry.shape) and all(
        r.step == 1 and 0 <= r.start <= r.start + len(r) <= size for r, size in zip(take, entry.shape, strict=False)
    )
    if not fits:
        raise CheckpointError(f"{entry.path}: tensor {name!r} of shape {list(entry.shape)} has no part {take}")


def _runs(shape: tuple[int, ...], take: tuple[range, ...]) -> tuple[Int64Array, int]:
    """Offsets and length, in elements, of the contiguous pieces of a part in row-major order."""
    dim, run_len = len(shape), 1
    while dim > 0 and len(take[dim - 1]) == shape[dim - 1]:
        dim -= 1
        run_len *= shape[dim]
    start = stride = 0
    if dim > 0:
        dim -= 1
        start = take[dim].start * run_len
        stride = shape[dim] * run_len
        run_len *= len(take[dim])
    offsets = np.array([start], np.int64)
    for size, part in zip(reversed(shape[:dim]), reversed(take[:dim]), strict=True):
        rows = np.arange(part.start, part.stop, dtype=np.int64) * stride
        offsets = (rows[:, None] + offsets).reshape(-1)
        stride *= size
    return offsets, run_len


def _read_runs(entry: _Entry, offsets: Int64Array, run_bytes: int, target: memoryview) -> None:
    """Reads equally long runs one after another into `target`."""
    fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != entry.file_bytes:
            raise EOFError("the file has changed while it was loaded")
        if len(offsets) > 1:  # short runs with gaps: have the kernel read ahead over the gaps
            os.posix_fadvise(fd, int(offsets[0]), int(offsets[-1] - offsets[0]) + run_bytes, os.POSIX_FADV_WILLNEED)
        for i, offset in enumerate(offsets.tolist()):
            _read_exactly(fd, offset, target[i * run_bytes : (i + 1) * run_bytes])
    finally:
        os.close(fd)


def _read_exactly(fd: int, offset: int, target: memoryview) -> None:
    done = 0
    while done < len(target):  # one call gives 2 GiB at most
        count = os.preadv(fd, [target[done:]], offset + done)
        if count == 0:
            raise EOFError(f"the file ends at byte {offset + done}")
        done += count


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[npt.NDArray[np.float32]]
) -> None:
    """Writes float32 tensors in the order of `shapes`, taking one at a time, and flushes the file to disk.

    Errors: CheckpointError when a tensor hasn't its announced shape.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data is aligned
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{path}: tensor {name!r} has shape {list(tensor.shape)} instead of {list(shape)}"
                )
            file.write(np.ascontiguousarray(tensor, "<f4").data)
        file.flush()
        os.fsync(file.fileno())
