"""The tokenizer of a model in a GGUF file, as tokenizer.json and tokenizer_config.json.

GGUF names the pre-tokenizer by a word; only those whose result was compared with llama.cpp are known here.

Source: the pre-tokenizers of llama.cpp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from dist_infer.checkpoint.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # token types
_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreTokenizer:
    """How text is cut before pairs are merged."""

    cuts: Sequence[pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False  # a piece that is a token is not taken apart
    add_bos: bool = False  # where the file doesn't say


def _words(max_digits: int) -> list[pre_tokenizers.PreTokenizer]:
    """Words with what stands before them, numbers of so many digits, signs, white space."""
    digits = r"\p{N}" if max_digits == 1 else rf"\p{{N}}{{1,{max_digits}}}"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_of_text]


_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = MappingProxyType(
    {
        "llama-bpe": _PreTokenizer(cuts=_words(3), ignore_merges=True, add_bos=True),
        "qwen2": _PreTokenizer(cuts=_words(1)),
        "smollm": _PreTokenizer(
            cuts=[pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    }
)


def read_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer.

    Errors: CheckpointError naming the key that can't be converted.
    """
    model, name = file.need("tokenizer.ggml.model", str), file.need("tokenizer.ggml.pre", str)
    if model != "gpt2":
        raise file.refuse("tokenizer.ggml.model", model, "'gpt2'")
    if name not in _PRE_TOKENIZERS:
        raise file.refuse("tokenizer.ggml.pre", name, sorted(_PRE_TOKENIZERS))
    kind = _PRE_TOKENIZERS[name]
    tokens = file.need("tokenizer.ggml.tokens", list)
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges", list)]
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(kind.cuts))
    tokenizer.decoder = decoders.ByteLevel()
    types = file.need("tokenizer.ggml.token_type", list)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in _of_type(tokens, types, _CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in _of_type(tokens, types, _USER_DEFINED)])
    add_bos = file.get("tokenizer.ggml.add_bos_token", bool)
    if kind.add_bos if add_bos is None else add_bos:
        bos_id = file.need("tokenizer.ggml.bos_token_id", int)
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def tokenizer_config(file: GGUFFile, config: Mapping[str, object]) -> dict[str, object]:
    """The fields of tokenizer_config.json, with the chat template."""
    tokens = file.need("tokenizer.ggml.tokens", list)
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id", int) for name, key in _SPECIAL_TOKENS.items()}
    fields: dict[str, object] = {name: tokens[i] for name, i in ids.items() if i is not None}
    template = file.get("tokenizer.chat_template", str)
    if template is not None:
        fields["chat_template"] = template
    return fields | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }


def _of_type(tokens: list[str], types: list[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, types, strict=True) if kind == wanted]
