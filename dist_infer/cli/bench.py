"""`dist-infer bench`: options in, exit code out."""

import os
from typing import Annotated

import typer

from dist_infer.cli import arguments
from dist_infer.cli.bench_options import DEFAULT_INPUT_LEN, DEFAULT_NUM_PROMPTS, DEFAULT_OUTPUT_LEN, BenchOptions
from dist_infer.cli.environment import Environment


def bench(
    context: typer.Context,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help="ShareGPT conversations (a JSON array), or requests as `run` reads them, also trtllm-bench lines. "
            "[default: prompts of random ids]",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            "--num-prompts",
            metavar="COUNT",
            help=f"Requests that are measured. [default: all of the dataset, {DEFAULT_NUM_PROMPTS} random ones]",
        ),
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(
            "--input-len", metavar="TOKENS", help=f"Length of a random prompt. [default: {DEFAULT_INPUT_LEN}]"
        ),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            metavar="TOKENS",
            help="Tokens of an answer, of random and of ShareGPT prompts. "
            f"[default: {DEFAULT_OUTPUT_LEN}, or what ShareGPT says]",
        ),
    ] = None,
    range_ratio: Annotated[
        float | None,
        typer.Option(
            "--range-ratio",
            metavar="RATIO",
            help="Random lengths are drawn evenly from (1 - RATIO) to (1 + RATIO) times the length. [default: 0]",
        ),
    ] = None,
    prefix_len: Annotated[
        int | None,
        typer.Option(
            "--prefix-len", metavar="TOKENS", help="Tokens that all random prompts begin with, beside --input-len."
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            "--request-rate",
            metavar="PER SECOND",
            help="Requests come at random times with this rate. [default: all at once]",
        ),
    ] = None,
    max_inflight: arguments.MaxInflight = None,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="COUNT", help="Requests before the measured ones, not counted.")
    ] = 2,
    uniform_routing: Annotated[
        bool,
        typer.Option(
            "--uniform-routing",
            help="Each token goes to experts in turn, not to those that the router prefers: for dummy weights, whose "
            "router prefers a few.",
        ),
    ] = False,
    result: Annotated[
        str | None, typer.Option("--result", metavar="FILE", help="All figures as JSON, in the form of run --summary.")
    ] = None,
    model: arguments.Model = None,
    load_format: arguments.LoadFormat = "auto",
    tp: arguments.TP = None,
    dp: arguments.DP = None,
    ep: arguments.EP = None,
    max_model_len: arguments.MaxModelLen = None,
    max_num_seqs: arguments.MaxNumSeqs = 64,
    max_num_tokens: arguments.MaxNumTokens = 2048,
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
    seed: Annotated[
        int, typer.Option("--seed", metavar="INT", help="Seed of prompts, lengths, arrivals and dummy weights.")
    ] = 0,
    log_level: arguments.LogLevel = "info",
    step_timeout: arguments.StepTimeout = 300.0,
    config: arguments.Config = None,
    print_config: arguments.PrintConfig = False,
) -> int:
    """Measure throughput and latency.

    \b
    dist-infer bench --num-prompts 32 --input-len 64 --output-len 32
    mpirun -n 8 dist-infer bench --model FOLDER --load-format dummy --request-rate 4 --result figures.json

    Exit code: 0 measured, 1 error, 2 wrong usage, 75 stopped before the end.
    """
    options = BenchOptions(
        **arguments.engine_values(context),
        dataset=dataset,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        request_rate=request_rate,
        max_inflight=max_inflight,
        warmup=warmup,
        uniform_routing=uniform_routing,
        result=result,
    )
    environment = Environment.read(os.environ)
    if print_config:
        if environment.speaks:
            typer.echo(arguments.show_config(context), nl=False)
        return 0
    environment.export(os.environ)
    # The one import inside a function: it brings torch and MPI, which --help and wrong options must not wait for.
    from dist_infer.cli.bench_run import run_bench

    return int(run_bench(options, environment))
