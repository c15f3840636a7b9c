"""The batch script, as a shell reads it: what it makes of exit codes, of crashes, and of nodes that are lost."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import attrs
import pytest

from forge_plugins_slurm.cluster import Cluster
from forge_plugins_slurm.script import Submission, batch_script

SCRIPTS = {
    "plain": Cluster(),
    "torchrun": Cluster(launcher="torchrun", ranks_per_node=2, cpus_per_rank=3),
    "spared": Cluster(spare_nodes=1, ranks_per_node=2),
    "contained": Cluster(container=("apptainer", "exec", "an image.sif"), srun_options=("--mpi=none",)),
}


def submission(run: Path, cluster: Cluster, time: str = "1:00:00", nodes: int = 2) -> Submission:
    return Submission(
        name="demo",
        runs=[run],
        is_array=False,
        folder=run / "slurm",
        working_directory=run.parent,
        nodes=nodes,
        time=time,
        cluster=cluster,
        python="/a python",
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_valid_shell_without_open_quotes(tmp_path, name):
    script = batch_script(submission(tmp_path / "a 'run'", SCRIPTS[name]))

    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("is_array", "file"), [(False, "output.log"), (True, "%A_%a.log")])
def test_slurm_fills_in_nothing_in_the_folder_of_the_log(tmp_path, is_array, file):
    one = attrs.evolve(submission(tmp_path / "50%a", SCRIPTS["plain"]), is_array=is_array)

    assert f"#SBATCH --output={tmp_path}/50%%a/slurm/{file}\n" in batch_script(one)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "spared"])
@pytest.mark.parametrize(
    ("code", "outcome", "checkpoints", "asked", "ends_with", "says", "requeues"),
    [
        (0, "", [], False, 0, "finished", False),
        (2, "2", [], False, 2, "starting again would not help", False),
        (1, "2", [], False, 2, "starting again would not help", False),  # torchrun's own code is 1
        (1, "3", [], True, 3, "stopped and saved; back into the queue", True),
        (3, "3", [], False, 3, "not to be continued", False),
        (4, "4", [], False, 4, "not finite", False),
        (138, "", [], False, 138, "before the run could listen", True),
        (137, "", ["step_00000010"], False, 137, "after a new checkpoint", True),
        (137, "", ["memory"], False, 137, "after a new checkpoint", True),
        (137, "5", [], False, 5, "crash 1 of at most 3", True),
    ],
)
def test_what_the_script_makes_of_an_exit_code(
    tmp_path, name, code, outcome, checkpoints, asked, ends_with, says, requeues
):
    """With an srun that ends as it is told, and a scontrol that only remembers."""
    run = tmp_path / "a 'run'"
    (run / "slurm").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    tools = tmp_path / "bin"
    tools.mkdir()
    state = shlex.quote(str(run))
    srun = [f'printf "%s\\n" "$@" >{state}/command']
    srun += [f"printf {outcome} >{state}/slurm/outcome"] if outcome else []
    srun += [f"mkdir {state}/checkpoints/{one}" for one in checkpoints if one != "memory"]
    if "memory" in checkpoints:
        srun.append(f"""echo '{{"folder": "forge-step_9-a", "newest": "step_00000010"}}' >{state}/memory.json""")
    srun += [f"touch {state}/slurm/requeue"] if asked else []
    stubs = {
        "srun": "\n".join([*srun, f"exit {code}"]),
        "scontrol": f'echo "$@" >{state}/requeued; exit 1',
        "sleep": "exit 0",
    }
    for tool, text in stubs.items():
        (tools / tool).write_text(f"#!/bin/bash\n{text}\n")
        (tools / tool).chmod(0o755)

    done = subprocess.run(
        ["bash"],
        input=batch_script(submission(run, SCRIPTS[name])),
        env={"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == ends_with, done.stdout + done.stderr
    assert says in done.stdout
    assert (run / "requeued").exists() is requeues
    command = (run / "command").read_text().splitlines()
    assert command[-4:] == ["-m", "forge_core", "run", f"{run}/slurm/job.toml"]
    assert ("an image.sif" in command) is (name == "contained")
    assert ("torch.distributed.run" in command) is (name == "torchrun")


def test_a_time_limit_in_which_a_run_cannot_start_is_given_up_like_a_crash(tmp_path):
    """Otherwise it would start and be told to leave for ever."""
    script = batch_script(submission(tmp_path, Cluster(max_failures=1), time="2"))

    assert '[ "$SECONDS" -lt 0 ]' in script
    assert script.index("the time limit has come before the run could listen") < script.index("# It crashed.")


def test_crashes_are_counted_until_there_is_a_new_checkpoint(tmp_path):
    run = tmp_path / "run"
    (run / "slurm").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, text in {
        "srun": "[ -e next ] && mv next run/checkpoints/step_00000020; exit 137",
        "scontrol": "exit 1",
    }.items():
        (tools / tool).write_text(f"#!/bin/bash\n{text}\n")
        (tools / tool).chmod(0o755)

    def crash() -> str:
        return subprocess.run(
            ["bash"],
            input=batch_script(submission(run, Cluster(max_failures=2))),
            cwd=tmp_path,
            env={"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n0"},
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    assert "crash 1 of at most 2" in crash()
    assert "crash 2 of at most 2" in crash()
    (tmp_path / "next").mkdir()
    assert "after a new checkpoint" in crash()
    assert "crash 1 of at most 2" in crash()
    assert "crash 2 of at most 2" in crash()
    assert "crash 3 in a row without a new checkpoint: given up" in crash()


# -- spare nodes


class Starts:
    """A script with two of three nodes, and a Slurm that answers what a test has it say."""

    def __init__(self, folder: Path) -> None:
        self.run, self.tools = folder / "run", folder / "bin"
        for one in (self.run / "slurm", self.run / "checkpoints", self.tools):
            one.mkdir(parents=True)
        self.says = folder / "says"
        self.tool("squeue", "echo n[0-2]")
        self.tool("sinfo", "printf '%s\\n' 'n0 alloc' 'n1 mix' 'n1 mix' 'n2 mix-'")
        self.tool(
            "scontrol",
            f'case "$1$2" in showhostnames) {sys.executable} {folder / "expand.py"} "$3" ;; requeue*) exit 1 ;; esac',
        )
        (folder / "expand.py").write_text(EXPAND)
        # the watch over the script is a step of its own; each other one ends as the next line says: code, and words
        self.tool(
            "srun",
            f"""
            for one in "$@"; do case $one in --nodelist=*) nodes=${{one#*=}} ;; esac; done
            case "$*" in *"bash -c"*) exec sleep 60 ;; esac
            echo "$nodes" >>{folder}/starts
            read -r code words <{folder}/says
            sed -i 1d {folder}/says
            printf '%b' "$words" >&2
            exit $code
            """,
        )

    def tool(self, name: str, text: str) -> None:
        (self.tools / name).write_text(f"#!/bin/bash\n{dedent(text)}\n")
        (self.tools / name).chmod(0o755)

    def __call__(self, *says: str, of: int = 2) -> tuple[list[str], str]:
        """The nodes of each start ``of`` so many, and what the script prints."""
        self.says.write_text("".join(f"{line}\n" for line in says))
        variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-2]", "SLURMD_NODENAME": "n0"}
        done = subprocess.run(
            ["bash"],
            input=batch_script(submission(self.run, SCRIPTS["spared"], nodes=of)),
            env={"PATH": f"{self.tools}:{os.environ['PATH']}", **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return (self.says.parent / "starts").read_text().splitlines(), done.stdout + done.stderr


EXPAND = """
import re, sys
for one in re.findall(r"[^,\\[]+(?:\\[[^]]*\\])?", sys.argv[1]):
    name, _, numbers = one.rstrip("]").partition("[")
    for part in numbers.split(",") if numbers else [""]:
        first, _, last = part.partition("-")
        print(*([name] if not part else [f"{name}{n}" for n in range(int(first), int(last or first) + 1)]), sep="\\n")
"""
LOST = "srun: error: n0: tasks 0-1: Exited with exit code 5\\n"
"""Of the ranks that have lost others."""


@pytest.mark.parametrize(
    ("words", "next_nodes"),
    [
        (rf"{LOST}srun: error: n1: task 2: Killed\nsrun: error: n1: task 3: Exited with exit code 5\n", "n0,n2"),
        (LOST, "n0,n2"),
        (r"srun: error: n[0-1]: tasks 0-3: Exited with exit code 1\n", "n0,n1"),
        (
            r"srun: error: n1: tasks 2-3: Exited with exit code 5\nsrun: error: n0: task 0: Segmentation fault\n",
            "n1,n2",
        ),
        (r"", "n0,n1"),
    ],
    ids=["a task has been killed", "tasks have not ended", "all have ended alike", "on the first node", "no word"],
)
def test_a_node_on_which_a_rank_was_lost_is_not_taken_while_there_are_others(tmp_path, words, next_nodes):
    nodes, said = Starts(tmp_path)(f"137 {words}", "0")

    assert nodes == ["n0,n1", next_nodes], said
    assert "finished" in said


def test_of_nodes_on_which_ranks_were_lost_the_one_is_taken_that_was_not_the_last(tmp_path):
    said = [rf"5 {LOST}srun: error: {node}: task 2: Killed\n" for node in ("n1", "n2", "n1")]

    assert Starts(tmp_path)(*said, "0")[0] == ["n0,n1", "n0,n2", "n0,n1", "n0,n2"]


def test_where_too_few_nodes_are_left_the_job_goes_back_into_the_queue(tmp_path):
    starts = Starts(tmp_path)
    starts.tool(
        "sinfo", f"[ -e {tmp_path}/starts ] || echo 'n1 alloc'; printf '%s\\n' 'n0 alloc' 'n1 alloc*' 'n2 down'"
    )

    nodes, said = starts(f"5 {LOST}", "0")

    assert nodes == ["n0,n1"]
    assert "fewer than 2 of the job's nodes are up; back into the queue" in said


def test_nodes_are_taken_for_up_while_the_controller_does_not_answer(tmp_path):
    starts = Starts(tmp_path)
    starts.tool("sinfo", "exit 1")
    starts.tool("squeue", "exit 1")

    assert starts(f"5 {LOST}", "0")[0] == ["n0,n1", "n0,n2"]


def test_without_another_node_nobody_watches_over_the_script_and_nobody_is_told_to_end(tmp_path):
    """Other than the first time: whoever has watched then is no process any more."""
    starts = Starts(tmp_path)
    starts.tool("sinfo", f"echo n0 alloc; [ -e {tmp_path}/starts ] || printf '%s\\n' 'n1 alloc' 'n2 alloc'")

    nodes, said = starts(f"5 {LOST}", "0", of=1)

    assert nodes == ["n0", "n0"]
    assert "kill: " not in said


def test_crashes_on_spare_nodes_are_given_up_as_others_are(tmp_path):
    nodes, said = Starts(tmp_path)(*[f"5 {LOST}"] * 9)

    assert len(nodes) == 4
    assert "crash 4 in a row without a new checkpoint: given up" in said
