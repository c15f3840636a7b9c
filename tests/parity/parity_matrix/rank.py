"""One rank of a launch; ``launch.py`` starts it as ``python -m parity_matrix.rank JOB PLAN``, in its folder."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from forge_core.errors import ExitCode, ForgeError
from forge_core.job import catalog_of, load_job
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover
from forge_core.run.process import hard_exit
from forge_core.run.run import run_job


def main(job_toml: Path, plan: Path) -> None:
    """Take part in the works that have that many ranks, and leave the numbers of those that are done.

    A process of its own has one job, and what torch.compile keeps for it may stay; here it must not reach the next one.
    """
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # of compiled code: the run's own file has those of Python
    rank, catalog, most = int(os.environ["RANK"]), discover(), _THREADS
    for number, work in enumerate(json.loads(plan.read_text())):
        if rank < work["ranks"]:
            print(f"== {work['name']}", flush=True)
            began = time.process_time()
            os.environ.update(WORLD_SIZE=str(work["ranks"]), MASTER_PORT=str(work["port"]))
            if rank == 0 and work["resumes"] is not None:
                _copy_checkpoints(work["resumes"], work["name"], work["resumes_at"])
            kept = {name: getattr(functorch_config, name) for name in ("activation_memory_budget", "donated_buffer")}
            with functorch_config.patch(**kept):
                _take_part(job_toml, work, catalog)
            torch.compiler.reset()
            most += _OF_COMPILED * any("compile" in setting for setting in work["settings"])
            _forget_groups()
            print(f"took {time.process_time() - began:.2f} s of processor time", flush=True)
            with Path(f"done.{rank}").open("a") as done:
                done.write(f"{number}\n")
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    assert threads < most, f"{threads} threads are left of works that are done"
    hard_exit()


_THREADS = 50 if torch.__version__ >= "2.13" else 500
_THREADS += 10_000 * torch.cuda.is_available()
"""Fewer than a rank has when it keeps the groups of twenty works. torch 2.11 does keep some, and so does a rank with
GPUs, some of each work of several ranks; what holds them is not known."""
_OF_COMPILED = 20
"""Threads of the groups that compiled code holds, whatever is reset: there are a few dozen such works by night."""


def _take_part(job_toml: Path, work: dict[str, Any], catalog: Catalog) -> None:
    try:
        job = load_job(job_toml, work["settings"], catalog=catalog, world_size=work["ranks"])
        run_job(job, catalog_of(job, lambda disabled: catalog), dry_run=work["dry_run"])
    except ForgeError as error:  # all ranks refuse together, and may go on to the next work
        if not work["refused"] or error.exit_code is not ExitCode.INVALID:
            raise
        print(error, flush=True)
    else:
        assert not work["refused"], f"{work['name']} was to be refused"


def _forget_groups() -> None:
    """Clear the caches that hold meshes. These name groups that are gone, by names that new ones get; and while a mesh
    is held, so are its groups, each with a thread that wakes up a hundred times a second. After a hundred works that
    was a third of a rank's time.

    What is left when a work is done stays for good: imports, compiled code. The collector need not search it again.
    """
    _clear_sharding_prop_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()
    gc.freeze()


def _copy_checkpoints(source: str, target: str, step: int | None) -> None:
    only = "" if step is None else f"step_{step:08d}"
    shutil.copytree(f"runs/{source}/checkpoints/{only}", f"runs/{target}/checkpoints/{only}", symlinks=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
