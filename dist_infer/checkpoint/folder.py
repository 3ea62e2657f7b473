"""A model folder as Hugging Face writes it: config, tokenizer, chat template. Its code (`auto_map`) is never run."""

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
    """What is in the folder beside the weights. A file that may be absent gives {} or None."""

    path: Path
    config: dict[str, object]
    generation_config: dict[str, object]
    tokenizer_path: Path | None  # tokenizer.json
    tokenizer_config: dict[str, object]
    chat_template: str | None


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
    tokenizer_path = folder / "tokenizer.json"
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    return ModelFolder(
        path=folder,
        config=_read_json(config_path),
        generation_config=_read_json(folder / "generation_config.json"),
        tokenizer_path=tokenizer_path if tokenizer_path.is_file() else None,
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
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


def _chat_template(folder: Path, tokenizer_config: dict[str, object]) -> str | None:
    """The template's own file wins over tokenizer_config.json; of several named ones "default" is taken."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: can't be read: {error}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of named templates"
        )
    return template
