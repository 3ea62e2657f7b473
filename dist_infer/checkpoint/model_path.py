"""What the user names -> a model folder on this host: a folder, a GGUF file, or a model of the Hugging Face Hub.

Nothing is downloaded: a Hub model must be in the local cache of huggingface_hub, wherever HF_HOME and its other
variables put that. A GGUF file is converted once into our own cache; of several ranks that ask at once one converts.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dist_infer.checkpoint.default_model import converted_model_path, default_model_path
from dist_infer.errors import UsageError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A folder, and what records call the model."""

    path: Path
    name: str


def find_model(model: str | None, cache_dir: Path, *, on_wait: Callable[[], None] = lambda: None) -> FoundModel:
    """`model` None is the embedded default model; `cache_dir` takes conversions, `on_wait` is called meanwhile.

    Errors: UsageError saying what there isn't, and how to get it.
    """
    if model is None:
        default = default_model_path(cache_dir, on_wait=on_wait)
        return FoundModel(default, default.name)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return FoundModel(converted_model_path(path, cache_dir, on_wait=on_wait), path.stem)
    if path.exists() or not _HUB_ID.fullmatch(model):
        return FoundModel(path, path.resolve().name)  # a folder; whoever opens it says what is wrong with it
    return FoundModel(_hub_snapshot(model), model)


def _hub_snapshot(repo_id: str) -> Path:
    # Imported here: it takes a quarter of a second, for Hub models only.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise UsageError(
            f"{repo_id}: there is no such folder, it is not in the Hugging Face cache {constants.HF_HUB_CACHE}, and "
            f"nothing is downloaded; fetch it first: hf download {repo_id}"
        ) from error
