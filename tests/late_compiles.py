"""Notes of kernels that are made ready at their first launch: what Triton or CuTe DSL compiles, or Triton loads."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def noted_compiles() -> Iterator[list[str]]:
    """The kernels compiled meanwhile, also those that Triton finds in its cache on disk: each has kept a step waiting.

    A launch whose variant this process has used before notes nothing.
    """
    from triton import knobs

    noted: list[str] = []

    def note(*, fn: Any, compile: Mapping[str, Any], **_: object) -> None:
        noted.append(f"triton {fn.name} {compile['signature']} {compile['constants']} {compile['configs']}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "jit_cache_hook", note)
        if importlib.util.find_spec("cutlass"):
            cute: Any = importlib.import_module("cutlass.cute")
            patch.setattr(cute, "compile", _noting(cute.compile, noted))
        yield noted


def _noting(compile_kernel: Callable[..., Any], noted: list[str]) -> Callable[..., Any]:
    def run(kernel: object, *args: object, **options: object) -> object:
        noted.append(f"cute {getattr(kernel, 'variant', kernel)}")
        return compile_kernel(kernel, *args, **options)

    return run
