"""The batch script: written to be read by whoever wonders what their job does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent

import attrs

from forge_core.config.sections import seconds_of
from forge_plugins_slurm.cluster import SHUTDOWN_TIMEOUT, Cluster
from forge_plugins_slurm.config import ASKED


@attrs.frozen(kw_only=True)
class Submission:
    """What is submitted: one run, or an array with one task a run."""

    name: str
    runs: Sequence[Path]
    """Directories, absolute. Each has ``slurm/job.toml``, the resolved job."""
    is_array: bool
    folder: Path
    """Where the script and the log lie."""
    working_directory: Path
    nodes: int
    time: str
    cluster: Cluster
    python: str
    disabled_plugins: Sequence[str] = ()
    trusted_files: str = ""
    """``FORGE_TRUST_FILES``, for jobs that hold plugin files."""

    @property
    def script(self) -> Path:
        """Where the script is written."""
        return self.folder / "job.sh"

    @property
    def log(self) -> Path:
        """What all starts of the job print, one after the other; ``%A`` and ``%a`` are the array's id and the task."""
        return self.folder / ("%A_%a.log" if self.is_array else "output.log")

    @property
    def log_pattern(self) -> str:
        """The same for ``sbatch``, which fills in more than these: a ``%`` of a folder is written twice."""
        return f"{self.folder}/".replace("%", "%%") + self.log.name


