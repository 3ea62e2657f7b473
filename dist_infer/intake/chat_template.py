"""Chat templates: jinja2 text that comes with a checkpoint, so foreign code, run in jinja2's immutable sandbox.

The environment offers what Hugging Face templates expect: trimmed blocks, loop controls, `{% generation %}`
blocks, the functions raise_exception and strftime_now, and a tojson that leaves HTML characters alone. Touching
a name that the sandbox forbids raises at once; jinja2's own way, a value that prints as nothing, would hide it.

Source: https://huggingface.co/docs/transformers/chat_templating; https://jinja.palletsprojects.com/en/stable/sandbox/
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dist_infer.errors import RequestError


class ChatTemplate:
    """A compiled chat template; one that doesn't compile refuses each chat, not the model."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._fault: str | None = None
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            self._fault = f"does not compile: {error}"

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a chat, ending where the assistant's answer begins.

        Errors: RequestError for whatever the template raises.
        """
        if self._fault is not None:
            raise _refusal(self._fault)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # foreign code may raise anything
            raise _refusal(f"refused the messages: {error or type(error).__name__}") from error


def _refusal(what: str) -> RequestError:
    return RequestError(f"the model's chat template {what}", param="messages", code="chat_template_error")


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is not allowed")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
