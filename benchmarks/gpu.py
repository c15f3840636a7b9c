"""Asks a GPU for half an hour: does Forge work there, are the numbers right, how fast is it.

A list of steps, the most telling first, each in a process of its own with a time limit, so that half an hour that ends
early has still said something. Each prints a row of a table, and appends a line of JSON, which names the machine, to
``--out``. A step begins only if the time left is enough for it, and if the GPU has the memory that it takes. It needs
Forge and torch 2.11 or newer, and no network.

Usage: ``python benchmarks/gpu.py --minutes 25 --out gpu.jsonl``. ``--list`` shows the steps; ``--only documents``,
repeated, picks some. ``--tiny`` runs the same list in small sizes, to see that it works; ``--device cpu``, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu_steps import STEPS
from gpu_steps.machine import names_of
from gpu_steps.step import FailedError, Setting, SkippedError, Step

from forge_core.errors import nearest

PATIENCE = 3
"""A step may take so many times what it took on a GPU when this was written."""
TINY_LIMIT = 600
"""Seconds that a step in small sizes may take."""


def main() -> None:
    options = parse_options()
    chosen = [step for step in STEPS if not options.only or step.name in options.only]
    if options.list:
        for step in chosen:
            print(f"{step.name:16}{step.seconds:5} s  {step.asks}")
    elif options.in_process:
        print(json.dumps(answer(chosen[0], options)))
    else:
        raise SystemExit(run_all(chosen, options))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25, help="In all.")
    parser.add_argument("--only", action="append", default=[], metavar="STEP", help="May be repeated.")
    parser.add_argument("--list", action="store_true", help="The steps, and how long each takes on an H200.")
    parser.add_argument("--out", type=Path, help="A file to which each answer is appended, a line of JSON each.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="Small sizes; times and memory are not judged.")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [step.name for step in STEPS]
    if unknown := [name for name in options.only if name not in names]:
        near = nearest(unknown[0], names)
        meant = f" did you mean {near}?" if near else ""
        parser.error(f"--only {unknown[0]}: there is no such step;{meant} there are {', '.join(names)}")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu takes --tiny: the other sizes are for a GPU")
    if options.list:
        return options
    shortest = min(step.seconds for step in STEPS if not options.only or step.name in options.only)
    if options.minutes * 60 < shortest:
        parser.error(f"--minutes {options.minutes:g} are too few for any step: the shortest takes {shortest} s")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU here; --device cpu --tiny tries the list out without one")
    return options


def run_all(steps: Sequence[Step], options: argparse.Namespace) -> int:
    """Print the table; the exit code is 1 if a step has failed."""
    until = time.monotonic() + options.minutes * 60
    print("| step | verdict | figures | s |\n|---|---|---|---|", flush=True)
    machine = names_of(torch.device(options.device)) if options.out is not None else {}
    verdicts = []
    for step in steps:
        left = until - time.monotonic()
        if left < step.seconds:
            result = {"verdict": "skipped", "reason": f"takes {step.seconds} s, and {max(left, 0):.0f} s are left"}
        else:
            limit = TINY_LIMIT if options.tiny else PATIENCE * step.seconds
            result = in_a_process(step, options, min(left, limit))
        result = {"step": step.name, **result}
        verdicts.append(result["verdict"])
        print(row(result), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps({**result, "machine": machine}) + "\n")
    return int("failed" in verdicts)


def in_a_process(step: Step, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """The answer, or why there is none."""
    begun = time.monotonic()
    interpreted = {} if options.device == "cuda" else {"TRITON_INTERPRET": "1"}  # kernels run on the host's memory
    process = Popen(
        command_of(step, options),
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **interpreted},
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"verdict": "failed", "reason": f"not done after {limit:.0f} s", "seconds": round(limit, 1)}
    seconds = round(time.monotonic() - begun, 1)
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()] or ["no message"]
        reason = f"exit code {process.returncode}: {lines[-1]}"
        return {"verdict": "failed", "reason": reason, "errors": errors[-4000:], "seconds": seconds}
    return {**json.loads(output.splitlines()[-1]), "seconds": seconds}


def command_of(step: Step, options: argparse.Namespace) -> list[str]:
    """Which prints the answer as its last line."""
    command = [sys.executable, __file__, "--in-process", "--only", step.name, "--device", options.device]
    return command + ["--tiny"] * options.tiny


def answer(step: Step, options: argparse.Namespace) -> dict[str, Any]:
    """Run ``step`` in this process."""
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        gib = torch.cuda.get_device_properties(device).total_memory / 2**30
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if not options.tiny and (why := step.refusal(gib, has_bf16=has_bf16)):
            return {"verdict": "skipped", "reason": why}
    with TemporaryDirectory() as folder:
        setting = Setting(device=device, tiny=options.tiny, folder=Path(folder))
        try:
            return {"verdict": "ok", "figures": dict(step.run(setting))}
        except SkippedError as why:
            return {"verdict": "skipped", "reason": str(why)}
        except FailedError as why:
            return {"verdict": "failed", "reason": str(why), "figures": dict(why.figures)}


def row(result: Mapping[str, Any]) -> str:
    """A line of the table."""
    figures = ", ".join(f"{name} {value}" for name, value in result.get("figures", {}).items())
    verdict = ": ".join(filter(None, (result["verdict"], result.get("reason", ""))))
    cells = (result["step"], verdict, figures, str(result.get("seconds", "")))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    main()
