"""`dist-infer run`: options in, exit code out."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, get_args, get_origin, get_type_hints

import typer

from dist_infer.cli.config_file import Kind, Setting, format_config, read_config
from dist_infer.cli.environment import Environment
from dist_infer.cli.options import (
    DEFAULT_KV_MEMORY_FRACTION,
    DeviceOption,
    DTypeOption,
    LoadFormat,
    LogLevelOption,
    RunOptions,
    parse_shard,
)

_KINDS: Mapping[object, Kind] = MappingProxyType({bool: "flag", int: "integer", float: "number", list[str]: "texts"})
_FRACTIONS = ", ".join(f"{fraction:g} on {device}" for device, fraction in DEFAULT_KV_MEMORY_FRACTION.items())


def settings() -> list[Setting]:
    """The options of `run` that may stand in a file."""
    found = []
    for name, hint in get_type_hints(run, include_extras=True).items():
        if get_origin(hint) is not Annotated or name in ("config", "print_config"):
            continue
        declared, option = get_args(hint)
        names = (option.default, *(option.param_decls or ()))  # in Annotated the first name stands where a default may
        spelling = next(name for name in names if str(name).startswith("--"))
        kinds = (_KINDS.get(one) for one in (declared, *get_args(declared)))
        found.append(Setting(name, spelling, next((kind for kind in kinds if kind), "text")))
    return found


def _load_config(context: typer.Context, path: str | None) -> str | None:
    """Values of the file become the defaults of this call; it is read before the other options."""
    if path is not None:
        context.default_map = read_config(path, settings())
    return path


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
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model folder in Hugging Face form (config.json, safetensors, tokenizer.json), GGUF file of a Llama, "
            "or id of a model in the local Hugging Face cache; nothing is downloaded. "
            "[default: the embedded SmolLM2-135M-Instruct]",
        ),
    ] = None,
    load_format: Annotated[
        LoadFormat,
        typer.Option("--load-format", help="dummy: seeded random weights, from a config.json alone."),
    ] = "auto",
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", metavar="RANKS", help="Ranks that share one copy of the model. [default: world size / dp]"
        ),
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option("--dp", metavar="GROUPS", help="Groups with requests and KV cache of their own. [default: 1]"),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            "--ep",
            metavar="PARTS",
            help="Parts that the experts are dealt to; each part is shared by world size / ep ranks. "
            "[default: world size]",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            metavar="TOKENS",
            help="Longest sequence, prompt and answer together. [default: what the model and the KV cache allow]",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option("--max-num-seqs", metavar="COUNT", help="Sequences of one step, per group.")
    ] = 64,
    max_num_tokens: Annotated[
        int, typer.Option("--max-num-tokens", metavar="TOKENS", help="Tokens of one step, per group.")
    ] = 2048,
    max_inflight: Annotated[
        int | None,
        typer.Option(
            "--max-inflight",
            metavar="COUNT",
            help="Requests that are read and not yet answered, of all groups. [default: 4 x max-num-seqs x dp]",
        ),
    ] = None,
    moe_max_tokens: Annotated[
        int | None,
        typer.Option(
            "--moe-max-tokens",
            metavar="TOKENS",
            help="Tokens of all ranks that a layer of experts takes at a time: less memory, more exchanges. "
            "[default: all of a step]",
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option("--block-size", metavar="TOKENS", help="Tokens of one KV cache block.")
    ] = 16,
    num_kv_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-kv-blocks",
            metavar="COUNT",
            help="KV cache blocks, per group. [default: what --kv-memory-fraction holds]",
        ),
    ] = None,
    kv_memory_fraction: Annotated[
        float | None,
        typer.Option(
            "--kv-memory-fraction",
            metavar="SHARE",
            help="Share of the memory left after loading that the KV cache takes, above 0, at most 1. "
            f"[default: {_FRACTIONS}]",
        ),
    ] = None,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt anew, reuse no KV blocks.")
    ] = False,
    dtype: Annotated[
        DTypeOption, typer.Option("--dtype", help="Weights and activations; auto: the checkpoint's, float32 on CPU.")
    ] = "auto",
    device: Annotated[
        DeviceOption, typer.Option("--device", help="auto: cuda where there is one for each rank, else cpu.")
    ] = "auto",
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="INT",
            help="Seed of requests without one, and of dummy weights. [default: a fresh one, kept in OUT.run.json]",
        ),
    ] = None,
    log_level: Annotated[LogLevelOption, typer.Option("--log-level", help="Least level that is logged.")] = "info",
    step_timeout: Annotated[
        float,
        typer.Option("--step-timeout", metavar="SECONDS", help="The job is aborted when a step takes longer."),
    ] = 300.0,
    summary: Annotated[
        str | None,
        typer.Option(
            "--summary",
            metavar="FILE",
            help="Times, rates, latencies and memory of the job as JSON, also of one that fails or is stopped.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            is_eager=True,
            callback=_load_config,
            help="Options from a TOML file, named as here without the dashes; the command line wins.",
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all options as such a file, and run nothing.")
    ] = False,
) -> int:
    """Answer the requests of a file, or a few prompts, and end.

    \b
    dist-infer run --prompt "The capital of France is"
    mpirun -n 2 dist-infer run -i requests.jsonl -o answers.jsonl

    Exit code: 0 all done, 1 error, 2 wrong usage, 3 done but some requests failed, 75 stopped before the end.
    """
    options = RunOptions(
        input=input,
        prompts=tuple(prompt or ()),
        output=output,
        overwrite=overwrite,
        resume=resume,
        shard=parse_shard(shard),
        model=model,
        load_format=load_format,
        tp=tp,
        dp=dp,
        ep=ep,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        moe_max_tokens=moe_max_tokens,
        max_inflight=max_inflight,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        kv_memory_fraction=kv_memory_fraction,
        prefix_cache=not no_prefix_cache,
        dtype=dtype,
        device=device,
        seed=seed,
        log_level=log_level,
        step_timeout_s=step_timeout,
        summary=summary,
    )
    environment = Environment.read(os.environ)
    if print_config:
        if environment.speaks:
            typer.echo(format_config(settings(), context.params), nl=False)
        return 0
    options.check_launcher(environment.launcher.name if environment.launcher else None)
    # The one import inside a function: it brings torch and MPI, which --help and wrong options must not wait for.
    from dist_infer.cli.job import run_job

    return int(run_job(options, environment))
