"""Runs a method of a conformance class on several ranks: processes of their own, joined over gloo."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch forgets to export it

from forge_core.distributed.mesh import join_process_group
from forge_core.run.process import hard_exit
from forge_testing.plugin_file import conformance_of

SECONDS = 240
"""After which ranks are taken for lost."""


def on_ranks(case: type, method: str, ranks: int) -> list[Any]:
    """Call ``case().method()`` on each rank of a process group, and return what it gives, in their order.

    One rank is this process. For more of them, new processes import the file that ``case`` is defined in.

    Raises:
        AssertionError: it raised on one of them; with what that rank printed.
    """
    if ranks == 1:
        join_process_group(torch.device("cpu"))
        try:
            return [getattr(case(), method)()]
        finally:
            dist.destroy_process_group()
    assert "<locals>" not in case.__qualname__, f"{case.__qualname__} must be defined at the top level of its file"
    with tempfile.TemporaryDirectory() as folder:
        return _launch(case, method, ranks, Path(folder))


def _launch(case: type, method: str, ranks: int, folder: Path) -> list[Any]:
    # The store is here and not on rank 0, so that no port is chosen before somebody listens on it.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    what = [inspect.getfile(case), case.__qualname__, method, str(folder)]
    processes = []
    try:
        for rank in range(ranks):
            with (folder / f"{rank}.log").open("wb") as log:
                processes.append(
                    Popen(
                        [sys.executable, "-m", "forge_testing.several_ranks", *what],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=STDOUT,
                    )
                )
        deadline = time.monotonic() + SECONDS
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                time.sleep(1)  # another one may have more to say
                break
            time.sleep(0.05)
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        said = [f"rank {rank}: {(folder / f'{rank}.log').read_text(errors='replace')[-4000:]}" for rank in failed]
        assert not failed, f"{len(failed)} of {ranks} ranks fail\n" + "\n".join(said)
        stuck = [rank for rank, process in enumerate(processes) if process.poll() is None]
        assert not stuck, f"{ranks} ranks have waited {SECONDS} s for each other; rank {stuck[0]} is not done"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def _main(file: str, qualname: str, method: str, folder: str) -> None:
    """One rank."""
    spec = importlib.util.spec_from_file_location("case_under_test", file)
    assert spec is not None, f"{file} cannot be imported"
    assert spec.loader is not None, f"{file} cannot be imported"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    case: Any = module
    for name in qualname.split("."):
        case = getattr(case, name, None) or conformance_of(module, name)
    join_process_group(torch.device("cpu"), SECONDS)
    dist.barrier()  # one that is done early must not be gone while another still connects
    result = getattr(case(), method)()
    (Path(folder) / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
    hard_exit()
