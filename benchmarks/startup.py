"""Processor time of the commands that must answer at once, as fresh processes, in alternation with an empty one.

    python benchmarks/startup.py [--repeats N]

A budget is a multiple of the empty process, which is the interpreter's own start on this machine; a median above its
budget is marked. The import of the libraries is what no command can do without.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORGE = str(Path(sys.executable).with_name("forge"))
EMPTY = "python -c pass"
LIBRARIES = "import attrs, cattrs, click, pluggy, tomllib"
COMMANDS = {
    EMPTY: ([sys.executable, "-c", "pass"], 1),
    LIBRARIES: ([sys.executable, "-c", LIBRARIES], None),
    "forge --help": ([FORGE, "--help"], 5),
    "forge plugins": ([FORGE, "plugins"], 6),
    "forge validate configs/demo.toml": ([FORGE, "validate", "configs/demo.toml"], 8),
    "completion of optimizer. behind it": ([FORGE, "completion", "bash", "--words"], 12),
}
"""Each command, and how many times the empty process it may take, if we can do something about it."""
LINE = {"COMP_LINE": "forge run configs/demo.toml optimizer."}
"""What a shell says as it asks for the words at the cursor."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    seconds = measure(parser.parse_args().repeats)

    interpreter = statistics.median(seconds[EMPTY])
    print(f"{'command':45} {'median':>8} {'minimum':>8} {'multiple':>9} {'budget':>7}")
    for name, (_, budget) in COMMANDS.items():
        median, minimum = statistics.median(seconds[name]), min(seconds[name])
        multiple = median / interpreter
        allowed = "" if budget is None else f"{budget}x"
        mark = "  above" if budget is not None and multiple > budget else ""
        print(f"{name:45} {median:7.3f}s {minimum:7.3f}s {multiple:8.1f}x {allowed:>7}{mark}")


def measure(repeats: int) -> dict[str, list[float]]:
    """Processor seconds, user and system, of each command, one process at a time.

    Bytecode is cached, as it is for every user after the first call, also where the environment forbids writing it
    beside the sources. The first round fills that cache, and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, **LINE, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(repeats + 1):
            for name, (command, _) in COMMANDS.items():
                before = _seconds_of_children()
                finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
                seconds[name].append(_seconds_of_children() - before)
                if finished.returncode != 0:
                    raise SystemExit(f"{name} failed:\n{finished.stdout}{finished.stderr}")
    return {name: times[1:] for name, times in seconds.items()}


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
