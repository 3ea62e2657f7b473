"""Typed access to config.json: each wrong value is an error that names the field."""

from collections.abc import Callable

import pytest

from dist_infer.errors import UsageError
from dist_infer.models.config_fields import Fields


def test_values_and_defaults() -> None:
    fields = Fields({"i": 3, "f": 0.5, "b": True, "s": "x", "l": ["x", "y"], "n": None, "ids": [1, 0], "o": {"i": 4}})
    assert fields.positive_int("i") == 3
    assert fields.positive_int("n", default=7) == 7
    assert fields.number("f") == 0.5
    assert fields.number("i") == 3.0
    assert fields.number("absent", default=1e-6) == 1e-6
    assert fields.boolean("b", default=False) is True
    assert fields.boolean("n", default=True) is True
    assert (fields.string("s"), fields.string("n")) == ("x", None)
    assert (fields.strings("l"), fields.strings("absent")) == (("x", "y"), ())
    assert (fields.ints("ids"), fields.ints("i"), fields.ints("n")) == ((1, 0), (3,), ())
    assert fields.one_of("s", ("x", "y"), default="y") == "x"
    assert fields.one_of("n", ("x", "y"), default="y") == "y"
    section = fields.section("o")
    assert section is not None
    assert section.positive_int("i") == 4
    assert fields.section("n") is None
    fields.refuse_if_set("n", "never")


def test_zero_and_null_where_they_mean_something() -> None:
    fields = Fields({"zero": 0, "two": 2, "null": None, "half": 0.5})
    assert [fields.count(name, default=7) for name in ("zero", "two", "null", "absent")] == [0, 2, 7, 7]
    assert [fields.number_or_zero(name) for name in ("zero", "half", "null", "absent")] == [0.0, 0.5, 0.0, 0.0]
    assert [fields.is_written(name) for name in ("zero", "null", "absent")] == [True, True, False]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda f: f.positive_int("absent"), "config.json: absent is missing; it must be an integer above 0"),
        (lambda f: f.positive_int("zero"), "zero is 0; it must be an integer above 0"),
        (lambda f: f.positive_int("b"), "b is True"),
        (lambda f: f.positive_int("f"), "f is 0.5"),
        (lambda f: f.number("zero"), "a positive number"),
        (lambda f: f.number("b"), "a positive number"),
        (lambda f: f.number("inf"), "a positive number"),
        (lambda f: f.number_or_zero("s"), "a positive number"),
        (lambda f: f.count("b", default=1), "b is True; it must be an integer of at least 0"),
        (lambda f: f.count("f", default=1), "an integer of at least 0"),
        (lambda f: f.boolean("f", default=False), "true or false"),
        (lambda f: f.string("f"), "a string"),
        (lambda f: f.strings("s"), "a list of strings"),
        (lambda f: f.ints("s"), "or a list of them"),
        (lambda f: f.ints("negative"), r"negative is \[-1\]"),
        (lambda f: f.section("s"), "an object"),
        (lambda f: f.section("o").positive_int("i"), "config.json: o.i is missing"),
        (lambda f: f.one_of("s", ("y", "z"), default="y"), "s 'x' is not supported; supported: y, z"),
        (lambda f: f.refuse_if_set("o2", "why"), "o2 is set; why"),
    ],
)
def test_wrong_values_are_named(read: Callable[[Fields], object], message: str) -> None:
    values = {"zero": 0, "b": True, "f": 0.5, "inf": float("inf"), "s": "x", "negative": [-1], "o": {}, "o2": {"a": 1}}
    with pytest.raises(UsageError, match=message):
        read(Fields(values))
