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
ACTIVE = 16
"""Latents of the autoencoder in a row."""
END_OF_DOCUMENT = 256
_LEAST = 32
"""Bytes by which a piece of a sample is found again in its file."""


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
    """Is a byte inside a string? By ``tokenize``, of the files that the samples are from."""
    store, files = Store("acts"), _files()
    ids: list[object] = []
    places: list[int] = []
    labels: list[str] = []
    for sample in range(len(store)):
        for start, piece in _pieces(store.tokens(sample).tolist()):
            if (inside := _inside(piece, files)) is None:
                continue
            ids += [store.ids[sample]] * len(inside)
            places += range(start, start + len(inside))
            labels += np.where(inside, "string", "code").tolist()
    np.savez("labels.npz", stimulus_id=ids, token=places, label=labels)
    print(f"{'':9} {len(labels):,} bytes with a label, {np.mean(np.array(labels) == 'string'):.3f} inside a string")
    sites = ("--sites", "embed,blocks.2.resid_post")
    forge("probe", "acts", "--labels", "labels.npz", "--control", 4, *sites, "--out", "probe.csv", shows=4)


def patch() -> None:
    """Which layer carries the last identifier of a prompt?"""
    prompts = ("--clean", "def f(name):\n    return ", "--corrupt", "def f(line):\n    return ", "--answers", "n,l")
    forge("patch", "runs/demo", *prompts, "--sites", "embed,blocks.*.resid_post", "--out", "patch.png")
    with Path("patch.csv").open(newline="") as file:
        rows = [(row["site"], int(row["position"]), float(row["effect"])) for row in csv.DictReader(file)]
    last = max(position for _, position, _ in rows)
    for site in dict.fromkeys(site for site, _, _ in rows):
        name = sum(effect for one, place, effect in rows if one == site and 6 <= place < 10)
        end = sum(effect for one, place, effect in rows if one == site and place == last)
        print(f"{'':9} {site:20} at the identifier {name:6.3f}, at the end {end:6.3f}")


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


def _files() -> list[tuple[bytes, np.ndarray]]:
    """The standard library's modules, and which of their bytes are inside a string."""
    found = []
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_bytes()
        lines = np.cumsum([0, *(len(line) for line in text.splitlines(keepends=True))])
        inside, starts = np.zeros(len(text), bool), []
        try:
            for token in tokenize.tokenize(io.BytesIO(text).readline):
                kind = tokenize.tok_name[token.type]
                if kind == "FSTRING_START":
                    starts.append(token.start)
                elif kind in ("STRING", "FSTRING_END"):
                    begin = starts.pop() if kind == "FSTRING_END" else token.start
                    inside[lines[begin[0] - 1] + begin[1] + 1 : lines[token.end[0] - 1] + token.end[1] - 1] = True
        except (tokenize.TokenError, SyntaxError, IndexError):
            continue
        if text.isascii():  # else columns are no bytes
            found.append((text, inside))
    return found


def _pieces(tokens: list[int]) -> Iterator[tuple[int, bytes]]:
    """Of a sample, those of each document, with where they begin."""
    start = 0
    for end in [place for place, token in enumerate(tokens) if token == END_OF_DOCUMENT] + [len(tokens)]:
        if end - start >= _LEAST:
            yield start, bytes(tokens[start:end])
        start = end + 1


def _inside(piece: bytes, files: list[tuple[bytes, np.ndarray]]) -> np.ndarray | None:
    for text, inside in files:
        if (place := text.find(piece)) >= 0:
            return inside[place : place + len(piece)]
    return None


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
