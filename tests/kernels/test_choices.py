"""Libraries of the phases of an op, picked by each step and told once."""

import numpy as np
import pytest
import torch

from dist_infer.errors import UsageError
from dist_infer.kernels.carriers import PagedStep
from dist_infer.kernels.choices import PhasedSelection, SizedSelection, select, select_phases
from dist_infer.kernels.dispatch import Library, Phase, Sizes, Target, resolve
from dist_infer.kernels.measured import Measured

CPU = Target(device=torch.device("cpu"), dtype=torch.float32)


def few(sizes: Sizes) -> str | None:
    return None if sizes.get("seqs", 0) <= 2 else "takes up to 2 sequences"


LIBRARIES = (
    Library(name="few", function=max, supports=few, phases=(Phase.GENERATION,)),
    Library(name="any", function=max),
)


def chosen(orders: dict[str, str], lines: list[str]) -> PhasedSelection[object]:  # type: ignore[type-var]
    return select_phases("op", LIBRARIES, CPU, orders, lines.append, sizes={"seqs": 1})  # type: ignore[return-value]


def step(*query_lens: int) -> PagedStep:
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.full(len(query_lens), 9, np.int32)
    return PagedStep(
        query_start=torch.from_numpy(starts),
        kv_lens=torch.from_numpy(lens),
        page_table=torch.zeros(len(lens), 1, dtype=torch.int32),
        block_size=16,
        host_query_start=starts,
        host_kv_lens=lens,
    )


def test_each_phase_has_its_library_and_its_reasons_once() -> None:
    lines: list[str] = []
    selection = chosen({}, lines)
    told = [
        "op.context: any; few rejected (has no context phase)",
        "op.generation: few; any comes later",
    ]
    assert lines == told
    names = [[library.name for library in selection.pick_both(step(*lens))] for lens in ((1, 5), (1, 1, 1, 4), (1,))]
    assert names == [["any", "few"], ["any", "any"], ["any", "few"]]
    told.append("op.generation: any; few rejected (takes up to 2 sequences)")
    assert lines == told


def test_a_phase_with_an_order_of_its_own() -> None:
    assert chosen({"op.generation": "any"}, []).pick(Phase.GENERATION, {}).name == "any"
    assert chosen({"op": "any"}, []).pick(Phase.GENERATION, {}).name == "any"
    assert chosen({"op": "any", "op.generation": "few"}, []).pick(Phase.GENERATION, {}).name == "few"
    with pytest.raises(UsageError, match=r"no library can run op.context on cpu .*few rejected \(has no context"):
        chosen({"op": "few"}, [])


def test_an_op_without_phases() -> None:
    assert select("op", LIBRARIES, CPU, {}).pick().name == "few"
    assert select("op", LIBRARIES, CPU, {"op": "any"}).pick().name == "any"


def test_a_size_picks_its_library_once() -> None:
    many = Measured(device="cpu", op="op", library="b", sizes={"pairs": range(8, 99)}, figures="f")
    libraries = [Library(name=name, function=max, tactics=({"n": 1},)) for name in "ab"]
    selection = resolve("op", libraries, CPU, measured=[many])
    lines: list[str] = []
    sized = SizedSelection(selection=selection, size="pairs", on_choice=lines.append)
    assert [sized.pick(pairs).name for pairs in (1, 8, 2, 98, 99)] == ["a", "b", "a", "b", "a"]
    assert sized.pick(8) is sized.pick(8)
    assert lines == ["op: a; b comes later", "op: b; the fastest that was measured; a comes later"]
