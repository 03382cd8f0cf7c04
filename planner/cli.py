"""The commands `plan` and `estimate`: parse, call `planner.api`, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from planner.errors import InputError
from planner.layout_text import WORDS, parse_request

# What a search tells while it works: the share that is done, and what it does now.
Progress = Callable[[float, str], None]

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="a preset, a Hugging Face config.json, or a TOML file"),
]
ClusterName = Annotated[
    str, typer.Option("--cluster", metavar="NAME", help="a shipped profile or a TOML file")
]
Nodes = Annotated[int | None, typer.Option("--nodes", metavar="N", help="whole nodes to use")]
Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", help="GPUs, in place of --nodes")]
Batch = Annotated[int, typer.Option("--global-batch-size", metavar="N", help="sequences a step")]
SeqLen = Annotated[int, typer.Option("--seq-len", metavar="N", help="tokens a sequence")]
Precision = Annotated[str, typer.Option("--precision", metavar="NAME", help="bf16, fp16, fp8, ...")]
Optimizer = Annotated[
    str, typer.Option("--optimizer", metavar="NAME", help="adamw, sgd, muon, ...")
]
RuntimeName = Annotated[
    str, typer.Option("--runtime", metavar="NAME", help="the training framework, by its file")
]
LoraRank = Annotated[
    int | None,
    typer.Option("--lora", metavar="RANK", help="train low-rank adapters of this rank alone"),
]
Qlora = Annotated[bool, typer.Option("--qlora", help="with --lora: frozen weights in 4 bits")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def plan(
    model: Model,
    cluster: ClusterName,
    global_batch_size: Batch,
    seq_len: SeqLen,
    nodes: Nodes = None,
    gpus: Gpus = None,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    runtime: RuntimeName = "megatron-core",
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", metavar="KEY=VALUE", help="hold a degree, as in tp=8; repeatable"),
    ] = None,
    max_degree: Annotated[
        list[str] | None,
        typer.Option("--max-degree", metavar="KEY=VALUE", help="bound a degree; repeatable"),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", help="alternatives to show")] = 10,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="write the plan here, as JSON"),
    ] = None,
    margin: Annotated[
        float,
        typer.Option("--memory-margin", metavar="F", help="share of device memory to keep free"),
    ] = 0.04,
    lora: LoraRank = None,
    qlora: Qlora = False,
    as_json: AsJson = False,
) -> None:
    """Find the best layout of a model on a cluster, and prove it best under the cost model."""
    require_one_size(nodes, gpus)
    require_at_least_one(
        {"nodes": nodes, "gpus": gpus, "global-batch-size": global_batch_size, "seq-len": seq_len}
    )
    require_at_least_one({"top": top})
    fixed, bounded = assignments(fix or [], "--fix"), assignments(max_degree or [], "--max-degree")
    if named := sorted(bounded.keys() & WORDS.keys()):
        raise InputError(
            f"--max-degree bounds numbers, and {named[0]} is a name; use --fix {named[0]}=NAME",
            values={"max-degree": named[0]},
        )
    from planner import api

    check_targets(output)
    with progress_on_terminal() as progress:
        answer = api.plan(
            model,
            cluster=cluster,
            nodes=nodes,
            gpus=gpus,
            global_batch_size=global_batch_size,
            seq_len=seq_len,
            precision=precision,
            optimizer=optimizer,
            runtime=runtime,
            fix=fixed,
            max_degree=bounded,
            top=top,
            memory_margin=margin,
            lora_rank=lora,
            qlora=qlora,
            progress=progress,
        )
    if output is not None:
        from planner.plan import save_plan

        save_plan(answer.plan, output)
    write_answer(answer, as_json=as_json)
    if output is not None and not as_json:
        typer.echo(f"\nWrote {output}")


def estimate(
    model: Model,
    cluster: ClusterName,
    global_batch_size: Batch,
    seq_len: SeqLen,
    layout: Annotated[
        str, typer.Option("--layout", metavar="TEXT", help='degrees, as in "tp=8 pp=4 zero=1"')
    ],
    nodes: Nodes = None,
    gpus: Gpus = None,
    precision: Precision = "bf16",
    optimizer: Optimizer = "adamw",
    runtime: RuntimeName = "megatron-core",
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="write the simulated step for Perfetto"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="draw the simulated step as SVG"),
    ] = None,
    lora: LoraRank = None,
    qlora: Qlora = False,
    as_json: AsJson = False,
) -> None:
    """Time and memory of one layout that you name."""
    require_one_size(nodes, gpus)
    require_at_least_one(
        {"nodes": nodes, "gpus": gpus, "global-batch-size": global_batch_size, "seq-len": seq_len}
    )
    from planner import api

    check_targets(trace, plot)
    answer = api.estimate(
        model,
        cluster=cluster,
        nodes=nodes,
        gpus=gpus,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        layout=layout,
        precision=precision,
        optimizer=optimizer,
        runtime=runtime,
        trace=trace,
        plot=plot,
        lora_rank=lora,
        qlora=qlora,
    )
    write_answer(answer, as_json=as_json)


def check_targets(*paths: Path | None) -> None:
    """Refuse files that cannot be written before the search, not after it."""
    from planner.files import check_target

    for path in paths:
        if path is not None:
            check_target(path)


def write_answer(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the document as JSON or as text."""
    if as_json:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    from planner.render import print_answer

    print_answer(document)


def require_one_size(nodes: int | None, gpus: int | None) -> None:
    if (nodes is None) == (gpus is None):
        given = "neither is given" if nodes is None else f"both are given ({nodes} and {gpus})"
        raise InputError(
            f"say the size of the job with one of --nodes and --gpus; {given}",
            values={"nodes": nodes, "gpus": gpus},
            legal=["--nodes N", "--gpus N"],
        )


def require_at_least_one(values: Mapping[str, int | None]) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise InputError(
                f"--{name} is {value}, and must be at least 1",
                values={name: value},
                legal={name: [1]},
            )


def assignments(words: list[str], option: str) -> dict[str, int]:
    """The values of ``KEY=VALUE`` words, checked as in a layout; names become their codes.

    >>> assignments(["tp=8", "schedule=interleaved"], "--fix")
    {'tp': 8, 'schedule': 2}
    """
    if not words:
        return {}
    try:
        request = parse_request(" ".join(words))
    except InputError as error:
        message = f"{option} {' '.join(words)[:60]!r}: {error.message}"
        raise type(error)(message, values=error.values, legal=error.legal) from error
    if request.stage_layers is not None:
        raise InputError(f"{option} takes degrees, not stages=", values={"stages": "given"})
    return {
        word.partition("=")[0]: int(getattr(request.layout, word.partition("=")[0]))
        for word in " ".join(words).replace(",", " ").split()
    }


@contextmanager
def progress_on_terminal() -> Iterator[Progress | None]:
    """A progress bar on stderr when a person watches it; None otherwise."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("searching", total=1.0)

        def report(done: float, what: str) -> None:
            bars.update(task, completed=done, description=what)

        yield report
