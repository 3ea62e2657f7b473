"""How options are declared once and read by each command; their values are tested with the commands."""

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest

from dist_infer.cli.arguments import settings
from dist_infer.cli.bench import bench
from dist_infer.cli.bench_options import BenchOptions
from dist_infer.cli.config_file import Setting
from dist_infer.cli.options import EngineOptions, RunOptions
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


@pytest.mark.parametrize(("command", "options"), [(run, RunOptions(prompts=("x",))), (bench, BenchOptions())])
def test_defaults_of_the_parser_are_those_of_the_options(command: Callable[..., int], options: EngineOptions) -> None:
    shared = {field.name for field in fields(options)} & set(inspect.signature(command).parameters)
    assert len(shared) > 20
    for name in shared - {"seed"}:  # bench has 0 where run draws one
        assert inspect.signature(command).parameters[name].default == getattr(options, name), name
