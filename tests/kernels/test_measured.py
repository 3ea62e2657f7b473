"""Entries of measurements: what they hold for, and that the committed ones name what there is."""

from collections.abc import Mapping
from importlib import import_module

import pytest

from dist_infer.kernels.choices import MEASURED
from dist_infer.kernels.measured import Measured, entries_for
from dist_infer.kernels.orders import NAMES, OPS
from tests.source_tree import ROOT

ENTRY = Measured(device="d", op="o", library="l", sizes={"heads": range(9, 17), "seqs": range(1, 5)}, figures="f")


@pytest.mark.parametrize(
    ("sizes", "holds"),
    [
        ({"heads": 16, "seqs": 4}, True),
        ({"heads": 8, "seqs": 4}, False),
        ({"heads": 16, "seqs": 5}, False),
        ({"heads": 16}, False),
        ({"heads": 9, "seqs": 1, "other": 7}, True),
    ],
)
def test_an_entry_holds_for_sizes_in_its_ranges(sizes: dict[str, int], holds: bool) -> None:
    assert ENTRY.holds(sizes) is holds


def test_a_layer_keeps_the_entries_that_it_may_need() -> None:
    def found(device: str = "d", op: str = "o", heads: int = 16) -> int:
        return len(entries_for((ENTRY,), device=device, op=op, geometry={"heads": heads}))

    assert found() == 1
    assert found(device="e") == found(op="p") == found(heads=17) == 0


def test_committed_entries_name_ops_libraries_and_files_that_exist() -> None:
    assert MEASURED
    for entry in MEASURED:
        assert entry.op in NAMES
        module, attribute = OPS[entry.op.split(".")[0]]
        libraries = getattr(import_module(f"dist_infer.kernels.{module}"), attribute)
        for own in libraries.values() if isinstance(libraries, Mapping) else (libraries,):  # by format
            assert entry.library in {library.name for library in own}
        files = [word.strip("(),") for word in entry.figures.split() if ".json" in word]
        assert files and all((ROOT / "benchmarks" / "results" / name).exists() for name in files)
