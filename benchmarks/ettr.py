"""The effective training time ratio of long jobs, simulated: by model, number of GPUs, and what is changed.

    python benchmarks/ettr.py [--gpus N …] [--days D] [--lives N]

What it is reckoned with is printed with its source. A step has 2^24 tokens, at the MFU of the figures on H100.
Checkpoints are of fp32 parameters and AdamW's two states, 12 bytes a parameter, shared out to 1,024 GPUs, and each
further 1,024 hold, and read, a copy. With checkpoints in memory (the mirror host_memory), the run goes on from these
after a failure that a spare node or the same nodes follow, and from the disk after one that has made wrong numbers.
"""

from __future__ import annotations

import argparse

import attrs

from forge_plugins_plan.ettr import Ettr, simulate
from forge_plugins_plan.ettr_report import SPARES, duration
from forge_plugins_plan.figures import Figures, sources
from forge_plugins_plan.lives import LOSSES
from forge_plugins_plan.long_job import LongJob, best_interval, best_memory_interval, seconds_between_failures

MODELS = {"8B": (8.03e9, 8.03e9), "70B": (70.55e9, 70.55e9), "671B": (671e9, 37e9)}
"""Parameters, and those that a token meets (Llama 3, DeepSeek-V3)."""
GPUS = (1024, 9600, 16_384, 100_000)
TOKENS = 2**24
PEAK = 989e12
MFU = 0.4  # Llama 3 (arXiv 2407.21783), Table 4: 38 to 43 %
BYTES = 12
SHARED_OUT_TO = 1024
AIMS = {9600: 0.97, 16_384: 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--days", type=float, default=90.0)
    parser.add_argument("--lives", type=int, default=20)
    options = parser.parse_args()
    figures = Figures(spares=float(SPARES))

    def lived(job: LongJob, figures: Figures) -> Ettr:
        return simulate(job, figures, days=options.days, lives=options.lives)

    print(f"With {SPARES} spare nodes, run.step_timeout = 600, and the best interval of checkpoints; losses in %\n")
    losses = [loss for loss in LOSSES if loss != "fewer replicas"]
    print_row("GPUs", "model", "a failure every", "checkpoint", "every", "ETTR", *losses, "costs most", "aim")
    print_row(*["---"] * (8 + len(losses)))
    for gpus in options.gpus:
        for model in MODELS:
            job = best_job(model, gpus, figures)
            found = lived(job, figures)
            print_row(
                f"{gpus:,}",
                model,
                duration(seconds_between_failures(job, figures)),
                f"{job.checkpoint_bytes / 1e12:.2f} TB",
                duration(job.interval),
                f"{found.ratio:.2%}",
                *(f"{100 * found.lost[loss]:.2f}" for loss in losses),
                found.costs_most,
                aim(gpus, found),
            )

    print("\nETTR with one thing changed\n")
    print_row("GPUs", "model", *CHANGES)
    print_row(*["---"] * (2 + len(CHANGES)))
    for gpus in options.gpus:
        for model in MODELS:
            cells = [lived(*change(best_job(model, gpus, figures), figures)).ratio for change in CHANGES.values()]
            print_row(f"{gpus:,}", model, *(f"{ratio:.2%}" for ratio in cells))

    print("\nCheckpoints in memory (host_memory), and on the disk every hour; losses in %\n")
    print_row("GPUs", "model", "on the disk alone", "in memory every", "ETTR", *losses, "costs most", "aim")
    print_row(*["---"] * (7 + len(losses)))
    for gpus in options.gpus:
        for model in MODELS:
            job = best_job(model, gpus, figures)
            kept, _ = in_memory(job, figures)
            found = lived(kept, figures)
            print_row(
                f"{gpus:,}",
                model,
                f"{lived(job, figures).ratio:.2%}",
                duration(kept.memory_interval),
                f"{found.ratio:.2%}",
                *(f"{100 * found.lost[loss]:.2f}" for loss in losses),
                found.costs_most,
                aim(gpus, found),
            )

    print("\nReckoned with\n")
    print_row("figure", "value", "source")
    print_row(*["---"] * 3)
    for name, value, unit, source in sources(figures):
        print_row(
            name, f"{value:.4g} {unit}".strip(), source if name != "spares" else "as ByteRobust has for 1,024 nodes"
        )


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def best_job(model: str, gpus: int, figures: Figures) -> LongJob:
    """With the interval that loses least."""
    parameters, active = MODELS[model]
    job = LongJob(
        gpus=gpus,
        checkpoint_bytes=BYTES * parameters,
        copies=max(1.0, gpus / SHARED_OUT_TO),
        step_seconds=6 * active * TOKENS / (gpus * PEAK * MFU),
        interval=1.0,
    )
    return attrs.evolve(job, interval=best_interval(job, figures))


def in_memory(job: LongJob, figures: Figures) -> tuple[LongJob, Figures]:
    """With checkpoints in the memory of the nodes as well, at the interval that loses least."""
    return attrs.evolve(job, interval=3600.0, memory_interval=best_memory_interval(job, figures)), figures


CHANGES = {
    "nothing": lambda job, figures: (job, figures),
    "no spare nodes": lambda job, figures: (job, attrs.evolve(figures, spares=0.0)),
    "checkpoints every hour": lambda job, figures: (attrs.evolve(job, interval=3600.0), figures),
    "saves in the foreground, best interval": lambda job, figures: (in_foreground(job, figures), figures),
    "run.step_timeout = 60": lambda job, figures: (attrs.evolve(job, step_timeout=60.0), figures),
    "eight replicas": lambda job, figures: (job, attrs.evolve(figures, replicas=8.0)),
}


def in_foreground(job: LongJob, figures: Figures) -> LongJob:
    waiting = attrs.evolve(job, background=False)
    return attrs.evolve(waiting, interval=best_interval(waiting, figures))


def aim(gpus: int, found: Ettr) -> str:
    if gpus not in AIMS:
        return ""
    return f"{AIMS[gpus]:.0%}, {'met' if found.ratio >= AIMS[gpus] else 'missed'}"


if __name__ == "__main__":
    main()
