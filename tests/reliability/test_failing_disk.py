"""Goal G22: a disk that fails with EIO, seen from outside of the process (``faults/failing_disk.c``).

Every call that writing and reading a checkpoint is made of fails once, on either of two ranks. Whatever has been
acknowledged stays; what cannot be read is passed over; rank, file and error are named on all ranks alike.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faults.job import TOML
from forge_core.checkpoint.store import CheckpointStore, whole_problem
from rank_ports import free_ports

FAULTS = Path(__file__).with_name("faults")

WRITING = [
    # rank, call, and the end of the file's path; from step 2 on, a step each
    (1, "open", "__1_0.distcp"),
    (1, "write", "__1_0.distcp"),
    (1, "fsync", "__1_0.distcp"),
    (0, "open", ".metadata.tmp"),
    (0, "write", ".metadata.tmp"),
    (0, "fsync", ".metadata.tmp"),
    (0, "rename", ".metadata.tmp"),
    (0, "write", ".state.json.new"),
    (0, "fsync", "state.json"),
    (0, "read", "state.json"),  # for its checksum
    (0, "rename", ".manifest.json.new"),
    (0, "fsync", ".partial"),
    (0, "rename", ".partial"),
]
LAST_WHOLE = len(WRITING) + 2
CANNOT_BE_READ_IN = LAST_WHOLE + 1
"""By its rank 1, which finds out only when it reads tensors: looking for damage, it had another share."""
READING = [
    # rank, call, and the end of the file's path; the steps after that
    (0, "read", "__0_0.distcp"),
    (0, "read", ".metadata"),
    (1, "open", "__1_0.distcp"),
    (1, "stat", "__1_0.distcp"),
    (0, "stat", "state.json"),
    (0, "stat", "manifest.json"),
    (0, "open", "manifest.json"),
    (1, "stat", ""),  # the folder and all that is in it
]


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory):
    """A function that gives a process's environment, in which some calls for some files fail."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("calls can be made to fail on Linux, with a C compiler (cc)")
    library = tmp_path_factory.mktemp("failing_disk") / "failing_disk.so"
    source = str(FAULTS / "failing_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)

    def environment(*faults):
        shared = {**os.environ, "OMP_NUM_THREADS": "1"}
        return {**shared, "LD_PRELOAD": str(library), "FORGE_TEST_EIO": ";".join(faults)}

    return environment


def _step(number):
    return f"step_{number:08d}"


def _faults(rank):
    """The same names are used while a checkpoint is written, in a hidden folder, and afterwards."""
    written = [
        f"{call} /.{_step(step)} {name}$" for step, (of, call, name) in enumerate(WRITING, start=2) if of == rank
    ]
    start = CANNOT_BE_READ_IN + 1
    read = [f"{call} /{_step(step)} {name}$" for step, (of, call, name) in enumerate(READING, start) if of == rank]
    return [*written, *read, *([f"read /{_step(CANNOT_BE_READ_IN)}/__0_0.distcp"] if rank == 1 else [])]


@pytest.fixture
def said(failing_disk, tmp_path, request):
    """By both ranks, which have ended."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports())}
    saves = CANNOT_BE_READ_IN + len(READING)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(FAULTS / "failing_disk_rank.py"), str(tmp_path), request.param, str(saves)],
            env={**failing_disk(*_faults(rank)), **group, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    first, second = ([json.loads(line) for line in out.splitlines()] for out, _ in ended)
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("said", ["background", pytest.param("foreground", marks=pytest.mark.nightly)], indirect=True)
def test_each_call_that_fails_is_named_on_all_ranks_and_nothing_acknowledged_is_lost(said, tmp_path):
    first, second = said
    saved = {line["saved"]: line["error"] for line in first if "saved" in line}
    assert [line for line in second if "saved" in line] == [line for line in first if "saved" in line]

    for step, (rank, call, name) in enumerate(WRITING, start=2):
        told = (
            rf"rank {rank} cannot write to /\S*/\.{_step(step)}\.\w+\.partial\S*: Input/output error; the checkpoint "
        )
        assert re.match(told, saved[step] or ""), (step, call, name, saved[step])
        assert re.search(rf"{re.escape(name)}: Input/output error", saved[step]), (step, call, saved[step])
    acknowledged = [step for step, error in saved.items() if error is None]
    assert acknowledged == [1, *range(LAST_WHOLE, CANNOT_BE_READ_IN + len(READING) + 1)]
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.steps() == acknowledged
    assert [whole_problem(store.folder(step)) for step in acknowledged] == [None] * len(acknowledged)

    newest, older = [line for line in first if "found" in line]
    assert [line for line in second if "found" in line] == [newest, older]
    assert newest["found"] == CANNOT_BE_READ_IN
    assert len(newest["reported"]) == len(READING)
    start = CANNOT_BE_READ_IN + 1
    by_step = zip(reversed(newest["reported"]), enumerate(READING, start), strict=True)
    for line, (step, (rank, call, name)) in by_step:
        seen_by = r" \(as rank 1 sees it\)" if rank else ""
        file = re.escape(name or "__1_0.distcp")
        told = rf"checkpoint {_step(step)} cannot be used: {file} cannot be read \(Input/output error\){seen_by};"
        assert re.match(told, line), (call, line)

    refused, read = [line for line in first if "read" in line]
    assert second[-2] == refused
    assert f"rank 1 cannot read it: OSError: [Errno 5] Input/output error: '{tmp_path}" in refused["error"]
    assert "__0_0.distcp'" in refused["error"]
    assert (older["found"], older["reported"]) == (LAST_WHOLE, [])
    assert read == second[-1] == {"read": LAST_WHOLE, "values": [LAST_WHOLE]}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_trains_on_and_a_later_one_resumes_from_the_newest_that_can_be_read(failing_disk, tmp_path):
    config, text = tmp_path / "small.toml", tmp_path / "text"
    config.write_text(TOML.format(folder=tmp_path, steps=8, interval=2))
    text.mkdir()
    for i in range(12):
        (text / f"{i}.txt").write_text("\n".join(f"line {j} of file {i}" for j in range(120)))

    def run(*overrides, faults=()):
        return subprocess.run(
            [sys.executable, "-m", "forge_core", "run", str(config), "--nproc", "2", *overrides],
            env=failing_disk(*faults),
            capture_output=True,
            text=True,
            timeout=240,
        )

    done = run(faults=[f"fsync /.{_step(4)} __1_0.distcp$"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "saving step 4 failed, training goes on: rank 1 cannot write to " in done.stdout
    assert "__1_0.distcp: Input/output error" in done.stdout
    store = CheckpointStore(tmp_path / "runs" / "small" / "checkpoints")
    assert store.steps() == [2, 6, 8]

    again = run("train.steps=10", "scheduler.decay_steps=8", faults=[f"stat /{_step(8)}"])
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{_step(8)} cannot be used: manifest.json cannot be read (Input/output error)" in again.stdout
    assert re.search(r"resumed from \S*step_00000006", again.stdout), again.stdout
    assert store.steps() == [2, 6, 8, 10]
    assert store.newest(print).step == 10
