"""A model folder as Hugging Face writes it. Its code (`auto_map`) is never run; intake/text reads its tokenizer."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from dist_infer.checkpoint.safetensors import find_weights
from dist_infer.errors import CheckpointError, UsageError

_EXPECTED = "--model takes a folder with config.json, tokenizer.json and *.safetensors"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What is in the folder beside weights and tokenizer. A file that may be absent gives {}."""

    path: Path
    config: dict[str, object]
    generation_config: dict[str, object]


def open_model_folder(path: str | Path, *, weights: bool = True) -> ModelFolder:
    """Reads the small files of a folder; `weights` says whether it must hold weights, too.

    Errors: UsageError for a folder or file that isn't there and for weights that are pickled only; CheckpointError for
        a corrupt file.
    """
    folder = _existing_folder(str(path))
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise UsageError(f"{folder}: no config.json; {_EXPECTED}")
    if weights:
        find_weights(folder)
    return ModelFolder(
        path=folder,
        config=_read_json(config_path),
        generation_config=_read_json(folder / "generation_config.json"),
    )


def _existing_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UsageError(f"{path}: is a file; {_EXPECTED}")
    if _HUB_ID.fullmatch(path):
        raise UsageError(
            f"{path}: there is no such folder, and nothing is downloaded; "
            f"fetch a Hub model first: hf download {path} --local-dir FOLDER"
        )
    raise UsageError(f"{path}: there is no such folder")


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return fields
