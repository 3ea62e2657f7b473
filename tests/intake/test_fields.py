import pytest

from dist_infer.errors import RequestError
from dist_infer.intake.fields import read_flag, read_int, read_number, show


def test_null_counts_as_absent() -> None:
    body = {"a": None}
    assert read_int(body, "a", low=0, high=9) is None
    assert read_number(body, "a", low=0, high=1) is None
    assert read_flag(body, "a") is False
    assert read_flag(body, "a", default=True) is True


@pytest.mark.parametrize("value", [0, 9])
def test_bounds_of_an_integer_belong_to_it(value: int) -> None:
    assert read_int({"a": value}, "a", low=0, high=9) == value


@pytest.mark.parametrize(("value", "code"), [(-1, "invalid_value"), (10, "invalid_value"), (1.0, "invalid_type")])
def test_wrong_integer_names_field_and_value(value: object, code: str) -> None:
    with pytest.raises(RequestError, match=f"a is {value}") as caught:
        read_int({"a": value}, "a", low=0, high=9)
    assert (caught.value.param, caught.value.code) == ("a", code)


def test_a_bool_is_no_number() -> None:
    with pytest.raises(RequestError, match="true"):
        read_int({"a": True}, "a", low=0, high=9)
    with pytest.raises(RequestError, match="true"):
        read_number({"a": True}, "a", low=0, high=9)
    with pytest.raises(RequestError, match="true or false"):
        read_flag({"a": 1}, "a")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, -0.1, 0])
def test_number_outside_its_range_is_refused(value: float) -> None:
    with pytest.raises(RequestError) as caught:
        read_number({"a": value}, "a", low=0, high=1, above_low=True)
    assert caught.value.param == "a"


def test_a_value_is_shown_cut() -> None:
    assert show("x" * 1000).startswith('"xxx')
    assert len(show("x" * 1000)) < 70


def test_a_value_nested_beyond_the_encoder_is_shown_as_such() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert show(value) == "a deeply nested value"
