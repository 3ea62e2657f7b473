"""How options are declared once and read by each command; their values are tested with the commands."""

import inspect

from dist_infer.cli.arguments import settings
from dist_infer.cli.config_file import Setting
from dist_infer.cli.options import RunOptions
from dist_infer.cli.run import run


def test_settings_are_the_options_of_a_command() -> None:
    found = {setting.name: setting for setting in settings(run)}
    names = set(inspect.signature(run).parameters) - {"context", "config", "print_config"}
    assert set(found) == names
    assert found["prompt"] == Setting("prompt", "--prompt", "texts")
    assert found["input"] == Setting("input", "--input", "text"), "the long spelling"
    assert found["tp"] == Setting("tp", "--tp", "integer")
    assert found["kv_memory_fraction"] == Setting("kv_memory_fraction", "--kv-memory-fraction", "number")
    assert found["no_prefix_cache"] == Setting("no_prefix_cache", "--no-prefix-cache", "flag")
    assert found["dtype"] == Setting("dtype", "--dtype", "text")


def test_defaults_of_the_parser_are_those_of_the_options() -> None:
    options = RunOptions(prompts=("x",))
    for name, parameter in inspect.signature(run).parameters.items():
        if name in ("max_num_seqs", "max_num_tokens", "block_size", "dtype", "device", "load_format", "log_level"):
            assert parameter.default == getattr(options, name), name
