"""`dist-infer tune`: options in, exit code out."""

from pathlib import Path
from typing import Annotated

import typer

from dist_infer.errors import UsageError


def tune(
    hidden: Annotated[
        str, typer.Option("--hidden", metavar="SIZES", help="Hidden sizes to measure, with commas between them.")
    ] = "4096,6144,7168,8192",
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="TOKENS", help="Largest step to measure.")] = 4096,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write the table. [default: standard output]"),
    ] = None,
) -> int:
    """Measure the ways of an all-reduce between the GPUs of this launch, and write the table that chooses among them.

    \b
    mpirun -n 2 dist-infer tune -o comm/all_reduce_measured.py

    Entries of other devices and other numbers of ranks stay as they are in the table that is in use.
    """
    sizes = parse_sizes(hidden)
    if max_tokens < 1:
        raise UsageError(f"--max-tokens {max_tokens}: at least one token is needed")
    # Imported here: it brings torch and MPI.
    from dist_infer.cli.tuning import tune_ranks

    return tune_ranks(sizes, max_tokens, output)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Errors: UsageError for what is no list of hidden sizes that the kernels take."""
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--hidden {text}: numbers with commas between them are needed, as in 4096,7168") from None
    for size in sizes:
        if size < 64 or size % 64:
            raise UsageError(f"--hidden {text}: {size} is not a positive multiple of 64")
    return sizes
