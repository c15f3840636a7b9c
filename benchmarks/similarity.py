"""How long CKA of all pairs of layers takes, and how near its minibatch form comes.

    python benchmarks/similarity.py [--layers 24] [--stimuli 10000] [--features 1024]

Wanted on two cores: at most 60 s for 24 × 24 layers of 10,000 × 1,024 fp32, of one store with itself; the debiased
minibatch form within 1e-3 of the whole.
"""

from __future__ import annotations

import argparse
import time

import torch

from forge_plugins_interp.metrics.components import Cka
from forge_plugins_interp.metrics.config import CkaConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--stimuli", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=1024)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = options.stimuli, options.features
    common = torch.randn(shape, generator=generator)
    # as in a model, neighbours are alike and the ends are not
    layers = [common]
    for _ in range(options.layers - 1):
        layers.append(0.9 * layers[-1] + 0.4 * torch.randn(shape, generator=generator))
    print(f"{options.layers} × {options.layers} layers of {options.stimuli} × {options.features}, float64")
    whole, seconds = timed(Cka(CkaConfig()), layers)
    print(f"debiased CKA: {seconds:.1f} s")
    parts, seconds = timed(Cka(CkaConfig(batch=max(4, options.stimuli // 10))), layers)
    print(f"in ten batches: {seconds:.1f} s, at most {float((parts - whole).abs().max()):.1e} from the whole")


def timed(metric: Cka, layers: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    found = metric.matrix(layers)
    return found, time.perf_counter() - start


if __name__ == "__main__":
    main()
