"""Typed reads of the fields of a request body. JSON null counts as absent, a bool is never a number."""

import json
from collections.abc import Mapping

from dist_infer.errors import RequestError

_SHOWN_CHARS = 60

Body = Mapping[str, object]


def show(value: object) -> str:
    """The value as JSON for a message, cut to a readable length."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def wrong_type(name: str, value: object, wanted: str) -> RequestError:
    """The error for a field of another type than `wanted`."""
    return RequestError(f"{name} is {show(value)}; it must be {wanted}", param=name, code="invalid_type")


def wrong_value(name: str, value: object, wanted: str) -> RequestError:
    """The error for a value outside its range."""
    return RequestError(f"{name} is {show(value)}; it must be {wanted}", param=name, code="invalid_value")


def missing(name: str, what: str) -> RequestError:
    """The error for a required field that is not there."""
    return RequestError(f"{name} is missing: {what}", param=name, code="missing_required_parameter")


def is_int(value: object) -> bool:
    """True for a JSON integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_int(body: Body, name: str, *, low: int, high: int) -> int | None:
    """An integer from `low` to `high`, or None where the field is absent."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_type(name, value, "an integer")
    if not low <= value <= high:
        raise wrong_value(name, value, f"an integer from {low} to {high}")
    return value


def read_number(body: Body, name: str, *, low: float, high: float, above_low: bool = False) -> float | None:
    """A number from `low` to `high` (above `low` if so asked), or None where the field is absent."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise wrong_type(name, value, "a number")
    # Compared before float(): an integer of JSON may be too large for a float, and a NaN fails every comparison.
    if not low <= value <= high or (above_low and value == low):
        bound = f"above {low:g}" if above_low else f"from {low:g}"
        raise wrong_value(name, value, f"a number {bound} to {high:g}")
    return float(value)


def read_flag(body: Body, name: str, *, default: bool = False) -> bool:
    """True or false; `default` where the field is absent."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, value, "true or false")
    return value


def check_text(name: str, value: str) -> str:
    """The text itself, unless it holds half a surrogate pair, which no UTF-8 text can."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} holds half a surrogate pair at character {error.start}: it is not Unicode text",
            param=name,
            code="invalid_value",
        ) from error
    return value
