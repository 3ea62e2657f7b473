"""Options that several commands take, as the parser declares them, and how they become values."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from dist_infer.cli import options
from dist_infer.cli.config_file import Kind, Setting, format_config, read_config
from dist_infer.cli.options import DEFAULT_KV_MEMORY_FRACTION, EngineOptions

_KINDS: Mapping[object, Kind] = MappingProxyType({bool: "flag", int: "integer", float: "number", list[str]: "texts"})
_FRACTIONS = ", ".join(f"{fraction:g} on {device}" for device, fraction in DEFAULT_KV_MEMORY_FRACTION.items())


def settings(command: Callable[..., object]) -> list[Setting]:
    """The options of a command that may stand in a file."""
    found = []
    for name, hint in get_type_hints(command, include_extras=True).items():
        if get_origin(hint) is not Annotated or name in ("config", "print_config"):
            continue
        declared, option = get_args(hint)
        names = (option.default, *(option.param_decls or ()))  # in Annotated the first name stands where a default may
        spelling = next(name for name in names if str(name).startswith("--"))
        kinds = (_KINDS.get(one) for one in (declared, *get_args(declared)))
        found.append(Setting(name, spelling, next((kind for kind in kinds if kind), "text")))
    return found


def load_config(context: typer.Context, path: str | None) -> str | None:
    """Values of the file become the defaults of this call; it is read before the other options."""
    if path is not None and context.command.callback is not None:
        context.default_map = read_config(path, settings(context.command.callback))
    return path


def show_config(context: typer.Context) -> str:
    """All options of this call as such a file."""
    if context.command.callback is None:
        raise ValueError("a command without a function has no options")
    return format_config(settings(context.command.callback), context.params)


def engine_values(context: typer.Context) -> dict[str, Any]:
    """The fields of EngineOptions as this call gives them."""
    given = context.params
    renamed = {
        "prefix_cache": not given["no_prefix_cache"],
        "peer_memory": not given["no_peer_memory"],
        "step_timeout_s": given["step_timeout"],
        "graph_batch_sizes": options.parse_sizes(given["graph_batch_sizes"]),
        "kernels": tuple(given["kernels"] or ()),
    }
    names = (field.name for field in fields(EngineOptions))
    return {name: renamed[name] if name in renamed else given[name] for name in names}


Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model folder in Hugging Face form (config.json, safetensors, tokenizer.json), GGUF file of a "
        "Llama or Qwen, or id of a model in the local Hugging Face cache; nothing is downloaded. "
        "[default: the embedded SmolLM2-135M-Instruct]",
    ),
]
LoadFormat = Annotated[
    options.LoadFormat,
    typer.Option("--load-format", help="dummy: seeded random weights, from a config.json alone."),
]
TP = Annotated[
    int | None,
    typer.Option("--tp", metavar="RANKS", help="Ranks that share one copy of the model. [default: world size / dp]"),
]
DP = Annotated[
    int | None,
    typer.Option("--dp", metavar="GROUPS", help="Groups with requests and KV cache of their own. [default: 1]"),
]
EP = Annotated[
    int | None,
    typer.Option(
        "--ep",
        metavar="PARTS",
        help="Parts that the experts are dealt to; each part is shared by world size / ep ranks. [default: world size]",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len",
        metavar="TOKENS",
        help="Longest sequence, prompt and answer together. [default: what the model and the KV cache allow]",
    ),
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", metavar="COUNT", help="Sequences of one step, per group.")]
MaxNumTokens = Annotated[int, typer.Option("--max-num-tokens", metavar="TOKENS", help="Tokens of one step, per group.")]
MaxInflight = Annotated[
    int | None,
    typer.Option(
        "--max-inflight",
        metavar="COUNT",
        help="Requests that are read and not yet answered, of all groups. [default: 4 x max-num-seqs x dp]",
    ),
]
MoeMaxTokens = Annotated[
    int | None,
    typer.Option(
        "--moe-max-tokens",
        metavar="TOKENS",
        help="Tokens of all ranks that a layer of experts takes at a time: less memory, more exchanges. "
        "[default: all of a step]",
    ),
]
BlockSize = Annotated[int, typer.Option("--block-size", metavar="TOKENS", help="Tokens of one KV cache block.")]
NumKVBlocks = Annotated[
    int | None,
    typer.Option(
        "--num-kv-blocks",
        metavar="COUNT",
        help="KV cache blocks, per group. [default: what --kv-memory-fraction holds]",
    ),
]
KVMemoryFraction = Annotated[
    float | None,
    typer.Option(
        "--kv-memory-fraction",
        metavar="SHARE",
        help="Share of the memory left after loading that the KV cache takes, above 0, at most 1. "
        f"[default: {_FRACTIONS}]",
    ),
]
KVCacheDType = Annotated[
    options.KVCacheDTypeOption,
    typer.Option(
        "--kv-cache-dtype",
        help="auto and bf16: that of the activations. fp8: E4M3 with a scale a layer, half the memory, for models with "
        "latent attention; what is cached loses accuracy (docs/operating.md).",
    ),
]
NoPrefixCache = Annotated[
    bool, typer.Option("--no-prefix-cache", help="Compute every prompt anew, reuse no KV blocks.")
]
GraphBatchSizes = Annotated[
    str | None,
    typer.Option(
        "--graph-batch-sizes",
        metavar="N,N,...",
        help="Numbers of sequences for which a decode step is captured as a CUDA graph; a batch takes the next larger "
        "one. [default: 1, 2, 4, 8 and more, up to --max-num-seqs]",
    ),
]
Eager = Annotated[bool, typer.Option("--eager", help="Launch decode steps kernel by kernel, without CUDA graphs.")]
ShareGPU = Annotated[
    bool, typer.Option("--share-gpu", help="Let several ranks have one GPU: slow, for tests of layouts.")
]
NoPeerMemory = Annotated[
    bool,
    typer.Option(
        "--no-peer-memory", help="GPUs exchange everything by NCCL, also where they map each other's memory: slower."
    ),
]
DType = Annotated[
    options.DTypeOption,
    typer.Option("--dtype", help="Weights and activations; auto: the checkpoint's, float32 on CPU."),
]
Quantize = Annotated[
    options.QuantizeOption,
    typer.Option(
        "--quantize",
        help="Narrow format of the weights of linear layers and, except for fp8, of experts, made from the "
        "checkpoint's when they are loaded; fp8 and fp8-block take narrow activations too. A weight whose width does "
        "not fit stays as it is.",
    ),
]
Kernels = Annotated[
    list[str],
    typer.Option(
        "--kernels",
        metavar="OP=LIST",
        help="Libraries of an op, best first; may be given several times. linear=triton,torch: these and no others. "
        "linear=+triton,-torch: first triton, never torch. Attention has phases: mla_attention.generation=triton. "
        "What was chosen, and why, is logged at the start.",
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="Attention of a sequence has the same bits whatever else is in its step: it is cut at fixed "
        "places. Slower for few sequences. Other layers may still multiply another number of rows in another order.",
    ),
]
Device = Annotated[
    options.DeviceOption, typer.Option("--device", help="auto: cuda where there is one for each rank, else cpu.")
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="INT",
        help="Seed of requests without one, and of dummy weights. [default: a fresh one, kept in OUT.run.json]",
    ),
]
LogLevel = Annotated[options.LogLevelOption, typer.Option("--log-level", help="Least level that is logged.")]
StepTimeout = Annotated[
    float,
    typer.Option("--step-timeout", metavar="SECONDS", help="The job is aborted when a step takes longer."),
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=load_config,
        help="Options from a TOML file, named as here without the dashes; the command line wins.",
    ),
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print all options as such a file, and run nothing.")]
