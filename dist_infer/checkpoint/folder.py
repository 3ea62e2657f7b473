"""A model folder as Hugging Face writes it. Its code (`auto_map`) is never run; intake/text reads its tokenizer."""

import json
from dataclasses import dataclass
from pathlib import Path

from dist_infer.checkpoint.safetensors import find_weights
from dist_infer.errors import CheckpointError, UsageError

_EXPECTED = "--model takes a folder with config.json, tokenizer.json and *.safetensors, or a .gguf file"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What is in the folder beside weights and tokenizer. A file that may be absent gives {}."""

    path: Path
    name: str  # what records call the model
    config: dict[str, object]
    generation_config: dict[str, object]
    num_token_ids: int | None = None  # that the tokenizer knows: one more than its largest; None without a tokenizer


def open_model_folder(path: str | Path, *, weights: bool = True, name: str | None = None) -> ModelFolder:
    """Reads the small files of a folder; `weights` says whether it must hold weights, too. `name` None: the folder's.

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
        name=name or folder.resolve().name,
        config=_read_json(config_path),
        generation_config=_read_json(folder / "generation_config.json"),
        num_token_ids=_num_token_ids(folder / "tokenizer.json"),
    )


def _existing_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UsageError(f"{path}: is a file; {_EXPECTED}")
    raise UsageError(f"{path}: there is no such folder")


def _num_token_ids(path: Path) -> int | None:
    """Of a vocabulary that maps tokens to ids, or lists them in order, and the tokens added to it."""
    tokenizer = _read_json(path)
    if not tokenizer:
        return None
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    try:
        vocabulary = model["vocab"]  # type: ignore[index]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + max((*ids, *(int(token["id"]) for token in added)), default=-1)  # type: ignore[attr-defined]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: holds no vocabulary: {error!r}") from error


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
