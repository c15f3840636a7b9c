"""The demo, trained and looked into: stores in three layouts, layers compared, a probe, patching, an autoencoder.

    python benchmarks/look_into_demo.py [--folder FOLDER] [--steps 400] [--sae-steps 600]

Each line is a command of ``forge``, how long it took and what came of it. Wanted: under ten minutes on two cores in
all; three equal stores; a probe that beats its control task; an autoencoder that leaves less of the variance than as
many principal components. A folder that has ``runs/demo`` is not trained again.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from forge_plugins_interp.store import Store

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SAMPLES = 196
"""Of 256 tokens each."""
TEXTS = 800
"""Samples that the lines of the probe are from."""
ACTIVE = 16
"""Latents of the autoencoder in a row."""
END_OF_DOCUMENT = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--sae-steps", type=int, default=600)
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        began = time.monotonic()
        look(options.steps, options.sae_steps)
        print(f"{time.monotonic() - began:7.1f} s in all")


def look(steps: int, sae_steps: int) -> None:
    """All of it, in the working directory, with a demo and an autoencoder of so many steps."""
    if not Path("runs/demo").exists():
        forge("run", CONFIGS / "demo.toml", f"train.steps={steps}", f"checkpoint.interval={steps // 4}")
    stores()
    layers(steps // 4)
    probe()
    patch()
    autoencoder(sae_steps)


def stores() -> None:
    """The same residual streams by one process, by two that are killed once, and in tensor parallelism."""
    extract = ("extract", "runs/demo", "--sites", "embed,blocks.*.resid_post", "--samples", SAMPLES, "--out")
    forge(*extract, "acts")
    shards = Path("killed/blocks.3.resid_post")
    forge(*extract, "killed", "--nproc", 2, until=lambda: any(shards.glob("*.safetensors")), by=signal.SIGKILL)
    forge(*extract, "killed", "--nproc", 2)
    forge(*extract, "tp2", "--nproc", 2, "parallel.tp=2")
    one = Store("acts")
    for other in map(Store, ("killed", "tp2")):
        assert (one.ids == other.ids).all()
        apart = max(float((one.array(site) - other.array(site)).abs().max()) for site in one.sites)
        print(f"{'':9} {other.folder}: at most {apart:.1e} from one process")


def layers(early: int) -> None:
    """An early step and the last one, by debiased CKA."""
    sites = ("--sites", "blocks.*.resid_post", "--samples", SAMPLES, "--reduce", "mean")
    forge("extract", f"runs/demo/checkpoints/step_{early:08}", *sites, "--out", "early")
    forge("extract", "runs/demo", *sites, "--out", "late")
    forge("compare", "early", "late", "--metric", "cka", "--out", "cka.png", shows=6)


def probe() -> None:
    """Is a byte inside a string? Of lines of samples, which were held out, by ``tokenize``."""
    forge("extract", "runs/demo", "--sites", "embed", "--samples", TEXTS, "--reduce", "last", "--out", "texts")
    lines = dict.fromkeys(line.strip() for text in _texts(Store("texts")) for line in text.splitlines()[1:-1])
    known = [(line, inside) for line in lines if (inside := _inside(line)) is not None]
    with Path("lines.jsonl").open("w") as file:
        for number, (line, _) in enumerate(known):
            file.write(json.dumps({"stimulus_id": number, "text": line}) + "\n")
    ids = np.concatenate([np.full(len(inside), number) for number, (_, inside) in enumerate(known)])
    places = np.concatenate([np.arange(len(inside)) for _, inside in known])
    labels = np.where(np.concatenate([inside for _, inside in known]), "string", "code")
    np.savez("labels.npz", stimulus_id=ids, token=places, label=labels)
    print(f"{'':9} {len(known):,} lines, {np.mean(labels == 'string'):.3f} of their bytes inside a string")
    sites = "embed,blocks.2.resid_post"
    forge("extract", "runs/demo", "--sites", sites, "--stimuli", "lines.jsonl", "--out", "lines")
    forge("probe", "lines", "--labels", "labels.npz", "--control", 4, "--out", "probe.csv", shows=4)


def patch() -> None:
    """Which layer carries the last identifier of a prompt?"""
    prompts = ("--clean", "raise Typ", "--corrupt", "raise Val", "--answers", "e,u")
    forge("patch", "runs/demo", *prompts, "--sites", "embed,blocks.*.resid_post", "--out", "patch.png")
    with Path("patch.csv").open(newline="") as file:
        rows = [(row["site"], int(row["position"]), float(row["effect"])) for row in csv.DictReader(file)]
    last = max(position for _, position, _ in rows)
    for site in dict.fromkeys(site for site, _, _ in rows):
        before = sum(effect for one, place, effect in rows if one == site and place < last)
        end = sum(effect for one, place, effect in rows if one == site and place == last)
        print(f"{'':9} {site:20} at its last letter {end:6.3f}, at the others {before:6.3f}")


def autoencoder(steps: int) -> None:
    """Trained from the store, interrupted and resumed; against principal components; and spliced in."""
    each = max(1, steps // 12)
    run = ("run", CONFIGS / "sae_demo.toml", f"train.steps={steps}", f"metrics.interval={each}")
    metrics = Path("runs/sae_demo/metrics.jsonl")
    forge(*run, until=lambda: metrics.exists() and f'"step": {4 * each},' in metrics.read_text(), by=signal.SIGINT)
    forge(*run)
    final = [json.loads(line) for line in metrics.read_text().splitlines() if "autoencoder/fvu" in line][-1]
    print(f"{'':9} fvu {final['eval/autoencoder/fvu']:.4f}, of {ACTIVE} principal components {_of_components():.4f}")
    forge("autoencoder", "recover", "runs/demo", "runs/sae_demo", shows=2)
    forge("autoencoder", "features", "runs/sae_demo", "--out", "latents.html")


def forge(*words: object, until: Callable[[], bool] | None = None, by: int = 0, shows: int = 0) -> None:
    """Run a command, and print its time and the last lines of what it has printed.

    Args:
        until: ends it then, by the signal ``by``.
    """
    began = time.monotonic()
    command = [sys.executable, "-W", "ignore", "-m", "forge_core", *map(str, words)]
    with Path("log.txt").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None and not (until and until()):
            time.sleep(0.02)
        if until:
            assert process.poll() is None, "it had ended before"
            os.killpg(process.pid, by) if by == signal.SIGKILL else process.send_signal(by)
        code = process.wait()
        log.seek(0)
        said = log.read()
    assert until or code == 0, said
    ended = f", ended by {signal.Signals(by).name}" if until else ""
    print(f"{time.monotonic() - began:7.1f} s {' '.join(command[5:])!r}{ended}")
    for line in said.splitlines()[-shows:] if shows else ():
        print(f"{'':9} {line}")


def _texts(store: Store) -> Iterator[str]:
    """Of the documents in the samples, as far as they are ASCII."""
    for sample in range(len(store)):
        tokens = store.tokens(sample)
        ends = [-1, *(tokens == END_OF_DOCUMENT).nonzero().flatten().tolist(), len(tokens)]
        for start, end in itertools.pairwise(ends):
            yield bytes(tokens[start + 1 : end].tolist()).decode("ascii", "ignore")


def _inside(line: str) -> np.ndarray | None:
    """For each byte, whether it is inside a string; ``None`` of a line that has none, or is no Python by itself."""
    inside = np.zeros(len(line), bool)
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type == tokenize.STRING:
                inside[token.start[1] + 1 : token.end[1] - 1] = True
    except (tokenize.TokenError, SyntaxError):
        return None
    return inside if inside.any() else None


def _of_components() -> float:
    """The variance that is left of held-out rows by as many principal components of the others."""
    store = Store("acts")
    rows = store.array("blocks.2.resid_post").double()
    border = int(store.columns["length"][: len(store) - round(0.1 * len(store))].sum())
    train, held = rows[:border], rows[border:]
    mean = train.mean(0)
    directions = torch.linalg.eigh((train - mean).T @ (train - mean)).eigenvectors[:, -ACTIVE:]
    left = (held - mean) - (held - mean) @ directions @ directions.T
    return float(left.square().sum() / (held - held.mean(0)).square().sum())


if __name__ == "__main__":
    main()
