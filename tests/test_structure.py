"""docs/structure.md is the map of the code: exactly one line a module, and no line for what is not there."""

import re
from collections import Counter
from pathlib import Path

from tests.source_tree import ROOT, is_package, source_files

PAGE = (ROOT / "docs" / "structure.md").read_text()
LINE = re.compile(r"^- `(?P<path>[\w/]+\.py)`: (?P<text>\S.*)$", re.MULTILINE)


def modules() -> list[str]:
    """All that a reader may look for: the product and the benchmarks; packages' __init__ files are not listed."""
    product = [path for path in source_files().values() if not is_package(path)]
    benchmarks = (ROOT / "benchmarks").glob("*.py")
    return sorted(path.relative_to(ROOT).as_posix() for path in [*product, *benchmarks])


def test_each_module_has_exactly_one_line() -> None:
    lines = Counter(match["path"] for match in LINE.finditer(PAGE))
    assert [path for path in modules() if lines[path] == 0] == [], "modules without a line"
    assert [path for path in lines if path not in modules()] == [], "lines without a module"
    assert [path for path, count in lines.items() if count > 1] == [], "modules with several lines"


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"`([\w./-]+\.(?:py|md|toml|json|sh|pml))`", PAGE))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_life_of_a_request_is_numbered_from_one() -> None:
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE)]
    assert len(numbers) >= 8
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_test_file_has_its_source() -> None:
    """tests/<folder>/test_<stem>.py tests <folder>/<stem>.py, or a file beside it; right under tests, perhaps all."""
    orphans = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder = path.parent.relative_to(ROOT / "tests")
        stem = path.name.removeprefix("test_")
        places = [ROOT / folder / stem, ROOT / "dist_infer" / folder / stem, path.with_name(stem)]
        if folder != Path() and not any(place.exists() for place in places):
            orphans.append(path.relative_to(ROOT).as_posix())
    assert orphans == []
