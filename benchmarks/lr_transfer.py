"""Whether the best learning rate of a narrow model is that of a wide one, on the source of the standard library.

    python benchmarks/lr_transfer.py

Trains ``configs/studies/mup.toml`` with two layers at two widths, with each learning rate, under ``mup`` and without a
parametrization. The lowest loss on held-out text decides. Wanted: under ``mup`` the best rates of both widths are
within a factor of two. At its defaults it takes half an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "studies" / "mup.toml"
RATES = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs=2, default=(64, 512), help="the first is the base")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--parallel", type=int, default=2)
    arguments = parser.parse_args()
    narrow, wide = arguments.widths
    chosen = {"mup": f"parametrization={{name='mup', base={{dim={narrow}}}}}", "standard": "parametrization=standard"}
    print(f"eval/loss after {arguments.steps} steps, nats a byte\n")
    print(f"{'':24}" + "".join(f"{rate:>10.1e}" for rate in RATES) + f"{'best':>10}")
    for name, setting in chosen.items():
        losses = sweep((narrow, wide), setting, arguments.steps, arguments.parallel)
        best = {}
        for width in (narrow, wide):
            row = [losses[width, rate] for rate in RATES]
            best[width] = RATES[row.index(min(row))]
            print(f"{f'{name}, {width} wide':24}" + "".join(f"{one:10.4f}" for one in row) + f"{best[width]:10.1e}")
        print(f"{'':24}best rate of {wide} over that of {narrow}: {best[wide] / best[narrow]:g}\n", flush=True)


def sweep(widths: tuple[int, ...], setting: str, steps: int, parallel: int) -> dict[tuple[int, float], float]:
    """The held-out loss for each width and rate; infinity for a run that has diverged."""
    with tempfile.TemporaryDirectory() as folder:
        grid = ["--sweep", f"model.dim={','.join(map(str, widths))}"]
        grid += ["--sweep", f"optimizer.lr={','.join(map(str, RATES))}", "--parallel", str(parallel)]
        short = [f"train.steps={steps}", "model.n_layers=2", f"eval.interval={steps}", "checkpoint.interval=0"]
        short += [setting, f"run.dir={folder}"]
        command = [sys.executable, "-m", "forge_core", "sweep", str(CONFIG), *grid, *short]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        losses = {}
        for width in widths:
            for rate in RATES:
                lines = (Path(folder) / f"mup-dim-{width}-lr-{rate}" / "metrics.jsonl").read_text().splitlines()
                found = [json.loads(line).get("eval/loss") for line in lines]
                values = [value for value in found if value is not None]
                losses[width, rate] = values[-1] if values else float("inf")
        return losses


if __name__ == "__main__":
    main()
