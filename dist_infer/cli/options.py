"""Options of the command line: frozen, checked in themselves.

Nothing here looks at the disk: the nodes of the ranks may see different files, and only rank 0 reads and writes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, get_args, get_origin

from dist_infer.errors import UsageError
from dist_infer.kernels.orders import parse_orders

LoadFormat = Literal["auto", "dummy"]
DTypeOption = Literal["auto", "float64", "float32", "bfloat16", "float16"]
KVCacheDTypeOption = Literal["auto", "bf16", "fp8"]
QuantizeOption = Literal["none", "fp8", "fp8-block", "mxfp8", "nvfp4"]
DeviceOption = Literal["auto", "cpu", "cuda"]
LogLevelOption = Literal["debug", "info", "warning", "error"]

DEFAULT_KV_MEMORY_FRACTION: Mapping[str, float] = MappingProxyType({"cuda": 0.9, "cpu": 0.1})  # by device type
_COUNTS = (
    "tp",
    "dp",
    "ep",
    "max_model_len",
    "max_num_seqs",
    "max_num_tokens",
    "moe_max_tokens",
    "max_inflight",
    "block_size",
    "num_kv_blocks",
)
STDIN_NAMES = ("-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")

_EXAMPLES = """
  dist-infer run --prompt "The capital of France is"
  mpirun -n 2 dist-infer run -i requests.jsonl -o answers.jsonl"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and served, whatever for. None: to be chosen from the model, the device or the world.

    Errors: UsageError naming the option.
    """

    model: str | None = None  # None: the embedded default model
    load_format: LoadFormat = "auto"
    tp: int | None = None
    dp: int | None = None
    ep: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_tokens: int = 2048
    moe_max_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_memory_fraction: float | None = None
    kv_cache_dtype: KVCacheDTypeOption = "auto"
    prefix_cache: bool = True
    graph_batch_sizes: tuple[int, ...] | None = None
    eager: bool = False
    share_gpu: bool = False
    peer_memory: bool = True
    dtype: DTypeOption = "auto"
    quantize: QuantizeOption = "none"
    kernels: tuple[str, ...] = ()  # OP=LIST
    batch_invariant: bool = False
    device: DeviceOption = "auto"
    seed: int | None = None  # None: a fresh one, or that of the run that is resumed
    log_level: LogLevelOption = "info"
    step_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Check every value and that they don't contradict each other."""
        self._check_choices()
        self._check_counts()
        if self.max_model_len == 1:
            raise UsageError("--max-model-len is 1; a prompt and an answer need at least 2 tokens")
        if self.kv_memory_fraction is not None and not 0 < self.kv_memory_fraction <= 1:
            raise UsageError(f"--kv-memory-fraction is {self.kv_memory_fraction:g}; it must be above 0, at most 1")
        if not (self.step_timeout_s > 0 and math.isfinite(self.step_timeout_s)):
            raise UsageError(f"--step-timeout is {self.step_timeout_s:g}; it must be a number of seconds above 0")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}; it must fit into 64 bits")
        if self.num_kv_blocks is not None and self.kv_memory_fraction is not None:
            raise UsageError("--num-kv-blocks and --kv-memory-fraction both size the KV cache; give one of them")
        self._check_graphs()
        parse_orders(self.kernels)
        if self.load_format == "dummy" and self.model is None:
            raise UsageError("--load-format dummy needs --model FOLDER, a folder with a config.json")
        if self.model == "":
            raise UsageError("--model is empty; give a path")

    @property
    def kernel_orders(self) -> Mapping[str, str]:
        """Orders of kernel libraries by op."""
        return parse_orders(self.kernels)

    def _check_choices(self) -> None:
        for field in fields(self):
            if get_origin(field.type) is Literal and getattr(self, field.name) not in get_args(field.type):
                choices = ", ".join(get_args(field.type))
                raise UsageError(
                    f"{_spelling(field.name)} is {getattr(self, field.name)!r}; it must be one of {choices}"
                )

    def _check_graphs(self) -> None:
        sizes = self.graph_batch_sizes or ()
        if sizes and self.eager:
            raise UsageError("--eager uses no graphs and --graph-batch-sizes asks for some; give one of them")
        wrong = [size for size in sizes if not 1 <= size <= self.max_num_seqs]
        if wrong:
            raise UsageError(
                f"--graph-batch-sizes has {wrong[0]}; each must be from 1 to --max-num-seqs, which is"
                f" {self.max_num_seqs}"
            )

    def _check_counts(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _COUNTS and value is not None and value < 1:
                raise UsageError(f"{_spelling(field.name)} is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(EngineOptions):
    """What the user asked of `dist-infer run`.

    Errors: UsageError naming the option.
    """

    input: str | None = None  # a path, or "-" for standard input
    prompts: tuple[str, ...] = ()
    output: str | None = None  # a path, or "-" for standard output; None prints the answers to `prompts`
    overwrite: bool = False
    resume: bool = False
    shard: tuple[int, int] | None = None  # part K of N, from 1
    max_inflight: int | None = None
    grace_s: float | None = None  # None: a drain finishes all that has started
    summary: str | None = None  # a path

    def __post_init__(self) -> None:
        """Check every value and that they don't contradict each other."""
        EngineOptions.__post_init__(self)
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise UsageError(f"--shard is {self.shard[0]}/{self.shard[1]}; in K/N, K counts from 1 to N")
        if self.grace_s is not None and not (self.grace_s >= 0 and math.isfinite(self.grace_s)):
            raise UsageError(f"--grace is {self.grace_s:g}; it must be a number of seconds, at least 0")
        self._check_files()

    def check_launcher(self, launcher_name: str | None) -> None:
        """Refuse standard input under a launcher: mpirun may lose its end, and the job would wait for ever.

        Errors: UsageError.
        """
        if launcher_name is not None and self.input in STDIN_NAMES:
            raise UsageError(
                f"-i {self.input}: standard input can't be read under {launcher_name}, which may lose its end; "
                "write the requests to a file and give -i FILE"
            )

    def _check_files(self) -> None:
        if self.input is None and not self.prompts:
            raise UsageError(f"there is nothing to run: give -i FILE or --prompt TEXT, for example{_EXAMPLES}")
        if self.input is not None and self.prompts:
            raise UsageError("-i and --prompt both give requests; give one of them")
        if self.input is not None and self.output is None:
            raise UsageError("say where the answers go: -o FILE, or -o - for standard output")
        if self.overwrite and self.output in (None, "-"):
            raise UsageError("--overwrite needs -o FILE: there is no file to replace")
        if self.resume and self.overwrite:
            raise UsageError("--resume keeps the output and --overwrite replaces it; give one of them")
        if self.resume and self.output in (None, "-"):
            raise UsageError("--resume needs -o FILE: there is no file to continue")
        if self.resume and self.input in STDIN_NAMES:
            raise UsageError(f"-i {self.input}: --resume needs an input that can be read again; give -i FILE")
        if self.shard is not None and self.input is None:
            raise UsageError("--shard needs -i FILE: prompts are not dealt out")
        for name in ("input", "output", "summary"):
            if getattr(self, name) == "":
                raise UsageError(f"{_spelling(name)} is empty; give a path")


def _spelling(name: str) -> str:
    return {"step_timeout_s": "--step-timeout", "grace_s": "--grace"}.get(name, "--" + name.replace("_", "-"))


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """K/N as two numbers.

    Errors: UsageError.
    """
    if text is None:
        return None
    parts = text.split("/")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UsageError(f"--shard is {text!r}; it must be K/N, for example 2/8 for the second of 8 parts")
    return int(parts[0]), int(parts[1])


def parse_sizes(text: str | None) -> tuple[int, ...] | None:
    """Numbers with commas between them, ascending, none twice.

    Errors: UsageError.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise UsageError(f"--graph-batch-sizes is {text!r}; it must be numbers such as 1,2,4,8")
    return tuple(sorted({int(part) for part in parts}))
