"""`--config run.toml`: options from a file. What the command line gives wins; what neither gives has its default.

Keys are the long options without their dashes, with - or _ between words; values have the TOML type of the option.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_infer.errors import UsageError

Kind = Literal["flag", "integer", "number", "text", "texts"]

_WANTED: Mapping[Kind, str] = {
    "flag": "true or false",
    "integer": "an integer",
    "number": "a number",
    "text": "a string",
    "texts": "a list of strings",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that may stand in a file: its name in the program, its long spelling, what it takes."""

    name: str
    spelling: str
    kind: Kind

    @property
    def key(self) -> str:
        """As it stands in a file."""
        return self.spelling.removeprefix("--")


def read_config(path: str, settings: Sequence[Setting]) -> dict[str, object]:
    """Values by the option's name in the program.

    Errors: UsageError naming file, key and what would be right.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from error
    by_key = {setting.key: setting for setting in settings}
    taken: dict[str, object] = {}
    for given, value in values.items():
        setting = by_key.get(given.replace("_", "-"))
        if setting is None:
            close = difflib.get_close_matches(given.replace("_", "-"), by_key, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(by_key))}"
            raise UsageError(f"--config {path}: unknown key {given}{hint}")
        if setting.name in taken:
            raise UsageError(f"--config {path}: {setting.key} stands there twice, with - and with _")
        if not _fits(value, setting.kind):
            raise UsageError(f"--config {path}: {given} must be {_WANTED[setting.kind]}, it is {_show(value)}")
        taken[setting.name] = value
    return taken


def format_config(settings: Sequence[Setting], values: Mapping[str, object]) -> str:
    """The values as a file that `read_config` reads; what has none stands there as a comment."""
    lines = []
    for setting in settings:
        value = values[setting.name]
        if value is None or (setting.kind == "texts" and not value):
            lines.append(f"# {setting.key} is not set")
        else:
            lines.append(f"{setting.key} = {_show(value)}")
    return "\n".join(lines) + "\n"


def _fits(value: object, kind: Kind) -> bool:
    if kind == "flag" or isinstance(value, bool):
        return kind == "flag" and isinstance(value, bool)
    if kind == "texts":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, {"integer": int, "number": int | float, "text": str}[kind])


def _show(value: object) -> str:
    """As TOML writes it; its strings are those of JSON but for the delete character."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_show(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, bool | int | str):
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        return text.encode("utf-8", "replace").decode()  # half a pair, which no TOML file can hold
    return str(value)
