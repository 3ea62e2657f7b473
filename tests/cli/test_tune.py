"""Options of `dist-infer tune`."""

import pytest

from dist_infer.cli.tune import parse_heads, parse_layers, parse_sizes, tune
from dist_infer.errors import UsageError


def test_sizes_are_read() -> None:
    assert parse_sizes("7168") == (7168,) and parse_sizes("64, 4096") == (64, 4096)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "numbers with commas"),
        ("4096;7168", "numbers with commas"),
        ("4096,100", "100 is not a positive multiple of 64"),
        ("0", "0 is not"),
        ("-64", "-64 is not"),
    ],
)
def test_what_is_no_list_of_sizes_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_sizes(text)


def test_no_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one token"):
        tune(hidden="4096", max_tokens=0)


def test_heads_are_read() -> None:
    assert parse_heads("16, 128") == (16, 128)
    for wrong in ("", "0", "129", "16;8", "-1"):
        with pytest.raises(UsageError, match="numbers from 1 to 128"):
            parse_heads(wrong)


def test_layers_of_experts_are_read() -> None:
    assert parse_layers("128x8x2048x768, 4x4x64x64") == ((128, 8, 2048, 768), (4, 4, 64, 64))
    for wrong in ("", "8", "8x2x64", "8x2x64x64x1", "8x9x64x64", "8x0x64x64", "8xax64x64", "8x2x64x-1"):
        with pytest.raises(UsageError, match="four numbers for each layer"):
            parse_layers(wrong)
