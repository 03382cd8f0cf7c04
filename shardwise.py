"""The front door: the command `shardwise`, and the names for ``import shardwise``.

Each room parses and prints its own commands, in a module that is imported when its command is
called: ``--help`` imports nothing, and ``plan`` no room that it does not need.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

__all__ = ["main"]


class Command(NamedTuple):
    """Where a command lives and its line of help.

    `target` is ``module:attribute``, a typer app or a function; `joined` are functions of other
    rooms that become subcommands of the app.
    """

    target: str
    help: str
    joined: tuple[str, ...] = ()


COMMANDS = {
    "plan": Command("planner.cli:plan", "find the best layout of a model on a cluster"),
    "estimate": Command("planner.cli:estimate", "time and memory of one layout that you name"),
    "validate": Command("reports.cli:validate", "compare predictions with published runs"),
    "run": Command("executor.cli:run", "execute a plan here, with real collectives"),
    "calibrate": Command("executor.cli:calibrate", "measure this machine, make a profile of it"),
    "compare": Command("executor.cli:compare", "hold a prediction against a run"),
    "models": Command("planner.models_cli:models", "list the models, or count one"),
    "hardware": Command(
        "hwprofiles.cli:app",
        "list the clusters and devices, show one, or time an operation on it",
        joined=("planner.hardware_cli:gemm", "planner.hardware_cli:collective"),
    ),
}

NAMES = {
    "plan": "planner.api",
    "estimate": "planner.api",
    "load_model": "planner.presets_index",
    "load_cluster": "hwprofiles.loader",
    "load_plan": "planner.plan",
    "save_plan": "planner.plan",
    "Plan": "planner.plan",
    "Layout": "planner.layout",
    "StageLayout": "planner.layout",
    "ModelSpec": "planner.specs",
    "TrainSpec": "planner.specs",
    "Estimate": "planner.results",
    "ShardwiseError": "planner.errors",
    "InputError": "planner.errors",
    "ModelError": "planner.errors",
    "ProfileError": "planner.errors",
    "LayoutError": "planner.errors",
    "PlanFileError": "planner.errors",
    "DoesNotFit": "planner.errors",
}


def __getattr__(name: str) -> Any:
    """Public names, imported when first used."""
    if name == "__version__":
        from planner.version import VERSION

        return VERSION
    if name in NAMES:
        value = getattr(import_module(NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES, "__version__"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 2 refused, 3 does not fit)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        code = run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, as `head` does; point stdout away so that closing it stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"shardwise: cannot write the answer: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if type(error).__name__ == "Exit":  # how --help ends; the class moves with typer's version
            return int(getattr(error, "exit_code", 0))
        refusal = describe_refusal(error)
        if refusal is None:
            raise
        if as_json:
            print(json.dumps(refusal, default=plain_value))
        else:
            print(f"shardwise: {refusal['error']['message']}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    return code


def run(given: list[str]) -> int:
    """Find the command, import its room and hand over; errors pass through."""
    name = next(iter(given), "--help")
    if name in ("--help", "-h"):
        print(help_text())
        return 0
    if name == "--version":
        print(f"shardwise {__getattr__('__version__')}")
        return 0
    if name not in COMMANDS:
        raise unknown_command(name)
    # The planner's arrays are small: threads of a BLAS only cost start-up time.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    import typer

    app = find(COMMANDS[name].target)
    if not isinstance(app, typer.Typer):
        function, app = app, typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name)(function)
    for target in COMMANDS[name].joined:
        app.command(target.partition(":")[2])(find(target))
    command = typer.main.get_command(app)
    # Not command.main, which turns a closed pipe and Ctrl-C into exits of its own.
    with command.make_context(f"shardwise {name}", given[1:]) as context:
        command.invoke(context)
    return 0


def find(target: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def help_text() -> str:
    """What `shardwise --help` prints."""
    width = max(map(len, [*COMMANDS, "--version"])) + 2
    lines = [f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: shardwise COMMAND [ARGUMENTS]",
            "",
            "Plan how to train a large model on a GPU cluster.",
            "",
            "Commands:",
            *lines,
            "",
            "Options:",
            f"  {'--help':<{width}}this text; after a command, its own options",
            f"  {'--version':<{width}}the version of shardwise",
            "",
            "Example:",
            "  shardwise plan llama-3-70b --cluster dgx-h100 --nodes 8 \\",
            "      --global-batch-size 512 --seq-len 8192",
        ]
    )


def unknown_command(name: str) -> Exception:
    """The refusal of a command that there is not, with near names."""
    from difflib import get_close_matches

    from planner.errors import InputError

    near = get_close_matches(name, COMMANDS, n=3) or list(COMMANDS)
    return InputError(
        f"there is no command {name!r}; nearest: {', '.join(near)}",
        values={"command": name},
        legal={"command": near},
    )


def describe_refusal(error: Exception) -> dict[str, Any] | None:
    """The JSON document of an error that is the caller's; None for one that is ours."""
    from hwprofiles.errors import ShardwiseError

    if isinstance(error, ShardwiseError):
        return error.as_json()
    # Usage errors come from typer or from click, by typer's version; both format their message.
    if callable(message := getattr(error, "format_message", None)):
        parameter = getattr(getattr(error, "param", None), "name", None)
        values = {"parameter": parameter} if parameter else {}
        sentence = " ".join(str(message()).split()).rstrip(".")
        legal = list(getattr(error, "possibilities", None) or [])
        return {"error": {"message": sentence, "values": values, "legal": legal}}
    return None


def plain_value(value: Any) -> Any:
    """JSON form of what the values of an error may hold beside plain types."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


if __name__ == "__main__":
    sys.exit(main())
