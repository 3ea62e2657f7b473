"""Typed access to config.json: a wrong value is an error that names the field."""

from collections.abc import Mapping, Sequence

from dist_infer.errors import UsageError


class Fields:
    """The fields of one JSON object. A field that is null counts as absent; `path` stands before names in messages."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        self._values = values
        self._path = path

    def get(self, name: str) -> object:
        """The plain value, None when absent."""
        return self._values.get(name)

    def is_written(self, name: str) -> bool:
        """Whether the field is written, if only as null."""
        return name in self._values

    def section(self, name: str) -> "Fields | None":
        """The object under `name`, None when absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self._path}{name}.")

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; an absent one without a default is an error."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._wrong(name, "a positive number")
        return float(value)

    def positive_int(self, name: str, default: int | None = None) -> int:
        """An integer above 0; an absent one without a default is an error."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, "an integer above 0")
        return value

    def count(self, name: str, default: int) -> int:
        """An integer of at least 0."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, "an integer of at least 0")
        return value

    def number_or_zero(self, name: str) -> float:
        """A number of at least 0, 0 when absent."""
        return 0.0 if self.get(name) in (None, 0) else self.number(name)

    def boolean(self, name: str, *, default: bool) -> bool:
        """true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def string(self, name: str) -> str | None:
        """A string, None when absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty when absent."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of strings")
        return tuple(value)

    def ints(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them, none below 0; empty when absent."""
        value = self.get(name)
        if value is None:
            return ()
        items = value if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            raise self._wrong(name, "an integer of at least 0 or a list of them")
        return tuple(items)

    def one_of(self, name: str, supported: Sequence[str], *, default: str) -> str:
        """A string out of `supported`."""
        value = self.string(name)
        if value is None:
            return default
        if value not in supported:
            raise UsageError(
                f"config.json: {self._path}{name} {value!r} is not supported; supported: {', '.join(supported)}"
            )
        return value

    def refuse_if_set(self, name: str, why: str) -> None:
        """An error when the field is there and not null, false, 0 or empty."""
        if self.get(name):
            raise UsageError(f"config.json: {self._path}{name} is set; {why}")

    def _wrong(self, name: str, expected: str) -> UsageError:
        value = self.get(name)
        found = "is missing" if value is None else f"is {value!r}"
        return UsageError(f"config.json: {self._path}{name} {found}; it must be {expected}")
