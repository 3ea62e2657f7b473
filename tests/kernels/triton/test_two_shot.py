"""The kernel of two shots: late ranks, and planted faults that its tests must see."""

import pytest

from tests.kernels import peer_code
from tests.kernels.all_reduce_cases import expect_wrong_bytes, run_ten_thousand_calls


@pytest.mark.gpu
def test_ten_thousand_calls_with_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ten_thousand_calls("two_shot", monkeypatch)


@pytest.mark.gpu
def test_a_flag_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_wrong_bytes("two_shot", None, monkeypatch, await_flag=peer_code.deaf_await, load_words=peer_code.late_load)


@pytest.mark.gpu
def test_a_missing_rounding_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expect_wrong_bytes("two_shot", "residual_rms_norm", monkeypatch, row_sum=peer_code.unrounded_sum)
