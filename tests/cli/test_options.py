from typing import Any

import pytest

from dist_infer.cli.options import STDIN_NAMES, RunOptions, parse_shard, parse_sizes
from dist_infer.errors import UsageError


def test_defaults() -> None:
    options = RunOptions(prompts=("Hi",))
    assert (options.model, options.dtype, options.prefix_cache, options.block_size) == (None, "auto", True, 16)
    assert options.step_timeout_s == 300.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 0}, "--tp is 0; it must be at least 1"),
        ({"dp": -1}, "--dp is -1"),
        ({"max_model_len": 0}, "--max-model-len is 0"),
        ({"max_model_len": 1}, "--max-model-len is 1"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0"),
        ({"max_num_tokens": 0}, "--max-num-tokens is 0"),
        ({"moe_max_tokens": 0}, "--moe-max-tokens is 0"),
        ({"ep": 0}, "--ep is 0"),
        ({"block_size": 0}, "--block-size is 0"),
        ({"num_kv_blocks": 0}, "--num-kv-blocks is 0"),
        ({"kv_memory_fraction": 0.0}, "--kv-memory-fraction is 0"),
        ({"kv_memory_fraction": 1.5}, "--kv-memory-fraction is 1.5"),
        ({"kv_memory_fraction": float("nan")}, "--kv-memory-fraction is nan"),
        ({"kv_memory_fraction": 0.5, "num_kv_blocks": 4}, "give one of them"),
        ({"graph_batch_sizes": (1, 65)}, "--graph-batch-sizes has 65; .* --max-num-seqs, which is 64"),
        ({"graph_batch_sizes": (0, 2)}, "--graph-batch-sizes has 0"),
        ({"graph_batch_sizes": (1,), "eager": True}, "--eager uses no graphs"),
        ({"step_timeout_s": 0.0}, "--step-timeout is 0"),
        ({"grace_s": -1.0}, "--grace is -1"),
        ({"grace_s": float("inf")}, "--grace is inf"),
        ({"step_timeout_s": float("inf")}, "--step-timeout is inf"),
        ({"step_timeout_s": float("nan")}, "--step-timeout is nan"),
        ({"seed": 2**63}, "--seed is"),
        ({"dtype": "int8"}, "--dtype is 'int8'; it must be one of auto, float64"),
        ({"quantize": "int4"}, "--quantize is 'int4'; it must be one of none, fp8, fp8-block, mxfp8, nvfp4"),
        ({"kernels": ("rms_norm",)}, "--kernels 'rms_norm': it must be OP=LIST"),
        ({"kernels": ("norm=torch",)}, "there is no op 'norm'"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype is 'int8'; it must be one of auto, bf16, fp8"),
        ({"device": "tpu"}, "--device is 'tpu'"),
        ({"load_format": "gguf"}, "--load-format is 'gguf'"),
        ({"log_level": "loud"}, "--log-level is 'loud'"),
        ({"load_format": "dummy"}, "needs --model"),
        ({"input": "in"}, "-i and --prompt"),
        ({"prompts": (), "input": "in"}, "-o FILE"),
        ({"prompts": ()}, r"nothing to run[^$]*for example\n  dist-infer run --prompt"),
        ({"overwrite": True}, "--overwrite needs -o FILE"),
        ({"overwrite": True, "output": "-"}, "--overwrite needs -o FILE"),
        ({"output": ""}, "--output is empty"),
        ({"max_inflight": 0}, "--max-inflight is 0"),
        ({"resume": True}, "--resume needs -o FILE"),
        ({"resume": True, "overwrite": True, "output": "out"}, "--resume keeps .* --overwrite replaces"),
        ({"resume": True, "output": "-"}, "--resume needs -o FILE"),
        ({"prompts": (), "input": "-", "output": "out", "resume": True}, "can be read again"),
        ({"shard": (1, 2)}, "--shard needs -i FILE"),
        ({"shard": (0, 2)}, "--shard is 0/2; in K/N, K counts from 1 to N"),
        ({"shard": (3, 2)}, "--shard is 3/2"),
        ({"model": ""}, "--model is empty"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunOptions(**({"prompts": ("Hi",)} | changes))


def test_a_shard() -> None:
    assert parse_shard(None) is None
    assert parse_shard("2/8") == (2, 8)
    for text in ("", "2", "2/", "/8", "2/8/1", "a/b", "-1/2", "²/8", " 2/8", "1/99999999999"):
        with pytest.raises(UsageError, match="it must be K/N"):
            parse_shard(text)


@pytest.mark.parametrize("name", STDIN_NAMES)
def test_standard_input_is_refused_under_a_launcher(name: str) -> None:
    options = RunOptions(input=name, output="out")
    options.check_launcher(None)
    with pytest.raises(UsageError, match=r"standard input.*under mpirun.*give -i FILE"):
        options.check_launcher("mpirun")


def test_a_file_is_fine_under_a_launcher() -> None:
    RunOptions(input="in", output="out").check_launcher("mpirun")


def test_sizes_of_graphs() -> None:
    assert parse_sizes(None) is None
    assert parse_sizes("8,1, 4,4") == (1, 4, 8)
    for wrong in ("", "1,", "1;2", "-1", "1.5", "9" * 11):
        with pytest.raises(UsageError, match="--graph-batch-sizes is"):
            parse_sizes(wrong)
