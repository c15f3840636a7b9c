"""What ``forge plan`` takes: seconds, seconds of one core and GiB, for presets at numbers of ranks.

Allowed: 10 s of one core, and 1 GiB. Usage: ``python benchmarks/plan_cost.py [--preset NAME] [--ranks N]``, each as
often as wanted; without, the largest presets. Two minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
RANKS = (1, 64, 1024, 16_384, 131_072)
JOB = """
extends = "{preset}"
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
seq_len = 4096
batch_size = 1
precision = "bf16"
[optimizer]
name = "adamw"
lr = 1e-3
"""
LARGEST = ("llama_70b", "deepseek_v3_671b")


def layout(preset: str, ranks: int) -> list[str]:
    """Sparse models share out experts, where there are ranks for it."""
    is_sparse = 'name = "moe"' in (ROOT / "configs" / "model" / f"{preset}.toml").read_text()
    return [f"parallel.ep={min(ranks, 64)}"] if is_sparse and ranks > 1 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", action="append", help="of configs/model; may be repeated")
    parser.add_argument("--ranks", action="append", type=int, help="may be repeated")
    arguments = parser.parse_args()
    print(f"{'preset':<24} {'ranks':>8} {'seconds':>8} {'of a core':>10} {'GiB':>6}")
    with TemporaryDirectory() as folder:
        for preset in arguments.preset or LARGEST:
            config = Path(folder) / f"{preset}.toml"
            config.write_text(JOB.format(preset=ROOT / "configs" / "model" / f"{preset}.toml"))
            for ranks in arguments.ranks or RANKS:
                planned = [str(config), "--world-size", str(ranks), *layout(preset, ranks)]
                command = [sys.executable, "-m", "forge_core", "plan", *planned]
                start = time.perf_counter()
                process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                _, status, used = os.wait4(process.pid, 0)
                columns = f"{time.perf_counter() - start:>8.1f} {used.ru_utime + used.ru_stime:>10.1f}"
                failed = "" if status == 0 else "  (failed)"
                print(f"{preset:<24} {ranks:>8} {columns} {used.ru_maxrss / 2**20:>6.2f}{failed}", flush=True)


if __name__ == "__main__":
    main()
