"""``equilibria``: its commands, and what happens when one fails."""

from __future__ import annotations

import io
import sys
import traceback
import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

from equilibria._version import __version__

from .console import complain, fail, stop
from .flags import as_flags

# ClickException: newer versions of typer have a click of their own inside.
_WrongUsage: Any = typer.BadParameter.__mro__[2]

_GROUP = "equilibria.commands"
_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
# Each with what its help begins with: listing them imports none.
COMMANDS = {
    "train": "Train a network. Without options: a small GEQ on the digits, in half a minute.",
    "evaluate": "Accuracy, calibration, solver statistics and certificates on a data set.",
    "predict": "Classify images with a trained network.",
    "explain": "Explain predictions: image, answer, gates, GradCAM, every solver step, the "
    "certificate.",
    "explore": "Draw an image, see its equilibrium form, change kernel, γ, solver and tolerance.",
    "export": "Write a network as a program for other runtimes: torch.export (.pt2) or ONNX.",
    "serve": "Answer images over HTTP, with limits, batching and metrics.",
    "certify": "Is each layer's equilibrium unique, and how far from it is the answer?",
    "bench": "Where the time goes: equilibrium layers, rest, backward; steps; and what would help.",
    "models": "List the networks, their size beside the papers', and what they are.",
    "data": "List, download and check data sets.",
    "info": "Versions of everything and the devices at hand.",
}
_OF_THE_PAPERS = {
    "theory": "What the papers prove, on your own model, and an audit of every proposition.",
    "reproduce": "The papers' tables and figures, beside ours.",
}


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"equilibria {__version__}")
        raise typer.Exit


def _common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train, evaluate and certify equilibrium networks: layers whose output is the solution of an
    optimization problem."""


def make_app(wanted: str | None = None) -> typer.Typer:
    """The command line; with ``wanted`` only that command is imported, the others have a name.

    A command is a function, or a Typer of several. Ours has the name of its module; those of other
    distributions are entry points of the group ``equilibria.commands``. Where the papers' are not
    installed, their names stay, and say what to install.
    """
    app = typer.Typer(
        name="equilibria",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(_common)
    found = {name: EntryPoint(name, f"equilibria.cli.{name}:{name}", _GROUP) for name in COMMANDS}
    found |= {entry.name: entry for entry in entry_points(group=_GROUP)}
    known = COMMANDS | _OF_THE_PAPERS
    for name in [*COMMANDS, *sorted({*found, *_OF_THE_PAPERS} - {*COMMANDS}, reverse=True)]:
        if wanted not in (None, name) and name in known:
            app.command(name, help=known[name])(_listed)
        elif name not in found:
            app.command(
                name,
                help=f"{_OF_THE_PAPERS[name]} Needs equilibria-papers.",
                context_settings={"ignore_unknown_options": True},
                add_help_option=False,
            )(_absent)
        elif isinstance(command := found[name].load(), typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _listed() -> None:
    """Stands for a command that is only listed."""


def _absent(
    context: typer.Context, rest: Annotated[list[str] | None, typer.Argument()] = None
) -> None:
    raise fail(
        f"`equilibria {context.info_name}` comes with another distribution.",
        "pip install equilibria-papers",
    )


def __getattr__(name: str) -> Any:
    """``app``: the whole command line, for those who inspect it."""
    if name == "app":
        return make_app()
    raise AttributeError(f"module 'equilibria.cli.app' has no attribute {name!r}")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        # Where the terminal has no ± or ✗: a question mark, not an error.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    debug = "--debug" in given
    try:
        # --debug may stand anywhere; the callback above documents it.
        arguments = [a for a in given if a != "--debug"]
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            wanted = next((a for a in arguments if not a.startswith("-")), "")
            command = typer.main.get_command(make_app(wanted))
            _tidy_help(command)
            code = command(args=arguments, prog_name="equilibria", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt) as stopped:
        stop(str(stopped))
        raise SystemExit(130) from None
    except _WrongUsage as wrong:
        wrong.show()
        raise SystemExit(wrong.exit_code) from None
    except BrokenPipeError:
        sys.stderr.close()  # `equilibria models | head`: the reader has left
        raise SystemExit(0) from None
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            fail(_said(error), "(--debug shows where)")
        raise SystemExit(1) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _tidy_help(command: Any) -> None:
    """Paragraphs without the line breaks of the source, and no ``<bool>`` for flags, which take no
    value, as newer typers show it."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    for option in command.get_params(typer.Context(command, **_HELP)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _tidy_help(inner)


def _said(error: Exception) -> str:
    """The message; the kind of error too where the message alone says little."""
    text = as_flags(error).strip()
    if isinstance(error, OSError) and error.strerror:  # its own text begins with a number
        return error.strerror + ("" if error.filename is None else f": {error.filename}")
    if isinstance(error, KeyError) or not text or len(text) < 12:
        return f"{type(error).__name__}: {text}"
    return text


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as a line for people: no file, no source."""
    complain("warning:", str(message), "yellow")
