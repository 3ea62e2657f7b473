"""What other tools call our options: refused, with our spelling named."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

# Written with dashes; underscores read the same. Where a name has several of ours, a command has one of them.
# Source: the command lines of vLLM, of trtllm-bench and of torchrun.
_OURS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "-tp": ("--tp",),
        "-dp": ("--dp",),
        "-ep": ("--ep",),
        "--tensor-parallel-size": ("--tp",),
        "--tp-size": ("--tp",),
        "--data-parallel-size": ("--dp",),
        "--dp-size": ("--dp",),
        "--enable-expert-parallel": ("--ep",),
        "--expert-parallel-size": ("--ep",),
        "--ep-size": ("--ep",),
        "--max-batch-size": ("--max-num-seqs",),
        "--max-num-batched-tokens": ("--max-num-tokens",),
        "--max-seq-len": ("--max-model-len",),
        "--max-input-len": ("--max-model-len",),
        "--concurrency": ("--max-inflight",),
        "--max-concurrency": ("--max-inflight",),
        "--gpu-memory-utilization": ("--kv-memory-fraction",),
        "--kv-cache-free-gpu-mem-fraction": ("--kv-memory-fraction",),
        "--num-gpu-blocks-override": ("--num-kv-blocks",),
        "--kv-cache-type": ("--kv-cache-dtype",),
        "--quantization": ("--quantize",),
        "--enforce-eager": ("--eager",),
        "--cuda-graph-sizes": ("--graph-batch-sizes",),
        "--cudagraph-capture-sizes": ("--graph-batch-sizes",),
        "--disable-custom-all-reduce": ("--no-peer-memory",),
        "--tokens-per-block": ("--block-size",),
        "--no-enable-prefix-caching": ("--no-prefix-cache",),
        "--model-path": ("--model",),
        "--checkpoint-path": ("--model",),
        "--input-file": ("--input", "--dataset"),
        "--dataset": ("--input",),
        "--dataset-path": ("--dataset", "--input"),
        "--output-file": ("--output",),
        "--random-seed": ("--seed",),
        "--report-json": ("--result", "--summary"),
        "--output-json": ("--result", "--summary"),
        "--save-result": ("--result",),
        "--result-filename": ("--result",),
        "--random-input-len": ("--input-len",),
        "--random-output-len": ("--output-len",),
        "--target-input-len": ("--input-len",),
        "--target-output-len": ("--output-len",),
        "--sharegpt-output-len": ("--output-len",),
        "--random-range-ratio": ("--range-ratio",),
        "--random-prefix-len": ("--prefix-len",),
        "--num-requests": ("--num-prompts",),
        "--num-warmups": ("--warmup",),
        "--num-iters-warmup": ("--warmup",),
        "--uvicorn-log-level": ("--log-level",),
    }
)
_NEEDLESS: Mapping[str, str] = MappingProxyType(
    {
        "--enable-prefix-caching": "prefixes are cached unless --no-prefix-cache is given",
        "--enable-chunked-prefill": "prompts are always computed in chunks of --max-num-tokens",
        "--trust-remote-code": "code of a checkpoint is never run",
        "--pipeline-parallel-size": "a model is cut by --tp and --ep only",
        "--pp-size": "a model is cut by --tp and --ep only",
        "--pp": "a model is cut by --tp and --ep only",
        "-pp": "a model is cut by --tp and --ep only",
        "--enable-chunked-context": "prompts are always computed in chunks of --max-num-tokens",
        "--extra-llm-api-options": "options of a file come by --config, in TOML",
        "--engine-dir": "there is no engine to build: --model is enough",
        "--tokenizer": "the tokenizer is the one in the folder of --model",
        "--download-dir": "nothing is downloaded",
        "--node-rank": "start the ranks by mpirun or srun",
        "--master-addr": "start the ranks by mpirun or srun",
        "--master-port": "start the ranks by mpirun or srun",
        "--rdzv-endpoint": "start the ranks by mpirun or srun",
        "--distributed-executor-backend": "start the ranks by mpirun or srun",
        "--nnodes": "start the ranks by mpirun or srun",
        "--dataset-name": "the file says itself what it holds",
        "--backend": "there is one engine",
        "--streaming": "the time of each token is always measured",
        "--nproc-per-node": "start the ranks by mpirun or srun",
    }
)


def explain_unknown(words: Sequence[str], known: Sequence[str]) -> str | None:
    """What to write for the first word that is an option of another tool; None where none is.

    `words` is a command line that was refused, `known` our options.
    """
    for word in words:
        given = word.split("=")[0]
        if not given.startswith("-") or given in known:
            continue
        name = given.replace("_", "-")
        if name in known:
            return f"{given}: here it is spelt {name}"
        ours = next((own for own in _OURS.get(name, ()) if own in known), None)
        if ours is not None:
            return f"{given}: here it is {ours}"
        if name in _NEEDLESS:
            return f"{given} is no option here: {_NEEDLESS[name]}"
    return None
