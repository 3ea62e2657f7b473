"""Compiles Triton kernels for a GPU that isn't here, while this process interprets them.

Interpreting or compiling is settled when triton is imported, so another process compiles: this file as a program,
started by the first call. It takes pickled orders on standard input and answers on standard output.
"""

import atexit
import importlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_VARIABLE = "TRITON_INTERPRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler made. `asm` holds the texts "ttgir", "ptx" and "sass"; the figures are those of a thread."""

    asm: Mapping[str, str]
    num_registers: int
    spilled_bytes: int
    shared_bytes: int  # of a program


def compile_ahead(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], capability: int = 90, **options: int
) -> Compiled:
    """Compile a @triton.jit function of an importable module, as a call with such arguments would.

    `signature` gives the type of each argument that isn't in `constexprs`: "*bf16" is a pointer to 16-byte aligned
    data, "i32" any integer, "i32:16" one that 16 divides, "fp32" a number. What a call would pass as None, True or 1
    is a constexpr. `options` are num_warps, num_stages and the like.

    Errors: RuntimeError with the compiler's words.
    """
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    order = {
        "module": kernel.__module__,
        "name": kernel.__name__,
        "signature": dict(signature),
        "constexprs": dict(constexprs),
        "capability": capability,
        "options": options,
    }
    worker = _worker()
    if worker.stdin is None or worker.stdout is None:
        raise RuntimeError("the compiling process has no pipes")
    pickle.dump(order, worker.stdin)
    worker.stdin.flush()
    answer = pickle.load(worker.stdout)
    if isinstance(answer, str):
        raise RuntimeError(f"{kernel.__module__}.{kernel.__name__} does not compile: {answer}")
    return Compiled(**answer)


@cache
def _worker() -> "subprocess.Popen[bytes]":
    surroundings = {name: value for name, value in os.environ.items() if name != _VARIABLE}
    command = [sys.executable, "-P", __file__]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=surroundings)
    atexit.register(worker.kill)
    return worker


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print must not get among the answers
    sys.path.append(str(Path(__file__).parents[2]))
    while True:
        try:
            order = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: object = _compile(**order)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


def _compile(
    module: str,
    name: str,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    capability: int,
    options: Mapping[str, int],
) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    while hasattr(kernel, "fn") and not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    names = kernel.arg_names
    unknown = sorted({*signature, *constexprs} ^ set(names))
    if unknown:
        raise ValueError(f"arguments {unknown} are missing, or not the kernel's")
    types = {own: signature[own].removesuffix(":16") if own in signature else "constexpr" for own in names}
    aligned = [own for own in signature if signature[own].startswith("*") or signature[own].endswith(":16")]
    divisible = {(names.index(own),): [["tt.divisibility", 16]] for own in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs=dict(constexprs), attrs=divisible)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(made.asm["cubin"])
        cubin.flush()
        usage = _output_of(tools / "cuobjdump", "--dump-resource-usage", cubin.name)
        sass = _output_of(tools / "cuobjdump", "--dump-sass", cubin.name)
    registers, stack = (re.search(rf"{key}:(\d+)", usage) for key in ("REG", "STACK"))
    if registers is None or stack is None:
        raise ValueError(f"no register count in {usage!r}")
    return {
        "asm": {"ttgir": made.asm["ttgir"], "ptx": made.asm["ptx"], "sass": sass},
        "num_registers": int(registers[1]),
        "spilled_bytes": int(stack[1]),
        "shared_bytes": made.metadata.shared,
    }


def _output_of(tool: Path, *arguments: str) -> str:
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    _main()
