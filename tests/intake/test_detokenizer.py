import random
from collections.abc import Iterable

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel

from dist_infer.intake.detokenizer import Vocabulary
from tests.intake.tiny_text import byte_fallback_tokenizer, byte_level_tokenizer, word_piece_tokenizer


def mixed_tokenizer() -> Tokenizer:
    """Byte-level with a further decoding step, so that the bytes of a token can't be taken on their own."""
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("#", 1, 0)])
    return tokenizer


TOKENIZERS = {
    "bytes": byte_level_tokenizer,
    "byte_runs": byte_fallback_tokenizer,
    "pieces": word_piece_tokenizer,
    "mixed": mixed_tokenizer,
}


def ids_of(tokenizer: Tokenizer, tokens: Iterable[str]) -> list[int]:
    """The ids of tokens that the vocabulary holds."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def pieces_of(vocabulary: Vocabulary, token_ids: list[int]) -> list[str]:
    detokenizer = vocabulary.open()
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_joined_pieces_are_the_decoded_whole(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.kind == ("pieces" if name == "mixed" else name)
    random_ids = random.Random(1)
    for trial in range(400):
        length = random_ids.choice([0, 1, 2, 3, 5, 20, 63])
        # ids beyond the vocabulary stand for the rows of a padded head
        token_ids = [random_ids.randrange(tokenizer.get_vocab_size() + 3) for _ in range(length)]
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert "".join(pieces_of(vocabulary, token_ids)) == whole, f"trial {trial}: {token_ids}"
        together = vocabulary.open()
        assert together.push(token_ids) + together.finish() == whole


@pytest.mark.parametrize("name", ["bytes", "mixed"])
def test_broken_characters(name: str) -> None:
    """A token for each byte of a text, some of them lost, some random."""
    tokenizer = TOKENIZERS[name]()
    vocabulary = Vocabulary(tokenizer)
    spelt = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("a日本🙂ñ🙃߿" * 4)[0][0]
    any_byte = sorted(ByteLevel.alphabet())
    chooser = random.Random(2)
    for _ in range(300):
        chars = [
            chooser.choice(any_byte) if chooser.random() < 0.1 else char for char in spelt if chooser.random() < 0.8
        ]
        token_ids = ids_of(tokenizer, chars)
        assert "".join(pieces_of(vocabulary, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_never_half_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "naïve 日本語 🙂🙃 ñ" if name in ("bytes", "mixed") else "hello"
    token_ids = tokenizer.encode(text).ids
    pieces = pieces_of(Vocabulary(tokenizer), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_character_of_four_byte_tokens_comes_at_its_last() -> None:
    tokenizer = byte_fallback_tokenizer()
    smile = ids_of(tokenizer, [f"<0x{byte:02X}>" for byte in "🙂".encode()])
    (hello,) = ids_of(tokenizer, ["▁hello"])
    assert pieces_of(Vocabulary(tokenizer), [hello, *smile, hello]) == ["hello", "", "", "", "", "🙂 hello", ""]
    assert pieces_of(Vocabulary(tokenizer), [hello, *smile]) == ["hello", "", "", "", "", "🙂"]


def test_special_tokens_give_no_text_and_hide_no_space() -> None:
    tokenizer = byte_fallback_tokenizer()
    ids = ids_of(tokenizer, ["<s>", "▁hello", "</s>", "▁world"])
    assert pieces_of(Vocabulary(tokenizer), ids) == ["", "hello", "", " world", ""]


def test_bytes_that_never_become_a_character_are_not_held_back() -> None:
    """Otherwise a model that prints them would make each step dearer than the one before."""
    tokenizer = byte_level_tokenizer()
    (continuation,) = ids_of(tokenizer, ["Ģ"])  # byte 0x80
    assert tokenizer.decode([continuation]) == "\N{REPLACEMENT CHARACTER}"
    assert pieces_of(Vocabulary(tokenizer), [continuation] * 5) == ["\N{REPLACEMENT CHARACTER}"] * 5 + [""]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_shown_on_demand(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    vocabulary = Vocabulary(tokenizer)
    source = random.Random(2)
    for trial in range(200):
        token_ids = [source.randrange(tokenizer.get_vocab_size()) for _ in range(source.choice([0, 1, 3, 9]))]
        token_ids.insert(source.randint(0, len(token_ids)), 0)  # a special one
        detokenizer = vocabulary.open(skip_special=False)
        text = "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.finish()
        assert text == tokenizer.decode(token_ids, skip_special_tokens=False), f"trial {trial}: {token_ids}"


def test_bytes_of_single_tokens() -> None:
    vocabulary = Vocabulary(byte_level_tokenizer())
    tokenizer = vocabulary.tokenizer
    smile = tokenizer.encode("\U000fffff").ids
    assert b"".join(vocabulary.token_bytes(token_id) for token_id in smile) == "\U000fffff".encode()
    assert vocabulary.token_bytes(0) == b"<|im_start|>"
    assert vocabulary.token_bytes(10**6) == b""
    vocabulary = Vocabulary(byte_fallback_tokenizer())
    ids = ids_of(vocabulary.tokenizer, ["<0xE6>", "▁hello", "lo", "</s>", "é"])
    assert [vocabulary.token_bytes(token_id) for token_id in ids] == [b"\xe6", b" hello", b"lo", b"</s>", "é".encode()]
    vocabulary = Vocabulary(word_piece_tokenizer())
    ids = ids_of(vocabulary.tokenizer, ["hello", "##ing", "."])
    assert [vocabulary.token_bytes(token_id) for token_id in ids] == [b" hello", b"ing", b"."]
