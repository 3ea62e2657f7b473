"""Program: loads one rank's shard of a folder that `write_random_model` made, and prints what memory that took."""

import json
import math
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from dist_infer.checkpoint.loader import load_weights
from dist_infer.checkpoint.safetensors import SafetensorsSource
from dist_infer.layers.weights import WeightSlot

NUM_RANKS = 2
_HIDDEN, _VOCAB, _FFN = 2048, 32768, 8192
_CHUNK_BYTES = 32 << 20


def write_random_model(path: Path, num_bytes: int) -> int:
    """A bf16 model of about `num_bytes` with random bytes, and the bytes of its largest tensor."""
    header, end = {}, 0
    sizes = []
    for name, shape in _shapes(num_bytes).items():
        begin, end = end, end + math.prod(shape) * 2
        sizes.append(end - begin)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    chunk = random.Random(1).randbytes(_CHUNK_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for begin in range(0, end, _CHUNK_BYTES):
            file.write(chunk[: end - begin])
    return max(sizes)


def _shapes(num_bytes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (_VOCAB, _HIDDEN)}
    layer = {
        "q": (_HIDDEN, _HIDDEN),
        "o": (_HIDDEN, _HIDDEN),
        "up": (_FFN, _HIDDEN),
        "down": (_HIDDEN, _FFN),
        "norm": (_HIDDEN,),
    }
    layer_bytes = 2 * sum(math.prod(shape) for shape in layer.values())
    for i in range((num_bytes - 2 * _VOCAB * _HIDDEN) // layer_bytes):
        shapes |= {f"{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _slots(source: SafetensorsSource, rank: int) -> Iterator[WeightSlot]:
    """Rows of embedding, query and up, columns of output and down, the whole norm."""
    for name in source.names():
        take = [range(size) for size in source.shape(name)]
        dim = {"embed": 0, "q": 0, "up": 0, "o": 1, "down": 1}.get(name.split(".")[-1])
        if dim is not None:
            part = len(take[dim]) // NUM_RANKS
            take[dim] = range(rank * part, (rank + 1) * part)
        into = torch.empty([len(r) for r in take], dtype=torch.bfloat16)
        yield WeightSlot(name, source.shape(name), tuple(take), into)


def _memory_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def main(folder: Path, rank: int) -> None:
    after_imports = _memory_bytes("VmRSS")
    source = SafetensorsSource(folder)
    slots = list(_slots(source, rank))
    shard_bytes = load_weights(slots, source)
    peak_bytes = _memory_bytes("VmHWM") - after_imports
    print(json.dumps({"rank": rank, "shard_bytes": shard_bytes, "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
