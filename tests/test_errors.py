"""Which exit code wins."""

import pytest

from dist_infer.errors import ExitCode, RequestError, UsageError, worst_exit_code


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 3], 3),
        ([3, 75, 0], 75),
        ([75, 2], 2),
        ([2, 75, 1], 1),
        ([0, 139], 1),
    ],
)
def test_worst_exit_code(codes: list[int], worst: int) -> None:
    assert worst_exit_code(codes) == worst


def test_errors_carry_what_the_answer_needs() -> None:
    error = RequestError("max_tokens is -1", param="max_tokens")
    assert (str(error), error.param, error.code, error.status) == (
        "max_tokens is -1",
        "max_tokens",
        "invalid_value",
        400,
    )
    assert UsageError("x").exit_code == ExitCode.USAGE
