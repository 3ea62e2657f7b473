"""Small tokenizers that need no download, and a model folder around one."""

import json
from functools import cache
from pathlib import Path
from pydoc_data import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [topics.topics[name] for name in sorted(topics.topics)[:4]]
    tokenizer.train_from_iterator([*texts, "naïve café, 日本語 and 🙂 🙃 " * 20], trainer)
    # Added, but no special ones: a token outside the byte alphabet, and one inside it that is no valid UTF-8.
    tokenizer.add_tokens([AddedToken("<think> yes", special=False), AddedToken("é", special=False)])
    return str(tokenizer.to_str())


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE, 400 trained tokens and two added ones; <|im_start|> and <|im_end|> are special."""
    return Tokenizer.from_str(_byte_level_json())


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece-like: pieces with a leading ▁, and a token for each byte."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁hello",
        "▁world",
        "lo",
        "é",
        ".",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: idx for idx, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece_tokenizer() -> Tokenizer:
    """WordPiece: spaces are made by the decoder."""
    pieces = ["[UNK]", "[CLS]", "hello", "##ing", "world", ".", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece(vocab={piece: idx for idx, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def write_text_folder(folder: Path, **tokenizer_config: object) -> Path:
    """A model folder's text files, with a ChatML template unless told otherwise."""
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML} | tokenizer_config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
