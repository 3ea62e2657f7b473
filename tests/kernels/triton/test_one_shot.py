"""The kernel of one shot: late ranks, and planted faults that its tests must see."""

import pytest

from tests.kernels import peer_code
from tests.kernels.all_reduce_cases import expect_wrong_bytes, run_ten_thousand_calls


@pytest.mark.gpu
def test_ten_thousand_calls_with_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ten_thousand_calls("one_shot", monkeypatch)


@pytest.mark.gpu
def test_an_early_read_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_wrong_bytes(
        "one_shot", None, monkeypatch, settle_words=peer_code.hasty_settle, load_words=peer_code.late_load
    )


@pytest.mark.gpu
def test_unwritten_scales_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_wrong_bytes("one_shot", "mxfp8", monkeypatch, zero_rest=peer_code.careless_zero)


@pytest.mark.gpu
def test_a_share_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sum of squares of a row that two programs share."""
    expect_wrong_bytes("one_shot", "residual_rms_norm", monkeypatch, await_quad=peer_code.hasty_quad)
