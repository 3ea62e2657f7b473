import tomllib
from pathlib import Path

import pytest

from dist_infer.cli.config_file import Setting, format_config, read_config
from dist_infer.errors import UsageError

SETTINGS = (
    Setting("max_num_seqs", "--max-num-seqs", "integer"),
    Setting("step_timeout", "--step-timeout", "number"),
    Setting("resume", "--resume", "flag"),
    Setting("prompt", "--prompt", "texts"),
    Setting("model", "--model", "text"),
)


def read(folder: Path, text: str) -> dict[str, object]:
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return read_config(str(folder / "run.toml"), SETTINGS)


def test_keys_have_dashes_or_underscores(tmp_path: Path) -> None:
    text = 'max_num_seqs = 5\nstep-timeout = 7\nresume = true\nprompt = ["a", "b"]\nmodel = "m"'
    assert read(tmp_path, text) == {
        "max_num_seqs": 5,
        "step_timeout": 7,
        "resume": True,
        "prompt": ["a", "b"],
        "model": "m",
    }
    assert read(tmp_path, "") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq = 5", r"run\.toml: unknown key max-num-seq; did you mean max-num-seqs\?"),
        ("zzz = 5", "unknown key zzz; there are max-num-seqs, model, prompt, resume, step-timeout"),
        ("[run]\nmodel = 'm'", "unknown key run"),
        ("max-num-seqs = 5\nmax_num_seqs = 5", "stands there twice"),
        ("max-num-seqs = '5'", 'max-num-seqs must be an integer, it is "5"'),
        ("max-num-seqs = 5.0", "must be an integer, it is 5.0"),
        ("max-num-seqs = true", "must be an integer, it is true"),
        ("step-timeout = false", "must be a number"),
        ("resume = 1", "resume must be true or false, it is 1"),
        ("prompt = 'a'", "prompt must be a list of strings"),
        ("prompt = ['a', 1]", "prompt must be a list of strings"),
        ("model = 1979-05-27", "model must be a string, it is 1979-05-27"),
        ("model = ", "not TOML: Invalid value"),
        ("model = 'a'\nmodel = 'b'", "not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing: No such file"):
        read_config(str(tmp_path / "missing"), SETTINGS)
    (tmp_path / "latin").write_bytes(b"model = '\xff'")
    with pytest.raises(UsageError, match="not TOML"):
        read_config(str(tmp_path / "latin"), SETTINGS)


def test_what_is_printed_can_be_read(tmp_path: Path) -> None:
    values = {
        "max_num_seqs": 5,
        "step_timeout": 1e-7,
        "resume": False,
        "prompt": ('say "hi"\n\t\x00\x7f\\', "é🙂"),
        "model": None,
    }
    text = format_config(SETTINGS, values)
    assert read(tmp_path, text) == {
        **{name: value for name, value in values.items() if value is not None},
        "prompt": list(values["prompt"]),  # type: ignore[call-overload]
    }
    assert "# model is not set\n" in text
    assert tomllib.loads(format_config(SETTINGS[3:4], {"prompt": []})) == {}
    assert format_config(SETTINGS[4:], {"model": "\udcff"}) == 'model = "?"\n'
