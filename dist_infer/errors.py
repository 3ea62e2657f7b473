"""Errors that cross module borders, and the exit codes of the job.

An error that a user can cure is a `DistInferError`: it is shown as one message without a traceback. Anything else that
escapes is a defect of ours and is shown with its traceback.
"""

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What a rank, and so the whole job, ends with."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    FAILED_REQUESTS = 3
    DRAINED = 75


_WORST_FIRST = (ExitCode.ERROR, ExitCode.USAGE, ExitCode.DRAINED, ExitCode.FAILED_REQUESTS, ExitCode.DONE)


def worst_exit_code(codes: Iterable[int]) -> ExitCode:
    """The code that all ranks leave with: 1, then 2, then 75, then 3, then 0. An unknown code counts as 1."""
    seen = {code if code in set(_WORST_FIRST) else ExitCode.ERROR for code in codes}
    return next(code for code in _WORST_FIRST if code in seen or code is ExitCode.DONE)


class DistInferError(Exception):
    """An error whose message names the thing that is wrong and the fix."""

    exit_code = ExitCode.ERROR


class UsageError(DistInferError):
    """Wrong options or a wrong environment: nothing was started, exit code 2."""

    exit_code = ExitCode.USAGE


class CheckpointError(DistInferError):
    """A checkpoint that can't be loaded; the message names file and tensor."""


class RequestError(DistInferError):
    """One request is bad; only that request is answered with it.

    `param` is the field of the request body, `code` a short word as the OpenAI API uses, `status` the HTTP status.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class PeerFailedError(DistInferError):
    """Another rank has failed, died or stalled: leave without a collective (rules 17 and 18)."""
