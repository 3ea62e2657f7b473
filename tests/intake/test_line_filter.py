import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest

from dist_infer.errors import DistInferError
from dist_infer.intake.batch_file import open_lines
from dist_infer.intake.line_filter import LineFilter, Shard
from dist_infer.intake.resume import AnsweredLines
from tests.intake.record_samples import digest


def filtered(path: Path, *, shard: Shard | None = None, answered: Sequence[tuple[int, str]] = ()) -> LineFilter:
    known = AnsweredLines()
    for line, text in answered:
        known.add(line, digest(text))
    return LineFilter(open_lines(str(path)), shard=shard or Shard(), answered=known)


def numbers(lines: LineFilter) -> list[int]:
    taken = []
    while not lines.ended():
        assert lines.ready()
        line = lines.take()
        if line is not None:
            taken.append(line.number)
    lines.close()
    return taken


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_every_line_is_in_exactly_one_shard(tmp_path: Path, count: int) -> None:
    path = tmp_path / "in"
    path.write_text("".join(f"{n}\n" if n % 5 else "\n" for n in range(1, 18)))
    shards = [numbers(filtered(path, shard=Shard(number, count))) for number in range(1, count + 1)]
    assert sorted(chain.from_iterable(shards)) == [n for n in range(1, 18) if n % 5]
    assert shards[0][:1] == [1]
    assert max(map(len, shards)) - min(map(len, shards)) <= 2


def test_lines_that_have_been_answered_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nb\nb\nc\n")
    assert numbers(filtered(tmp_path / "in", answered=[(2, "b"), (4, "c")])) == [1, 3]
    assert numbers(filtered(tmp_path / "in", shard=Shard(1, 2), answered=[(1, "a")])) == [3]


def test_a_line_that_is_another_one_now_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a\nb\n")
    with pytest.raises(DistInferError, match="line 2 .*has changed"):
        numbers(filtered(tmp_path / "in", answered=[(2, "x")]))


def test_a_long_run_of_answered_lines_is_skipped_in_parts(tmp_path: Path) -> None:
    texts = [json.dumps(n) for n in range(25_000)]
    (tmp_path / "in").write_text("\n".join(texts))
    lines = filtered(tmp_path / "in", answered=[(n, text) for n, text in enumerate(texts[:-1], 1)])
    assert [lines.take(), lines.take()] == [None, None]
    line = lines.take()
    assert line is not None and line.number == 25_000
    assert lines.take() is None and lines.ended()
    lines.close()
