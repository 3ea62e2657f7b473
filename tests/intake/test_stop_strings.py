"""Stop strings found across pieces; nothing of them is shown, whatever the pieces."""

import random
from collections.abc import Sequence

import pytest

from dist_infer.intake.stop_strings import StopStrings


def run(stops: Sequence[str], pieces: Sequence[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What was shown piece by piece, and the stop."""
    finder = StopStrings(stops, include=include)
    shown = []
    for piece in pieces:
        shown.append(finder.push(piece))
        if finder.found is not None:
            return shown, finder.found
    return [*shown, finder.finish()], None


def expected(stops: Sequence[str], text: str, *, include: bool = False) -> tuple[str, str | None]:
    """By trying all ends, the first one first, then the longest stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "found"),
    [
        (["ab"], ["xa", "bc"], ["x", ""], "ab"),
        (["ab"], ["xa", "c"], ["x", "ac", ""], None),
        (["ab"], ["xa"], ["x", "a"], None),
        (["\n"], ["one\ntwo"], ["one"], "\n"),
        (["abc", "b"], ["a", "b"], ["", "a"], "b"),
        (["bc", "abc"], ["ab", "cd"], ["", ""], "abc"),
        (["aab"], ["aa", "a", "a", "b"], ["", "a", "a", ""], "aab"),
        (["abab!"], ["ababab", "!"], ["ab", ""], "abab!"),
        (["🙂x"], ["🙂", "x"], ["", ""], "🙂x"),
        ([], ["a", ""], ["a", "", ""], None),
    ],
)
def test_by_hand(stops: list[str], pieces: list[str], shown: list[str], found: str | None) -> None:
    assert run(stops, pieces) == (shown, found)


def test_all_short_texts_and_cuts() -> None:
    source = random.Random(0)
    num_found = 0
    for _ in range(4000):
        stops = ["".join(source.choices("ab", k=source.randint(1, 4))) for _ in range(source.randint(1, 3))]
        text = "".join(source.choices("abc", k=source.randint(0, 12)))
        cuts = sorted(source.choices(range(len(text) + 1), k=source.randint(0, 4)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        include = source.random() < 0.5
        shown, found = run(stops, pieces, include=include)
        assert ("".join(shown), found) == expected(stops, text, include=include)
        num_found += found is not None
        # What is shown early is never taken back.
        assert expected(stops, text, include=include)[0].startswith("".join(shown[:-1]))
    assert 500 < num_found < 3900


def test_stops_before_the_finder_is_armed_do_not_count() -> None:
    finder = StopStrings(["ab", "\n\n"])
    assert finder.push("xaby\n", armed=False) + finder.push("\n", armed=False) == "xaby\n"
    assert finder.found is None
    # The second of two line ends may begin another pair, which is complete now.
    assert finder.push("\n") == "" and finder.found == "\n\n"


def test_a_long_stop_costs_a_step_a_character() -> None:
    stop = "a" * 100_000 + "b"
    finder = StopStrings([stop])
    text = "a" * 150_000
    assert finder.push(text) == "a" * 50_000
    assert finder.push("b") == "" and finder.found == stop
