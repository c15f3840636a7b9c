"""A small run of this version, for tests of all later ones: they must resume it, and train on as it did.

    python release/keep_run.py [--out tests/system/earlier_versions]

Writes ``<version>.tar.gz``: the configuration ``before.toml`` and its text, the run as a crash leaves it whose last
steps are not saved, and ``straight.jsonl``, the metrics without that crash. Done once a version, just before its
release, from the tree that is released.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from forge_core import __version__

ROOT = Path(__file__).resolve().parents[1]
STEPS, SAVED = 8, 4
CONFIG = f"""\
# As small as all that a resume needs allows: a shuffled source in the middle of a pass, moments, a schedule.

[run]
name = "before"

[model]
name = "transformer"
dim = 8
n_layers = 1
n_heads = 1
tie_embeddings = true
feed_forward = {{ hidden_dim = 16 }}

[data]
name = "text_files"
path = "text"
pattern = "*.txt"
tokenizer = "bytes"
validation = 0.3

[train]
steps = {STEPS}
seq_len = 32
batch_size = 2
precision = "fp32"

[optimizer]
name = "adamw"
lr = 1e-2

[scheduler]
name = "cosine"
warmup_steps = 2

[eval]
interval = {SAVED}
batches = 1

[checkpoint]
interval = {SAVED}

[metrics]
interval = 1
"""
LEFT_OUT = ("environment.json", "log.txt")
"""Of a run's files, those that say on which machine it ran."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "system" / "earlier_versions")
    archive = parser.parse_args().out / f"{__version__}.tar.gz"
    if archive.exists():
        raise SystemExit(f"{archive} is there already, and what a version has written does not change")
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder))
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz") as file:
            file.add(folder, arcname=".", filter=without_owner)
    print(f"{archive.stat().st_size:,} bytes in {archive}")


def write_run(folder: Path) -> None:
    (folder / "before.toml").write_text(CONFIG)
    (folder / "text").mkdir()
    for i in range(3):
        lines = (f"{n} times {n + i} is {n * (n + i)}.\n" for n in range(60))
        (folder / "text" / f"{i}.txt").write_text("".join(lines))
    subprocess.run([sys.executable, "-m", "forge_core", "run", "before.toml"], cwd=folder, check=True)
    run = folder / "runs" / "before"
    shutil.copy(run / "metrics.jsonl", folder / "straight.jsonl")
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:08}")
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "latest").symlink_to(f"step_{SAVED:08}")
    for name in LEFT_OUT:
        (run / name).unlink()


def without_owner(file: tarfile.TarInfo) -> tarfile.TarInfo:
    file.uid = file.gid = 0
    file.uname = file.gname = ""
    return file


if __name__ == "__main__":
    main()
