"""Figures of steps, of made-up times."""

from dataclasses import replace

import pytest

from dist_infer.comm.agreement import EAGER
from dist_infer.step_floor import StepFloor
from dist_infer.step_meter import StepTimes
from dist_infer.step_profile import DeviceWork, summarize
from dist_infer.step_report import StepReport, libraries_by_op
from dist_infer.types import Batch
from dist_infer.warmup import make_batch
from tests.step_loop import alone

FLOOR = StepFloor(dense_bytes=1e9, expert_bytes=2e9, share_of_token=0.5, kv_token_bytes=1e6)


def times(lens: list[tuple[int, int]], busy_us: float, gap_us: float | None = 1.0, *, bucket: int = EAGER) -> StepTimes:
    batch = make_batch(lens, block_size=4)
    return StepTimes(batch=batch, decision=alone(batch, bucket), busy_us=busy_us, gap_us=gap_us)


def test_decode_steps_give_figures_and_others_are_counted() -> None:
    report = StepReport(FLOOR, tp=1, tb_per_s=2.0)
    report.add(times([(5, 5)], 1e6, None))
    report.add(times([(1, 100)], 2000.0, 7.0, bucket=1))
    report.add(times([(1, 100), (1, 150), (1, 50)], 4000.0, 3.0))
    assert report.usual_decode == (2, 100)
    fields = report.fields(None)
    decode, others = fields["decode"], fields["others"]
    assert isinstance(decode, dict) and isinstance(others, dict)
    assert (decode["steps"], decode["as_graphs"], decode["sequences_mean"], decode["kv_tokens_mean"]) == (2, 1, 2, 200)
    assert decode["busy_share"] == pytest.approx(6000 / 6010)
    assert decode["busy_us"]["mean"] == pytest.approx(3000) and decode["gap_us"]["max"] == pytest.approx(7)
    read_bytes = (1e9 + 2e9 * 0.5 + 100e6) + (1e9 + 2e9 * 0.875 + 300e6)
    assert decode["floor_share"] == pytest.approx(read_bytes / 2e12 / 6010e-6)
    assert (others["steps"], others["tokens_mean"]) == (1, 5)
    assert fields["profile"] is None


def test_holes_between_kernels_are_not_busy() -> None:
    report = StepReport(FLOOR, tp=1, tb_per_s=None)
    report.add(times([(1, 100)], 90.0, 10.0))
    profile = summarize([DeviceWork("a", 0.0, 30.0), DeviceWork("b", 70.0, 80.0)])
    fields = report.fields(profile)
    assert isinstance(fields["decode"], dict) and isinstance(fields["profile"], dict)
    assert fields["decode"]["busy_share"] == pytest.approx(0.9 * 0.5)
    assert fields["decode"]["floor_share"] is None
    assert fields["profile"]["num_kernels"] == 2
    assert fields["profile"]["kernels"][0] == {"name": "a", "launches": 1, "us": 30.0}


def test_rows_of_all_groups_hit_experts() -> None:
    report = StepReport(FLOOR, tp=2, tb_per_s=2.0)
    step = times([(1, 100)], 1000.0, 0.0)
    report.add(replace(step, decision=replace(step.decision, rank_tokens=(1, 1, 1, 1))))
    fields = report.fields(None)
    assert isinstance(fields["decode"], dict)
    assert fields["decode"]["floor_share"] == pytest.approx((1e9 + 2e9 * 0.75 + 1e8) / 2e12 / 1e-3)


def test_a_new_start_and_a_step_of_nobody() -> None:
    report = StepReport(FLOOR, tp=1, tb_per_s=2.0)
    report.add(times([(1, 100)], 90.0, 10.0))
    report.start()
    dummy = Batch.dummy()
    report.add(StepTimes(batch=dummy, decision=alone(dummy, EAGER), busy_us=1.0, gap_us=1.0))
    fields = report.fields(None)
    assert isinstance(fields["decode"], dict) and isinstance(fields["others"], dict)
    assert report.usual_decode == (0, 0)
    assert fields["decode"]["steps"] == fields["others"]["steps"] == 0
    assert (
        fields["decode"]["busy_share"] is fields["decode"]["sequences_mean"] is fields["decode"]["floor_share"] is None
    )


def test_libraries_of_the_lines_of_choices() -> None:
    lines = [
        "rms_norm: triton; torch comes later",
        "linear: torch",
        "linear: triton; torch comes later",
        "linear: torch",
        "paged_attention.context: triton; torch rejected (x: y; z)",
        "a weight 5 -> 7 isn't quantised: too small",
    ]
    assert libraries_by_op(lines) == {
        "rms_norm": ["triton"],
        "linear": ["torch", "triton"],
        "paged_attention.context": ["triton"],
    }
