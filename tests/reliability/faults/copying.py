"""A process that does nothing but copy checkpoints to a mirror, and the judgement of what it has left there."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import faults.objects  # noqa: F401 - its URLs are known from then on
from forge_core.checkpoint.fsync import write_durably
from forge_core.checkpoint.manifest import DamagedError, Manifest, describe_files, write_manifest
from forge_core.checkpoint.store import CheckpointStore
from forge_plugins_mirror.mirror import Mirror, open_mirror

COPYING = "copying"
"""A file in the scratch folder, once the second copy begins: how many seconds the first one took."""


def copy_again_and_again(rank: int, ranks: int, scratch: Path, *, url: str, mutant: bool = False) -> None:
    """Steps 1, 2, …; the last two are kept.

    Args:
        mutant: the manifest is written first.
    """
    if mutant:
        Mirror._misfit = _manifest_first(Mirror._misfit)  # type: ignore[method-assign]
    store = CheckpointStore(scratch / "checkpoints")
    mirror = open_mirror(url)
    mirror.take_over(scratch.name, "", 1 << 60)
    step = max(mirror.checkpoints(), default=0)
    seconds: float | None = None
    while True:
        step += 1
        _write(store, step)
        if seconds is not None:
            write_durably(scratch / COPYING, str(seconds))
        started = time.monotonic()
        mirror.copy(store.folder(step), lambda: None)
        seconds = time.monotonic() - started
        shutil.rmtree(store.folder(step))
        if step > 2:
            mirror.remove([step - 2])


def _write(store: CheckpointStore, step: int) -> None:
    folder = store.folder(step)
    folder.mkdir(parents=True)
    content = random.Random(step)
    for name in (".metadata", "state.json", *(f"__{rank}_0.distcp" for rank in range(4))):
        (folder / name).write_bytes(content.randbytes(300_000))
    files = describe_files(folder, sorted(folder.iterdir()))
    written = "2026-01-01T00:00:00+00:00"
    write_manifest(folder, Manifest(step=step, tokens=0, mesh={}, versions={}, files=files, written=written))


def _manifest_first(misfit):  # type: ignore[no-untyped-def]
    def instead(self, folder, name, entry):  # type: ignore[no-untyped-def]
        """Called for each file before it is copied."""
        if self._read(f"{folder}/manifest.json") is None:
            step = int(Path(folder).name.lstrip(".").split("_")[1][:8])
            local = next(Path(self._root).parents[1].glob(f"*/checkpoints/step_{step:08d}/manifest.json"))
            self._filesystem.put_file(str(local), f"{folder}/manifest.json")
        return misfit(self, folder, name, entry)

    return instead


def problems_at(url: str) -> list[str]:
    """What has the name of a checkpoint there and is none."""
    mirror = open_mirror(url)
    return [
        f"step {step}: {why}"
        for step, found in mirror.checkpoints().items()
        if (why := str(found) if isinstance(found, DamagedError) else mirror.problem(step))
    ]
