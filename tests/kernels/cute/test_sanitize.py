"""No kernel in CuTe DSL reads or writes outside of its memory, or shared memory that nothing orders."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from tests.kernels.cute.race_patterns import CLEAN, MISUNDERSTOOD, PATTERNS, RACES
from tests.kernels.cute.sanitize import CHECKS, LAUNCHES, TOOL, sanitize, unexplained

needs_tool = [
    pytest.mark.gpu,
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which(TOOL) is None, reason=f"host: {TOOL} is not installed"),
]
SOURCES = {"a.py": "first\nstats[0] = 1\nexchanged[0] = 2\nx = shared[1]\ns = SmemAllocator().allocate(x)\n"}


def test_what_is_handed_over_is_known_by_its_line() -> None:
    text = """
    ========= Error: Race reported between Write access at kernel_x+0x10 in a.py:2
    =========     and Read access at kernel_x+0x20 in a.py:4 [32 hazards]
    """
    assert unexplained(text, SOURCES) == []
    assert unexplained(text.replace("a.py:4", "a.py:3"), SOURCES) == ["a.py:3: exchanged[0] = 2"]
    assert unexplained(text.replace("a.py:2", "b.py:2"), SOURCES) == ["b.py:2: somewhere"]
    assert unexplained(text.replace(" in a.py:2", ""), SOURCES) == [":: somewhere"]
    assert unexplained(text.replace("a.py:4", "a.py:5"), SOURCES) == []
    assert unexplained(text.replace("a.py:4", "a.py:5").replace("a.py:2", "a.py:3"), SOURCES) == [
        "a.py:3: exchanged[0] = 2"
    ]
    allocations = text.replace("a.py:4", "a.py:5").replace("a.py:2", "a.py:5")
    assert unexplained(allocations, SOURCES) == ["a.py:5: s = SmemAllocator().allocate(x)"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize(
    ("check", "launches"),
    [pytest.param(check, launches, marks=needs_tool) for launches in LAUNCHES for check in CHECKS],
)
def test_nothing_is_found(check: str, launches: str, folder: Path) -> None:
    assert sanitize(check, launches, folder).found == []


@pytest.mark.parametrize("check", [pytest.param("racecheck", marks=needs_tool)])
def test_what_racecheck_sees_and_what_it_takes_for_a_race(check: str, folder: Path) -> None:
    """It reports the race, or a clean report would say nothing; and orders that it doesn't follow."""
    text = sanitize(check, "patterns", folder).text
    reported = {name for name in PATTERNS if f"kernel_cutlass_{name}_" in text}
    assert not reported & set(CLEAN)
    assert reported >= set(RACES)
    assert reported == {*RACES, *MISUNDERSTOOD}
