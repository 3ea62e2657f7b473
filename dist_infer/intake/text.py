"""Text <-> token ids of one model: tokenizer.json, the chat template and the special tokens of its folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dist_infer.errors import CheckpointError, RequestError
from dist_infer.intake.chat_template import ChatTemplate
from dist_infer.intake.detokenizer import Detokenizer, Vocabulary

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """Encodes prompts and decodes answers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        add_bos: bool | None = None,
        chat_template: str | None = None,
    ) -> None:
        tokenizer.no_truncation()  # some folders were saved with a training length: it would cut prompts
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._add_bos = add_bos
        self._bos_token_id = _token_id(tokenizer, special_tokens.get("bos_token"))
        self._vocabulary = Vocabulary(tokenizer)
        self._template = ChatTemplate(chat_template, special_tokens=special_tokens) if chat_template else None
        self.eos_token_id = _token_id(tokenizer, special_tokens.get("eos_token"))

    def encode_completion(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a plain prompt, with a BOS token only where the tokenizer asks for one.

        tokenizer.json says so in its post-processor; add_bos_token in tokenizer_config.json, where given, wins.
        """
        token_ids = self._encode(prompt, "prompt", add_special_tokens=self._add_bos is not False)
        if self._add_bos and self._bos_token_id is not None and token_ids[:1] != (self._bos_token_id,):
            return (self._bos_token_id, *token_ids)
        return token_ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Token ids of a chat; the template writes the special tokens, so the tokenizer adds none."""
        if self._template is None:
            raise RequestError(
                "the model has no chat template: use /v1/completions", param="messages", code="no_chat_template"
            )
        return self._encode(self._template.render(messages), "messages", add_special_tokens=False)

    def open_detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A detokenizer for one request."""
        return self._vocabulary.open(skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; it may be a part of a character."""
        return self._vocabulary.token_bytes(token_id)

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except Exception as error:  # the library raises Exception itself, e.g. for a word without an unknown token
            raise RequestError(f"the tokenizer can't encode {param}: {error}", param=param) from error


def open_text(folder: Path) -> TextCodec | None:
    """The codec of a model folder, None if it holds no tokenizer.json.

    Errors: CheckpointError naming the file that can't be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    add_bos = config.get("add_bos_token")
    return TextCodec(
        tokenizer,
        special_tokens=_special_tokens(_read_json(folder / "special_tokens_map.json") | config),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        chat_template=_chat_template(folder, config),
    )


def collect_eos_ids(
    config_ids: Sequence[int], generation_config: Mapping[str, object], text: TextCodec | None
) -> tuple[int, ...]:
    """The ids that end an answer, from all that name one: config.json, generation_config.json, the tokenizer."""
    ids = set(config_ids)
    named = generation_config.get("eos_token_id")
    for token_id in named if isinstance(named, list) else [named]:
        if isinstance(token_id, int) and not isinstance(token_id, bool):
            ids.add(token_id)
        elif token_id is not None:
            raise CheckpointError(f"generation_config.json: eos_token_id holds {token_id!r}; it must hold token ids")
    if text is not None and text.eos_token_id is not None:
        ids.add(text.eos_token_id)
    return tuple(sorted(ids))


def _token_id(tokenizer: Tokenizer, token: str | None) -> int | None:
    return None if token is None else tokenizer.token_to_id(token)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Each is a string or an object with `content`; null and absent mean that the model has none."""
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json: one text, or a list of named ones of which `default` counts."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be text or a list of texts")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
