"""The commands `run`, `calibrate` and `compare`: parse, call, print. Torch is imported inside."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from planner.errors import InputError, ShardwiseError

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan file, as plan -o writes it")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, or auto")]


def run(
    plan: PlanFile,
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="training steps")] = 20,
    data: Annotated[
        str, typer.Option("--data", metavar="PATH", help="token or text files, or synthetic")
    ] = "synthetic",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="of weights and data")] = 0,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="F", help="at its peak, after the warm-up")
    ] = 3e-4,
    checkpoint_dir: Annotated[
        Path | None, typer.Option("--checkpoint-dir", metavar="DIR", help="save checkpoints here")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", metavar="K", help="steps between checkpoints")
    ] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest whole checkpoint")
    ] = False,
    init_from: Annotated[
        Path | None,
        typer.Option("--init-from", metavar="DIR", help="weights of a Hugging Face model"),
    ] = None,
    save_hf: Annotated[
        Path | None,
        typer.Option("--save-hf", metavar="DIR", help="save the weights as Hugging Face does"),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", help="processes to start here")
    ] = None,
    device: Device = "auto",
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="seconds a collective may wait")
    ] = 300.0,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="DIR", help="write one step of every rank for Perfetto"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="write the measurements here"),
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log-file", metavar="FILE", help="one JSON line a step")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="trace one rank without a GPU: bytes, memory, collectives"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Execute a plan with real collectives, and measure it."""
    require_at_least_one({"steps": steps, "checkpoint-every": checkpoint_every, "nproc": nproc})
    if dry_run:
        from executor.dryrun import dry_run as traced
        from executor.dryrun import render as render_dry_run
        from planner.plan import load_plan

        document = traced(load_plan(plan))
        typer.echo(json.dumps(document, indent=2) if as_json else render_dry_run(document))
        return
    from executor.run import RunOptions, run_command

    options = RunOptions(
        steps=steps,
        data=data,
        seed=seed,
        learning_rate=learning_rate,
        checkpoint_dir=checkpoint_dir,
        every=checkpoint_every,
        resume=resume,
        init_from=init_from,
        save_hf=save_hf,
        device=device,
        timeout_s=timeout,
        trace=trace,
        output=output,
        log=log,
        quiet=as_json,
    )
    document = run_command(plan, options, nproc, arguments=torchrun_arguments())
    if as_json and document is not None:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))


def calibrate(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="the profile to write")
    ] = Path("here.toml"),
    device: Device = "auto",
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", help="processes (or GPUs) that work at once"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="45 s at most, coarser")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, and write a cluster profile of it."""
    require_at_least_one({"nproc": nproc})
    from executor.calibrate import calibrate as measured
    from executor.calibrate import render as render_calibration

    document = measured(output, device=device, nproc=nproc, quick=quick)
    typer.echo(json.dumps(document, indent=2) if as_json else render_calibration(document))


def compare(
    plan: PlanFile,
    measurements: Annotated[
        Path, typer.Argument(metavar="MEASUREMENTS", help="what run -o has written")
    ],
    as_json: AsJson = False,
) -> None:
    """Hold a prediction against a run, term by term."""
    from executor.compare import compare as held
    from executor.compare import render as render_comparison
    from executor.measure import load_measurements
    from planner.plan import load_plan

    document = held(load_plan(plan), load_measurements(measurements))
    typer.echo(json.dumps(document, indent=2) if as_json else render_comparison(document))


def require_at_least_one(values: dict[str, int | None]) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise InputError(
                f"--{name} is {value}, and must be at least 1",
                values={name: value},
                legal={name: [1]},
            )


def torchrun_arguments() -> list[str]:
    """What followed ``run`` on the command line, without the choice of processes."""
    given = sys.argv[sys.argv.index("run") + 1 :] if "run" in sys.argv else []
    kept, skip = [], False
    for word in given:
        if not skip and word != "--nproc" and not word.startswith("--nproc="):
            kept.append(word)
        skip = word == "--nproc"
    return kept


COMMANDS = {"run": run, "calibrate": calibrate, "compare": compare}


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m executor``: these commands alone, as torchrun starts them."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    for name, function in COMMANDS.items():
        app.command(name)(function)
    command = typer.main.get_command(app)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command.main(given, prog_name="python -m executor", standalone_mode=False)
    except ShardwiseError as error:
        print(f"shardwise: {error.message}", file=sys.stderr)
        return int(error.exit_code)
    except Exception as error:
        if not callable(message := getattr(error, "format_message", None)):
            raise
        print(f"shardwise: {message()}", file=sys.stderr)
        return 2
    return 0
