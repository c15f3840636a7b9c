"""Tokens a second of a job on several numbers of ranks and in several layouts, beside what ``forge plan`` predicts.

Each case is a ``forge run CONFIG --nproc RANKS`` of its own, without evaluations and checkpoints. It is killed after
the last measured step. ``batch_size`` and ``grad_accumulation`` stay as they are: more data-parallel ranks have more
tokens per step (weak scaling). With ``train.global_batch_size`` in CONFIG they share the same ones (strong scaling).
``of linear`` compares the tokens a second of a rank with those of the first case that worked. A case that cannot be run
says why in its row.

Usage, on a node of eight GPUs: ``python benchmarks/layouts.py job.toml --ranks 1 2 4 8 --layout parallel.dp_shard=-1
--layout "parallel.dp_shard=-1 parallel.tp=2" --plan "--gpu h200"``. To see that it works without a GPU: ``python
benchmarks/layouts.py configs/demo.toml --ranks 1 2 --layout parallel.dp_shard=-1 --warmup 2 --steps 5``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import torch
import train_gpu

WITHOUT = ["checkpoint.interval=0", "eval.interval=0", "metrics.interval=1", "run.name=measured", "trackers=[]"]
"""Settings of every case."""
COLUMNS = ("ranks", "layout", "tokens/s", "of linear", "MFU", "peak GiB", "step s (all)", "planned step s", "ratio")


@attrs.frozen
class Case:
    """A number of ranks, and the settings that lay the job out on them."""

    ranks: int
    layout: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="Processes of this machine.")
    parser.add_argument("--layout", action="append", help='Settings, as "parallel.tp=2 parallel.dp_shard=-1".')
    parser.add_argument("--plan", help='Options of forge plan, as "--gpu h200" or "--calibration machine.json".')
    parser.add_argument("--warmup", type=int, default=5, help="Steps that are not measured.")
    parser.add_argument("--steps", type=int, default=20, help="Steps that are.")
    parser.add_argument("--set", nargs="+", default=[], dest="overrides", help="Settings of all cases.")
    options = parser.parse_args()
    if options.warmup < 1 or options.steps < 1 or min(options.ranks) < 1:
        parser.error("--warmup, --steps and --ranks must be at least 1: the first step compiles")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}; median of {options.steps} steps after {options.warmup}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    speed_of_first = None
    for case in (Case(ranks, layout) for ranks in options.ranks for layout in options.layout or [""]):
        try:
            steps = measured(case, options)
        except RuntimeError as error:
            print_row(case, [train_gpu.reason(str(error))])
            continue
        speed = statistics.median(step["tokens_per_second"] for step in steps)
        speed_of_first = speed_of_first or speed / case.ranks
        print_row(case, cells(steps, speed, speed / case.ranks / speed_of_first, planned(case, options)))


def measured(case: Case, options: argparse.Namespace) -> Sequence[Mapping[str, float]]:
    """The logged values of the measured steps.

    Raises:
        RuntimeError: the run ended before the last of them; with what it said.
    """
    total = options.warmup + options.steps
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # ranks may write while they are killed
        steps = f"train.steps={total + train_gpu.FURTHER}"
        overrides = [*WITHOUT, steps, f"run.dir={folder}", *options.overrides, *shlex.split(case.layout)]
        command = ["run", str(options.config), "--nproc", str(case.ranks), *overrides]
        return train_gpu.logged_by(command, Path(folder) / "measured" / "metrics.jsonl", total)[options.warmup :]


def planned(case: Case, options: argparse.Namespace) -> float | None:
    """Seconds of a step, by ``forge plan``; ``None`` if it was not asked for or has no times.

    Raises:
        SystemExit: the plan is refused, though the job has been run.
    """
    if options.plan is None:
        return None
    words = ["--world-size", str(case.ranks), *shlex.split(options.plan), "--json"]
    command = ["plan", str(options.config), *words, *options.overrides, *shlex.split(case.layout)]
    done = subprocess.run([sys.executable, "-m", "forge_core", *command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    time = json.loads(done.stdout).get("time")
    return None if time is None else float(time["seconds"])


def cells(
    steps: Sequence[Mapping[str, float]], speed: float, of_linear: float, planned_seconds: float | None
) -> list[str]:
    """Of a case that was measured, from ``tokens/s`` on."""
    seconds = [step["step_seconds"] for step in steps]
    median = statistics.median(seconds)
    utilisation = [step["mfu"] for step in steps if "mfu" in step]
    memory = [step["memory_gib"] for step in steps if "memory_gib" in step]
    return [
        f"{speed:,.0f}",
        f"{of_linear:.1%}",
        f"{statistics.median(utilisation):.1%}" if utilisation else "–",
        f"{max(memory):.1f}" if memory else "–",
        f"{median:.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
        *(["–", "–"] if planned_seconds is None else [f"{planned_seconds:.3f}", f"{median / planned_seconds:.2f}"]),
    ]


def print_row(case: Case, rest: Sequence[str]) -> None:
    empty = [""] * (len(COLUMNS) - 2 - len(rest))
    print(f"| {' | '.join([str(case.ranks), case.layout or 'as in the file', *rest, *empty])} |", flush=True)


if __name__ == "__main__":
    main()
