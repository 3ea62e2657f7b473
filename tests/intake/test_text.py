import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from dist_infer.errors import CheckpointError, RequestError
from dist_infer.intake.text import TextCodec, collect_eos_ids, open_text
from tests.intake.tiny_text import byte_level_tokenizer, write_text_folder

HELLO = [{"role": "user", "content": "Hello"}]
START, END = 0, 1  # ids of <|im_start|> and <|im_end|>


def codec(folder: Path, **tokenizer_config: object) -> TextCodec:
    text = open_text(write_text_folder(folder, **tokenizer_config))
    assert text is not None
    return text


def decoded(text: TextCodec, token_ids: tuple[int, ...]) -> str:
    detokenizer = text.open_detokenizer()
    return detokenizer.push(token_ids) + detokenizer.finish()


def test_round_trip(tmp_path: Path) -> None:
    text = codec(tmp_path)
    prompt = "Hello, 日本語 🙂\n\tdef f(x):"
    assert decoded(text, text.encode_completion(prompt)) == prompt
    assert text.encode_completion("") == ()
    assert text.eos_token_id == END


def test_a_chat_is_tokenised_with_the_special_tokens_of_its_template_only(tmp_path: Path) -> None:
    text = codec(tmp_path, add_bos_token=True)
    ids = text.encode_chat(HELLO)
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tuple(byte_level_tokenizer().encode(rendered, add_special_tokens=False).ids)
    assert [token_id for token_id in ids if token_id in (START, END)] == [START, END, START]


def with_post_processor(folder: Path) -> None:
    """Make tokenizer.json itself add <|im_start|>, as many models do with their BOS."""
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("post_processor", "add_bos", "first_is_bos"),
    [
        (False, None, False),
        (False, False, False),
        (False, True, True),
        (True, None, True),
        (True, False, False),
        (True, True, True),
    ],
)
def test_bos_of_a_completion(tmp_path: Path, post_processor: bool, add_bos: bool | None, first_is_bos: bool) -> None:
    write_text_folder(tmp_path, **({} if add_bos is None else {"add_bos_token": add_bos}))
    if post_processor:
        with_post_processor(tmp_path)
    text = open_text(tmp_path)
    assert text is not None
    ids = text.encode_completion("Hello")
    assert [token_id for token_id in ids if token_id == START] == [START] * first_is_bos
    assert (ids[0] == START) == first_is_bos
    assert START not in text.encode_chat(HELLO)[1:4]


def test_truncation_and_padding_of_training_are_off(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    prompt = "Hello, world. " * 20
    whole = len(tokenizer.encode(prompt).ids)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=1000)
    write_text_folder(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = open_text(tmp_path)
    assert text is not None and len(text.encode_completion(prompt)) == whole


def test_special_tokens_may_be_objects_and_stand_in_the_older_file(tmp_path: Path) -> None:
    text = codec(tmp_path, eos_token={"content": "<|im_end|>", "special": True}, chat_template="{{ eos_token }}")
    assert text.encode_chat(HELLO) == (END,)
    config = {"chat_template": "{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    older = open_text(tmp_path)
    assert older is not None and older.encode_chat(HELLO) == (END,)


def test_chat_template_of_its_own_file_wins(tmp_path: Path) -> None:
    write_text_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("jinja")
    text = open_text(tmp_path)
    assert text is not None and decoded(text, text.encode_chat(HELLO)) == "jinja"


def test_the_default_of_named_chat_templates(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    text = codec(tmp_path, chat_template=templates)
    assert decoded(text, text.encode_chat(HELLO)) == "yes"


def test_without_chat_template_a_chat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="/v1/completions") as caught:
        codec(tmp_path, chat_template=None).encode_chat(HELLO)
    assert caught.value.param == "messages"


def test_what_the_tokenizer_refuses_refuses_the_request() -> None:
    words = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="missing"))
    with pytest.raises(RequestError, match="can't encode prompt"):
        TextCodec(words, special_tokens={}).encode_completion("b")


def test_half_a_surrogate_pair_from_a_template_refuses_the_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        codec(tmp_path, chat_template="{{ '\\ud800' }}").encode_chat(HELLO)


def test_no_tokenizer(tmp_path: Path) -> None:
    assert open_text(tmp_path) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_text_folder(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        open_text(tmp_path)


def test_a_chat_template_of_another_type_is_named(tmp_path: Path) -> None:
    write_text_folder(tmp_path, chat_template=5)
    with pytest.raises(CheckpointError, match="chat_template"):
        open_text(tmp_path)


def test_eos_ids_of_all_places(tmp_path: Path) -> None:
    text = codec(tmp_path)
    assert collect_eos_ids((7,), {"eos_token_id": [9, 8]}, text) == (END, 7, 8, 9)
    assert collect_eos_ids((), {"eos_token_id": 9}, None) == (9,)
    assert collect_eos_ids((), {}, None) == ()
    with pytest.raises(CheckpointError, match="generation_config"):
        collect_eos_ids((), {"eos_token_id": "x"}, None)
