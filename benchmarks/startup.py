"""How long the commands take that must answer at once, as fresh processes, in alternation with an empty one.

    python benchmarks/startup.py [--repeats N]

Exits with 1 if a median is above its budget. The empty process is what Python itself costs on this machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORGE = str(Path(sys.executable).with_name("forge"))
COMMANDS = {
    "python -c pass": ([sys.executable, "-c", "pass"], None),
    "forge --help": ([FORGE, "--help"], 0.10),
    "forge plugins": ([FORGE, "plugins"], 0.15),
    "forge validate configs/demo.toml": ([FORGE, "validate", "configs/demo.toml"], 0.15),
}
"""What is run, and the seconds it may take."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    seconds = measure(parser.parse_args().repeats)

    print(f"{'command':34} {'median':>8} {'minimum':>8} {'budget':>8}")
    slow = False
    for name, (_, budget) in COMMANDS.items():
        median, minimum = statistics.median(seconds[name]), min(seconds[name])
        slow |= budget is not None and median > budget
        print(f"{name:34} {median:7.3f}s {minimum:7.3f}s {f'{budget:.2f}s' if budget else '':>8}")
    return int(slow)


def measure(repeats: int) -> dict[str, list[float]]:
    """Wall seconds of each command, one process at a time.

    Bytecode is cached, as it is for every user after the first call, also where the environment forbids writing it
    beside the sources. The first round fills that cache, and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(repeats + 1):
            for name, (command, _) in COMMANDS.items():
                start = time.perf_counter()
                finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
                seconds[name].append(time.perf_counter() - start)
                if finished.returncode != 0:
                    raise SystemExit(f"{name} failed:\n{finished.stdout}{finished.stderr}")
    return {name: times[1:] for name, times in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
