"""What is measured: one op of each kind of the table; the measuring itself runs in tests/cli/test_tuning.py."""

from dist_infer.comm.all_reduce import FusedOp
from dist_infer.comm.all_reduce_tuning import OPS, STRATEGIES, TOKENS
from dist_infer.comm.strategy import Strategy


def test_every_kind_is_measured_once() -> None:
    assert sorted(op.kind for op in OPS) == sorted({op.kind for op in FusedOp})


def test_only_ways_of_one_numeric_class_are_compared() -> None:
    assert set(STRATEGIES) <= {Strategy.GATHER, Strategy.ONE_SHOT, Strategy.TWO_SHOT}
    assert list(TOKENS) == sorted(set(TOKENS))
