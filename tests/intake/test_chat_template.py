import pytest

from dist_infer.errors import RequestError
from dist_infer.intake.chat_template import ChatTemplate
from tests.intake.tiny_text import CHATML

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens=special_tokens).render(HELLO)


def test_chatml() -> None:
    assert render(CHATML) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_blocks_are_trimmed_and_special_tokens_known() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n{{ m['content'] }}\n  {% endfor %}\nend{{ eos_token }}"
    assert render(source, bos_token="<s>") == "<s>\nHello\nend"


def test_what_templates_use() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{{ messages | length }}{% endgeneration %}c") == "ab1c"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ tools is none and documents is none and add_generation_prompt }}") == "True"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ ''|attr('__class__') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ range.__init__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('%s' ~ '').format_map }}{{ ''.__doc__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(RequestError, match="not allowed") as caught:
        render(source)
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_error")


@pytest.mark.parametrize(
    "source", ["{% do messages.append(1) %}", "{{ messages.append(1) }}", "{{ messages[0].clear() }}"]
)
def test_a_template_changes_nothing(source: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(RequestError):
        ChatTemplate(source, special_tokens={}).render(messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages + 1 }}", "can only concatenate"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% include 'secret' %}", "refused"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% if %}", "does not compile"),
        ("{{ '" + "(" * 5 + "' }}{{ " + "(" * 100_000 + " }}", "does not compile"),
    ],
)
def test_what_a_template_raises_refuses_the_request(source: str, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        render(source)
    assert caught.value.param == "messages"
