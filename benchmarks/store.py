"""What ``forge extract`` adds to the forwards that it needs, how fast it writes, and its memory.

    python benchmarks/store.py [--dim 256] [--samples 1000 4000] [--rounds 3]

A small model is made and saved, and read by each measurement in a process of its own. Wanted: at least 0.9 of the
tokens a second of bare forwards, 300 MB/s where values are large beside the work, and the same memory for any number
of samples.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

JOB = """
[run]
dir = "{folder}/runs"
name = "bench"
[model]
name = "transformer"
dim = {dim}
n_layers = 4
n_heads = 4
max_seq_len = 256
[data]
name = "text_files"
path = "{folder}/corpus"
pattern = "*.txt"
[train]
steps = 1
seq_len = 256
batch_size = 4
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[scheduler]
name = "constant"
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(*options.one)
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        lines = 8 * (max(options.samples) + 8)
        (folder / "corpus/a.txt").write_text("".join(f"{n * n:31}\n" for n in range(lines)))
        (folder / "job.toml").write_text(JOB.format(folder=folder, dim=options.dim))
        command = [sys.executable, "-W", "ignore", "-m", "forge_core", "run", str(folder / "job.toml")]
        subprocess.run(command, check=True, capture_output=True)
        ratios = []
        for samples in options.samples:
            for number in range(options.rounds):
                bare, _, _ = in_a_process(folder, "bare", samples, number)
                seconds, size, memory = in_a_process(folder, "extract", samples, number)
                ratios.append(bare / seconds)
            rate = samples * 256 / seconds
            print(
                f"{samples:,} samples: {statistics.median(ratios[-options.rounds :]):.3f} of bare forwards; "
                f"{rate:,.0f} tokens/s; {size / 1e6 / seconds:,.0f} MB/s; {memory / 2**20:,.0f} MiB at most"
            )


def in_a_process(folder: Path, what: str, samples: int, number: int) -> tuple[float, float, float]:
    """Seconds, bytes, and the largest memory."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", what, str(folder), str(samples), str(number)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    seconds, size, memory = map(float, printed[-3:])
    return seconds, size, memory


def measure(what: str, folder: str, samples: str, number: str) -> None:
    import forge_plugins_interp as interp
    from forge_plugins_interp.extraction import Request, extract
    from forge_plugins_interp.reduction import Reduction

    n, out = int(samples), Path(folder) / f"acts-{samples}-{number}"
    with interp.open(f"{folder}/runs/bench", log=lambda line: None) as session, torch.no_grad():
        source = session.open_data([f"data.path={folder}/corpus"])
        session.model(torch.from_numpy(source.read(np.arange(4))["tokens"]))
        start = time.perf_counter()
        if what == "bare":
            for first in range(0, n, 4):
                session.model(torch.from_numpy(source.read(np.arange(first, first + 4) % len(source))["tokens"]))
        else:
            request = Request(out=out, sites=["blocks.*.resid_post"], reduction=Reduction(), samples=n)
            extract(session, source, request, lambda line: None)
        seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    print(seconds, size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main()
