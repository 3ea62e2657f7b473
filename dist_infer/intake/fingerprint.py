"""Digests of an input and of a model, to tell whether a resumed run has the same.

Of the weights, which may be hundreds of gigabytes, it takes size, header and samples; every other file it reads whole.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from dist_infer.errors import UsageError

_CHUNK_BYTES = 16 * 2**20
_SAMPLE_BYTES = 2**16
_NUM_SAMPLES = 16
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def digest_file(path: Path, *, on_progress: Callable[[], None] = lambda: None) -> str:
    """Of all bytes; `on_progress` is called after each 16 MiB.

    Errors: UsageError.
    """
    whole = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                whole.update(data)
                on_progress()
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    return whole.hexdigest()


def digest_texts(texts: Sequence[str]) -> str:
    """Of texts and the borders between them."""
    whole = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()


def digest_model(folder: Path, *, weights: bool = True) -> str:
    """Of a model folder, wherever it lies: small files whole, weights by name, size, header and samples.

    Errors: UsageError.
    """
    whole = hashlib.sha256()
    names = [name for name in _SMALL_FILES if (folder / name).is_file()]
    files = sorted(folder.glob("*.safetensors")) if weights else []
    try:
        for path in [*(folder / name for name in names), *files]:
            size = path.stat().st_size
            whole.update(f"{path.name}\0{size}\0".encode())
            if path in files:
                _add_samples(whole, path, size)
            else:
                whole.update(path.read_bytes())
    except OSError as error:
        raise UsageError(f"can't read {folder}: {error.strerror}") from error
    return whole.hexdigest()


def _add_samples(whole: "hashlib._Hash", path: Path, size: int) -> None:
    with path.open("rb") as file:
        header_len = int.from_bytes(file.read(8), "little")
        whole.update(file.read(min(header_len, _CHUNK_BYTES)))
        for idx in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * idx // (_NUM_SAMPLES - 1))
            whole.update(file.read(_SAMPLE_BYTES))
