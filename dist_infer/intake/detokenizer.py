"""Token ids -> text, piece by piece, never half a character: the joined pieces are the decoded whole.

Three kinds of decoder, told apart by tokenizer.json:
- bytes: byte-level BPE. A token is a string of bytes; an incremental UTF-8 decoder holds back what may still
  become a character.
- byte runs: SentencePiece with byte fallback. A run of byte tokens is decoded as a whole, so it is held back
  until it ends.
- pieces: all others. A token's text depends on its neighbour (spaces); a text that ends in U+FFFD may be half a
  character.
For the last two a window of tokens is decoded twice, with and without the new ones, and the difference is the
new text: the window begins one piece before the new tokens, because decoders treat the first token of a text in
their own way.

Rejected: decoding everything again after each token (quadratic); holding back at U+FFFD for all kinds (a model
that prints bytes which never become a character makes the window grow without end, quadratic again).
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

DecoderKind = Literal["bytes", "byte_runs", "pieces"]


def _byte_alphabet() -> Mapping[str, int]:
    """The byte of each character: itself where it prints in Latin-1, else the next code point from 256 on.

    Source: GPT-2's byte-to-unicode table.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return MappingProxyType({chr(byte if byte in printing else next(hidden)): byte for byte in range(256)})


_BYTE_OF_CHAR = _byte_alphabet()


class Detokenizer(Protocol):
    """The text of one request as its tokens come."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """What was held back; no token may follow."""


class Vocabulary:
    """What decoding needs to know about a tokenizer, looked up once a model.

    Ids that the tokenizer doesn't know (a padded vocabulary) give no text, nor do special tokens unless asked for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.kind: DecoderKind = _decoder_kind(json.loads(tokenizer.to_str())["decoder"])

    def token(self, token_id: int, *, skip_special: bool = True) -> str | None:
        """The token's own spelling, None if it gives no text."""
        return None if skip_special and token_id in self._special_ids else self.tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for in the middle of a text; it may be a part of a character.

        A special token stands for its own spelling, an id that the tokenizer doesn't know for nothing.
        """
        token = self.token(token_id, skip_special=False)
        if token is None:
            return b""
        if token_id in self._special_ids:
            return token.encode()
        if self.kind == "bytes":
            return spelt_bytes(token)
        if self.kind == "byte_runs" and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        # The first token of a text may lose a space: what the second of two adds is the token's own.
        once, twice = (self.tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return str(twice[len(once) :]).encode()

    def open(self, *, skip_special: bool = True) -> Detokenizer:
        """A detokenizer for one request; it shows special tokens unless they are skipped."""
        if self.kind == "bytes":
            return _ByteDetokenizer(self, skip_special=skip_special)
        return _WindowDetokenizer(self, skip_special=skip_special)


def spelt_bytes(token: str) -> bytes:
    """The bytes of a token of byte-level BPE."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token with a space or other text outside the alphabet stands for itself
        return token.encode()


class _ByteDetokenizer:
    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(self._bytes(token_id) for token_id in token_ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        token = self._vocabulary.token(token_id, skip_special=self._skip_special)
        return b"" if token is None else spelt_bytes(token)


class _WindowDetokenizer:
    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._window: list[int] = []  # the piece before, then what has not been emitted
        self._emitted_len = 0  # tokens of the window whose text is out

    def push(self, token_ids: Iterable[int]) -> str:
        text = ""
        for token_id in token_ids:
            token = self._vocabulary.token(token_id, skip_special=self._skip_special)
            if token is None:
                continue
            self._window.append(token_id)
            if self._vocabulary.kind == "pieces" or _BYTE_TOKEN.fullmatch(token) is None:
                text += self._emit(final=False)
        return text

    def finish(self) -> str:
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        before = self._decode(self._window[: self._emitted_len])
        after = self._decode(self._window)
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not final):
            return ""  # no text yet: the next token must still see these neighbours
        del self._window[: self._emitted_len]
        self._emitted_len = len(self._window)
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._vocabulary.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _decoder_kind(decoder: Mapping[str, Any] | None) -> DecoderKind:
    if decoder is None:
        return "pieces"
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = {part["type"] for part in parts}
    if "ByteLevel" in types and types <= {"ByteLevel", "Fuse"}:
        return "bytes"
    return "byte_runs" if "ByteFallback" in types else "pieces"