def batch_script(submission: Submission) -> str:
    """The text of the script."""
    parts = [
        "\n".join(["#!/bin/bash", *_header(submission)]),
        _START.replace("@RUN@", _run_of(submission)).replace("@ASKED@", ASKED),
        "\n".join(_environment(submission)),
        _with_spare_nodes(submission) if submission.cluster.spare_nodes else _on_all_nodes(submission),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


_START = r"""
@RUN@
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
asked=$run/@ASKED@             # the run leaves it if it wants to go on
outcome=$run/slurm/outcome           # the exit code of rank 0; launchers have codes of their own
failures=$run/slurm/failures         # crashes in a row without a new checkpoint
newest_checkpoint() { # on the disk, or in the memory of the nodes
    { ls "$run/checkpoints"; sed -nE 's/.*"newest": "(step_[0-9]+)".*/\1/p' "$run/memory.json"; } 2>/dev/null |
        grep '^step_' | sort | tail -n 1
}
say() { echo "== $(date '+%F %T') job $job: $*"; }
requeue() {
    say "$1; back into the queue"
    scontrol requeue "$job" && sleep 60 # Slurm ends this script while it sleeps
    say "could not be requeued"
    exit "$code"
}
export FORGE_OUTCOME_FILE=$outcome
port=$((15000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0} + $$) % 15000))
"""

_BEFORE = r"""
say "start $((${SLURM_RESTART_COUNT:-0} + 1)) on @NODES@, newest checkpoint: $(newest_checkpoint)"
rm -f "$asked" "$outcome"
before=$(newest_checkpoint)

# Other jobs, of other clusters too, and what is left of this job's last start may listen on this host: take a port that
# depends on the job, on the start and on this very process, and is free.
export MASTER_ADDR=@ADDRESS@
while (exec 3<>"/dev/tcp/@HOST@/$port") 2>/dev/null; do port=$((15000 + (port - 14999) % 15000)); done
export MASTER_PORT=$port

"""

_AFTER = r"""
if [ "$code" -ne 0 ] && [ -s "$outcome" ]; then code=$(cat "$outcome"); fi

case $code in
    0) say "finished"; exit 0 ;;
    2) say "the configuration, the data or a plugin is wrong: starting again would not help"; exit 2 ;;
    3) if [ -e "$asked" ]; then requeue "stopped and saved"; fi
       say "stopped and saved, and not to be continued"; exit 3 ;;
    4) say "the loss or the gradient is not finite: starting again would not help"; exit 4 ;;
    138) # SIGUSR1 before the run could listen: by a preemption, unless the time limit is near
        if [ "$SECONDS" -lt @BEFORE_THE_SIGNAL@ ]; then requeue "told to leave before the run could listen"; fi
        say "the time limit has come before the run could listen" ;;
esac

# It crashed. Starting again is worth it as long as the run gets further.
if [ "$(newest_checkpoint)" != "$before" ]; then
    rm -f "$failures"
    why="exit code $code, after a new checkpoint"
else
    count=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
    echo "$count" >"$failures"
    if [ "$count" -gt @MAX_FAILURES@ ]; then
        say "exit code $code, crash $count in a row without a new checkpoint: given up"
        exit "$code"
    fi
    why="exit code $code, crash $count of at most @MAX_FAILURES@ in a row without a new checkpoint"
fi
"""

_SPARES = r"""
# @COUNT@ of the job's nodes train, and the others are spare. After a crash, the run starts again on nodes that are up.
# Nodes come last on which a task was lost: it has ended otherwise than the rest, or not at all.
said=$run/slurm/srun_said            # what srun and the run have written to standard error since the start
suspects=""                          # a node a line, the one of the last crash last
code=1
watcher=""
in_a_row() { echo "${1//$'\n'/,}"; }
hosts() { while read -r list; do scontrol show hostnames "$list"; done; }
choose_nodes() { # in Slurm's order, in which tasks are numbered
    local all states
    all=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N | grep . || echo "$SLURM_JOB_NODELIST")
    all=$(hosts <<<"$all")
    if states=$(sinfo --noheader --Node --nodes="$(in_a_row "$all")" --format="%N %t"); then
        up=$(sed -nE 's/^([^ ]+) (alloc|mix|comp)[^*]?$/\1/p' <<<"$states" | sort -u) # with a star, it does not answer
    else # nor does the controller, for which srun waits
        up=$all
    fi
    chosen=$({ grep -vxF "$suspects" <<<"$all"; echo "$suspects"; } | grep -xF "$up" | head -n @COUNT@)
    chosen=$(grep -xF "$chosen" <<<"$all")
}
# Slurm leaves a job as it is whose script is gone with its node. Another node puts it back into the queue.
watch_script() {
    local node
    watcher=""
    node=$(grep -vxF "$SLURMD_NODENAME" <<<"$up" | tail -n 1)
    if [ -z "$node" ]; then return; fi
    srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$node" --output=none bash -c '
        while sleep 20; do
            shown=$(scontrol show job "$SLURM_JOB_ID" --oneliner) || continue
            nodes=$(sed -E "s/.* NodeList=([^ ]+).*/\1/" <<<"$shown")
            script=$(sed -E "s/.* BatchHost=([^ ]+).*/\1/" <<<"$shown")
            scontrol show hostnames "$nodes" | grep -qxF "$script" || scontrol requeue "$0"
        done' "$job" 2>/dev/null &
    watcher=$!
}
trap '[ -z "$watcher" ] || kill "$watcher"' EXIT
suspect_nodes() { # a task that has lost another one leaves with exit code 5, and its node is well
    local well ill lost
    well=$(sed -nE 's/^srun: error: ([^ ]+): tasks? .*: Exited with exit code 5$/\1/p' "$said" | hosts)
    ill=$(sed -nE '/: Exited with exit code 5$/d; s/^srun: error: ([^ ]+): tasks? .*/\1/p' "$said" | hosts)
    if [ -z "$well" ]; then return; fi # all have ended alike
    lost=$({ grep -vxF "$well" <<<"$chosen"; grep -xF "$ill" <<<"$chosen"; } | sort -u)
    if [ -z "$lost" ]; then return; fi
    why="$why, on $(in_a_row "$lost")"
    suspects=$({ grep -vxF "$lost" <<<"$suspects"; echo "$lost"; } | grep .)
}

"""


def _on_all_nodes(submission: Submission) -> str:
    before = _BEFORE.replace("@NODES@", "$SLURM_JOB_NODELIST")
    before = before.replace("@ADDRESS@", "$(hostname)").replace("@HOST@", "127.0.0.1")
    return f'{before}{_launch(submission)}\ncode=$?{_after(submission)}requeue "$why"'


def _with_spare_nodes(submission: Submission) -> str:
    """Starts again within the job as long as there are nodes enough."""
    before = _BEFORE.replace("@NODES@", '$(in_a_row "$chosen")')
    before = before.replace("@ADDRESS@", "$address").replace("@HOST@", "$MASTER_ADDR")
    start = f"""\
choose_nodes
if [ "$(grep -c . <<<"$chosen")" -lt {submission.nodes} ]; then
    requeue "fewer than {submission.nodes} of the job's nodes are up"
fi
first=$(head -n 1 <<<"$chosen")
address=$(scontrol show node --oneliner "$first" | sed -nE 's/.* NodeAddr=([^ ]+).*/\\1/p')
address=${{address:-$first}}
watch_script
{before}exec 3> >(tee "$said" >&2)
copier=$!
{_launch(submission)} 2>&3
code=$?
exec 3>&-
wait "$copier"
{_after(submission)}suspect_nodes
[ -z "$watcher" ] || kill "$watcher"
say "$why; start again"
"""
    functions = _SPARES.replace("@COUNT@", str(submission.nodes))
    return f"{functions}while true; do\n{indent(start, '    ')}done"


def _after(submission: Submission) -> str:
    # Slurm may send the signal up to a minute before the lead that it is given.
    before_the_signal = max(0, seconds_of(submission.time) - submission.cluster.signal_lead - 60)
    text = _AFTER.replace("@BEFORE_THE_SIGNAL@", str(before_the_signal))
    return text.replace("@MAX_FAILURES@", str(submission.cluster.max_failures))


def _header(submission: Submission) -> Iterator[str]:
    cluster = submission.cluster
    one_task = cluster.launcher == "torchrun"
    options = {
        "job-name": submission.name,
        "array": f"0-{len(submission.runs) - 1}" if submission.is_array else None,
        "chdir": submission.working_directory,
        "output": submission.log_pattern,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": submission.nodes + cluster.spare_nodes,
        "ntasks-per-node": 1 if one_task else cluster.ranks_on_each_node,
        "gpus-per-node": cluster.gpus_per_node,
        "cpus-per-task": _cpus_per_task(cluster),
        "mem": cluster.memory,
        "time": submission.time,
    }
    runs = f"{len(submission.runs)} runs, a task each" if submission.is_array else str(submission.runs[0])
    spares = f", and {cluster.spare_nodes} spare nodes" if cluster.spare_nodes else ""
    yield f"# Written by `forge submit`: {runs}, on {submission.nodes} × {cluster.ranks_on_each_node} ranks{spares}."
    for name, value in options.items():
        if value is not None:
            yield f"#SBATCH --{name}={shlex.quote(str(value))}"
    yield from (f"#SBATCH {option}" for option in cluster.sbatch_options)
    yield '# To the ranks, not to this script (no "B:"): they save, requeue the job, and leave.'
    yield f"#SBATCH --signal=USR1@{cluster.signal_lead}"
    yield "# After the failure of a node, and a preemption that ends in a kill."
    yield "#SBATCH --requeue"
    if cluster.spare_nodes:
        yield "# A node that fails does not end the job."
        yield "#SBATCH --no-kill"
    yield "#SBATCH --open-mode=append"


def _run_of(submission: Submission) -> str:
    if not submission.is_array:
        return f"run={shlex.quote(str(submission.runs[0]))}"
    lines = [f"    {shlex.quote(str(run))}" for run in submission.runs]
    return "\n".join(["runs=(", *lines, ")", "run=${runs[$SLURM_ARRAY_TASK_ID]}"])


def _environment(submission: Submission) -> Iterator[str]:
    cluster = submission.cluster
    if cluster.modules:
        yield f"module load {shlex.join(cluster.modules)}"
    yield from cluster.setup
    for name, value in cluster.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    if submission.disabled_plugins:
        yield f"export FORGE_DISABLE_PLUGINS={shlex.quote(','.join(submission.disabled_plugins))}"
    if submission.trusted_files:
        yield f"export FORGE_TRUST_FILES={shlex.quote(submission.trusted_files)}"
    if cluster.launcher == "torchrun" and SHUTDOWN_TIMEOUT not in cluster.environment:
        yield f"export {SHUTDOWN_TIMEOUT}=3600   # seconds to save in, before torchrun kills its ranks"


def _launch(submission: Submission) -> str:
    return "\n".join(_lines_of_launch(submission))


def _lines_of_launch(submission: Submission) -> Iterator[str]:
    cluster = submission.cluster
    patience = 30 if cluster.spare_nodes else 60  # tasks of a dead node are waited for in vain
    yield f"# When one rank has left, the others have {patience} seconds to leave with codes of their own."
    yield f"srun --kill-on-bad-exit=0 --wait={patience} \\"
    if cluster.spare_nodes:
        tasks = (
            f"--ntasks={submission.nodes * cluster.ranks_on_each_node} --ntasks-per-node={cluster.ranks_on_each_node}"
        )
        yield f'    --nodes={submission.nodes} {tasks} --nodelist="$(in_a_row "$chosen")" --overlap \\'
    if cpus := _cpus_per_task(cluster):  # since Slurm 22.05, srun does not take it from the header
        yield f"    --cpus-per-task={cpus} \\"
    yield from (f"    {shlex.quote(option)} \\" for option in cluster.srun_options)
    if cluster.launcher == "torchrun":
        yield "    bash -c 'export PET_NODE_RANK=$SLURM_NODEID; exec \"$@\"' torchrun \\"
    if cluster.container:
        yield f"    {shlex.join(cluster.container)} \\"
    if cluster.launcher == "torchrun":
        yield f"    {shlex.quote(submission.python)} -m torch.distributed.run \\"
        yield f"    --nnodes={submission.nodes} --nproc-per-node={cluster.ranks_on_each_node} --max-restarts=0 \\"
        yield '    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\'
        yield "    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \\"
        yield '    -m forge_core run "$run/slurm/job.toml"'
    else:
        yield f'    {shlex.quote(submission.python)} -m forge_core run "$run/slurm/job.toml"'


def _cpus_per_task(cluster: Cluster) -> int | None:
    if cluster.cpus_per_rank is None:
        return None
    return cluster.cpus_per_rank * (cluster.ranks_on_each_node if cluster.launcher == "torchrun" else 1)
