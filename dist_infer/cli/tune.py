"""`dist-infer tune`: options in, exit code out."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from dist_infer.cli.environment import Environment
from dist_infer.errors import UsageError


def tune(
    what: Annotated[
        Literal["all-reduce", "attention", "moe"], typer.Argument(help="What to measure.", show_default=True)
    ] = "all-reduce",
    hidden: Annotated[
        str, typer.Option("--hidden", metavar="SIZES", help="Hidden sizes to measure, with commas between them.")
    ] = "4096,6144,7168,8192",
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="TOKENS", help="Largest step to measure.")] = 4096,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write the table. [default: standard output]"),
    ] = None,
    heads: Annotated[
        str,
        typer.Option("--heads", metavar="COUNTS", help="Query heads of a rank to measure, with commas between them."),
    ] = "16,128",
    layers: Annotated[
        str,
        typer.Option(
            "--layers",
            metavar="SIZES",
            help="Layers of experts: those that a rank holds x experts a token x hidden size x channels held of each.",
        ),
    ] = "128x8x2048x768,64x6x2048x1408",
) -> int:
    """Measure what a choice depends on: ways of an all-reduce between the GPUs of this launch, or on one GPU libraries
    of latent attention's decode or of experts, and what they are told.

    \b
    mpirun -n 2 dist-infer tune -o comm/all_reduce_measured.py
    dist-infer tune attention --heads 16
    dist-infer tune moe --layers 128x8x2048x768

    The table of an all-reduce is written; entries of other devices and other numbers of ranks stay as they are in it.
    The others are kept in the cache folder, where jobs find them: nothing is ever tuned while a job runs.
    """
    if what != "all-reduce":
        counts, shapes = parse_heads(heads), parse_layers(layers)
        environment = Environment.read(os.environ)
        environment.export(os.environ)
        from dist_infer.cli.kernel_tuning import tune_attention, tune_moe
        from dist_infer.kernels.tune_moe import Layer

        if what == "attention":
            return int(tune_attention(counts, environment))
        return int(tune_moe([Layer(*shape) for shape in shapes], environment))
    sizes = parse_sizes(hidden)
    if max_tokens < 1:
        raise UsageError(f"--max-tokens {max_tokens}: at least one token is needed")
    # Imported here: it brings torch and MPI.
    from dist_infer.cli.tuning import tune_ranks

    return tune_ranks(sizes, max_tokens, output)


def parse_heads(text: str) -> tuple[int, ...]:
    """Errors: UsageError for what is no list of numbers of heads."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 128 for word in words):
        raise UsageError(f"--heads {text}: numbers from 1 to 128 with commas between them are needed, as in 16,128")
    return tuple(int(word) for word in words)


def parse_layers(text: str) -> tuple[tuple[int, int, int, int], ...]:
    """(experts, experts a token, hidden size, channels) of each.

    Errors: UsageError for what is no list of layers.
    """
    found = []
    for word in text.split(","):
        sizes = [int(size) for size in word.strip().split("x") if size.isascii() and size.isdigit()]
        if word.strip().count("x") != 3 or len(sizes) != 4 or min(sizes) < 1 or sizes[1] > sizes[0]:
            raise UsageError(f"--layers {text}: four numbers for each layer are needed, as in 128x8x2048x768")
        found.append((sizes[0], sizes[1], sizes[2], sizes[3]))
    return tuple(found)


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
