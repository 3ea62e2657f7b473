"""`dist-infer run`: options in, exit code out."""

import os
from typing import Annotated

import typer

from dist_infer.cli import arguments
from dist_infer.cli.environment import Environment
from dist_infer.cli.options import RunOptions, parse_shard
from dist_infer.launch.signals import leave_when_drained


def run(
    context: typer.Context,
    input: Annotated[
        str | None,
        typer.Option(
            "-i",
            "--input",
            metavar="FILE",
            help='Requests, one JSON object a line: OpenAI batch form (chat or completions), or {"prompt": ...}. '
            "- is standard input, without a launcher only.",
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="A text to be continued, instead of -i; may be given several times. "
            "Greedy, at most 64 tokens; use -i for anything else.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Answers, one JSON object a line in OpenAI batch form, as they finish. - is standard output. "
            "With --prompt and no -o the answers are printed for reading.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output file that exists.")] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an output file that a stopped or failed run has left: only what has no answer is computed. "
            "Without such a file it starts anew.",
        ),
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="K/N",
            help="Answer every N-th line only, from line K on, as one of N jobs with an output each. K counts from 1.",
        ),
    ] = None,
    model: arguments.Model = None,
    load_format: arguments.LoadFormat = "auto",
    tp: arguments.TP = None,
    dp: arguments.DP = None,
    ep: arguments.EP = None,
    max_model_len: arguments.MaxModelLen = None,
    max_num_seqs: arguments.MaxNumSeqs = 64,
    max_num_tokens: arguments.MaxNumTokens = 2048,
    max_inflight: arguments.MaxInflight = None,
    moe_max_tokens: arguments.MoeMaxTokens = None,
    block_size: arguments.BlockSize = 16,
    num_kv_blocks: arguments.NumKVBlocks = None,
    kv_memory_fraction: arguments.KVMemoryFraction = None,
    kv_cache_dtype: arguments.KVCacheDType = "auto",
    no_prefix_cache: arguments.NoPrefixCache = False,
    graph_batch_sizes: arguments.GraphBatchSizes = None,
    eager: arguments.Eager = False,
    share_gpu: arguments.ShareGPU = False,
    no_peer_memory: arguments.NoPeerMemory = False,
    dtype: arguments.DType = "auto",
    quantize: arguments.Quantize = "none",
    kernels: arguments.Kernels = (),  # type: ignore[assignment]  # the parser makes a list of it
    batch_invariant: arguments.BatchInvariant = False,
    device: arguments.Device = "auto",
    seed: arguments.Seed = None,
    log_level: arguments.LogLevel = "info",
    step_timeout: arguments.StepTimeout = 300.0,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            help="A job that is told to stop finishes what has started, but for no longer than this; "
            "--resume answers the rest. [default: as long as it takes]",
        ),
    ] = None,
    summary: Annotated[
        str | None,
        typer.Option(
            "--summary",
            metavar="FILE",
            help="Times, rates, latencies and memory of the job as JSON, also of one that fails or is stopped.",
        ),
    ] = None,
    config: arguments.Config = None,
    print_config: arguments.PrintConfig = False,
) -> int:
    """Answer the requests of a file, or a few prompts, and end.

    \b
    dist-infer run --prompt "The capital of France is"
    mpirun -n 2 dist-infer run -i requests.jsonl -o answers.jsonl

    Exit code: 0 all done, 1 error, 2 wrong usage, 3 done but some requests failed, 75 stopped before the end.
    """
    options = RunOptions(
        **arguments.engine_values(context),
        input=input,
        prompts=tuple(prompt or ()),
        output=output,
        overwrite=overwrite,
        resume=resume,
        shard=parse_shard(shard),
        max_inflight=max_inflight,
        grace_s=grace,
        summary=summary,
    )
    environment = Environment.read(os.environ)
    if print_config:
        if environment.speaks:
            typer.echo(arguments.show_config(context), nl=False)
        return 0
    options.check_launcher(environment.launcher.name if environment.launcher else None)
    leave_when_drained()
    environment.export(os.environ)
    # The one import inside a function: it brings torch and MPI, which --help and wrong options must not wait for.
    from dist_infer.cli.job import run_job

    return int(run_job(options, environment))
