"""The command line `dist-infer`. Importing it brings neither torch nor MPI."""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dist_infer import __version__
from dist_infer.cli.bench import bench
from dist_infer.cli.doctor import doctor
from dist_infer.cli.environment import read_launcher
from dist_infer.cli.run import run
from dist_infer.cli.spellings import explain_unknown
from dist_infer.cli.tune import tune
from dist_infer.errors import DistInferError, UsageError

# The parser's own error for a wrong command line. Its name is no public one of typer; its child BadParameter is.
_ParserError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it reads the same in a log, and rich isn't imported for it
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dist-infer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """An LLM inference worker that MPI launches: mpirun -n 8 dist-infer run -i FILE -o FILE."""


app.command()(run)
app.command()(bench)
app.command()(doctor)
app.command()(tune)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; the exit code.

    A wrong command line is found by every rank alike, so only rank 0 reports it.
    """
    atexit.register(_leave_quickly)
    launcher = read_launcher(os.environ)
    speaks = launcher is None or launcher.rank == 0
    words = list(sys.argv[1:] if args is None else args)
    try:
        command = typer.main.get_command(app)
        return int(command.main(words, prog_name="dist-infer", standalone_mode=False) or 0)
    except _ParserError as error:
        if speaks:
            hint = _explain(error, words)
            if hint is None:
                error.show()
            else:
                print(f"dist-infer: error: {hint}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except DistInferError as error:
        if speaks or not isinstance(error, UsageError):
            print(f"dist-infer: error: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except typer.Abort:
        return 130


def _leave_quickly() -> None:
    """Spare the interpreter, which is at its end, a last walk over all objects of torch, which takes a second."""
    if "triton" not in sys.modules:  # whose bindings would report everything that was not collected
        gc.freeze()


def _explain(error: Any, words: Sequence[str]) -> str | None:
    """What to write instead of an option that only other tools have."""
    refused = getattr(error, "option_name", None)
    if refused is None or error.ctx is None:
        return None
    # of -tp the parser says -t
    meant = [
        word for word in words if word.split("=")[0] == refused or (len(refused) == 2 and word.startswith(refused))
    ]
    return explain_unknown(meant, [name for parameter in error.ctx.command.params for name in parameter.opts])
