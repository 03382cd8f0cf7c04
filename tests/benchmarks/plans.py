"""How long whole commands take, and how much memory: ``make bench``.

Every case is timed as a process of its own, start-up included, the median of five runs; then forty
planned cases drawn from a fixed seed, once each, of which the slowest counts. The limits are the
project's targets on two cores. Exits 1 when a case is over its limit.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPEATS = 5
RANDOM_CASES = 40
RANDOM_LIMIT_S = 5.0
SEED = 20240229
DONE, DOES_NOT_FIT = 0, 3


@dataclass(frozen=True)
class Case:
    """A command, and what it may take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    limit_bytes: float | None = None


@dataclass(frozen=True)
class Measured:
    """One run of a command: wall and processor time, peak resident memory, exit code."""

    seconds: float
    cpu_s: float
    peak_bytes: float
    code: int


def plan_arguments(
    model: str, cluster: str, gpus: int, batch: int, seq_len: int, *more: str
) -> tuple[str, ...]:
    numbers = ("--gpus", str(gpus), "--global-batch-size", str(batch), "--seq-len", str(seq_len))
    return ("plan", model, "--cluster", cluster, *numbers, "--json", *more)


CASES = (
    Case(
        "llama-3.1-405b, 16384 GPUs",
        plan_arguments("llama-3.1-405b", "dgx-h100", 16384, 2048, 8192),
        1.2,
        200e6,
    ),
    Case(
        "deepseek-v3, 2048 GPUs, fp8",
        plan_arguments("deepseek-v3", "dgx-h100", 2048, 15360, 4096, "--precision", "fp8"),
        2.0,
    ),
    Case(
        "gpt-3-175b, 1024 GPUs",
        plan_arguments("gpt-3-175b", "dgx-a100-80gb", 1024, 1536, 2048),
        1.0,
    ),
    Case("llama-2-7b, 8 GPUs", plan_arguments("llama-2-7b", "dgx-h100", 8, 128, 4096), 0.8),
    Case("--help", ("--help",), 0.3),
)


def measure(arguments: tuple[str, ...]) -> Measured:
    """Run one command to its end."""
    # As installed: with compiled modules, which an editor's or a container's setting may forbid.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    with process.stderr as errors:
        told = errors.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = code = os.waitstatus_to_exitcode(status)
    if code not in (0, 2, 3):
        sys.exit(f"{' '.join(arguments)} exited with {code}:\n{told.decode()}")
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Measured(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit, code)


def report(case: Case, runs: list[Measured]) -> bool:
    """Print the median of the runs; whether the case is within its limits.

    Processor time tells a slow command from a busy machine.
    """
    seconds = statistics.median(run.seconds for run in runs)
    cpu_s = statistics.median(run.cpu_s for run in runs)
    peak_bytes = max(run.peak_bytes for run in runs)
    share = seconds / case.limit_s
    fits = case.limit_bytes is None or peak_bytes <= case.limit_bytes
    bar = "█" * min(20, round(20 * share))
    memory = f"{peak_bytes / 1e6:6.0f} MB" + (
        f" of {case.limit_bytes / 1e6:.0f}" if case.limit_bytes else ""
    )
    verdict = "" if share <= 1 and fits else "  over"
    print(
        f"{case.name:<28} {seconds:6.2f} s of {case.limit_s:4.1f}  {share:5.2f}  {bar:<20}  "
        f"{cpu_s:5.2f}  {memory}{verdict}",
        flush=True,
    )
    return share <= 1 and fits


def bench_cases(repeats: int) -> bool:
    good = True
    for case in CASES:
        measure(case.arguments)  # compiles what is not compiled yet
        runs = [measure(case.arguments) for _ in range(repeats)]
        if any(run.code != DONE for run in runs):
            print(f"{case.name:<28} exited with {runs[0].code}")
            good = False
            continue
        good &= report(case, runs)
    return good


def random_case(draw: random.Random, models: list[str], clusters: list[str]) -> tuple[str, ...]:
    """One question that a person might ask, of any size up to 4096 nodes."""
    nodes = 2 ** draw.randint(0, 12)
    batch = draw.choice((32, 96, 240, 512, 1024, 1536, 2048, 4096, 15360))
    seq_len = draw.choice((1024, 2048, 4096, 8192, 32768, 131072))
    sizes = ("--nodes", str(nodes), "--global-batch-size", str(batch), "--seq-len", str(seq_len))
    return ("plan", draw.choice(models), "--cluster", draw.choice(clusters), *sizes, "--json")


def bench_random(count: int) -> bool:
    """The slowest of `count` drawn cases; drawn ones that are refused as illegal do not count."""
    from hwprofiles.loader import available_clusters
    from planner.presets_index import available_models

    draw = random.Random(SEED)
    models, clusters = sorted(available_models()), sorted(available_clusters())
    answered: list[tuple[Measured, tuple[str, ...]]] = []
    refused = 0
    while len(answered) < count:
        if refused > 10 * count:
            print(f"{refused} drawn cases were refused, {len(answered)} answered")
            return False
        arguments = random_case(draw, models, clusters)
        run = measure(arguments)
        if run.code in (DONE, DOES_NOT_FIT):
            answered.append((run, arguments))
        else:
            refused += 1
    slowest, arguments = max(answered, key=lambda pair: pair[0].seconds)
    good = report(Case(f"slowest of {count} drawn", arguments, RANDOM_LIMIT_S), [slowest])
    unfit = sum(run.code == DOES_NOT_FIT for run, _ in answered)
    median = statistics.median(run.seconds for run, _ in answered)
    print(f"  median {median:.2f} s; {unfit} do not fit; {refused} more were refused")
    print(f"  slowest: shardwise {' '.join(arguments)}")
    return good


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--random-cases", type=int, default=RANDOM_CASES)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    print(f"{'case':<28} {'median':>6}     limit  ratio  {'':<20}  cpu s  peak memory")
    results = [bench_cases(options.repeats)]
    if options.random_cases:
        results.append(bench_random(options.random_cases))
    sys.exit(0 if all(results) else 1)
