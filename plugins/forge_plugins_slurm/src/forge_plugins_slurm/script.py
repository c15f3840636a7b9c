"""The batch script: written to be read by whoever wonders what their job does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def batch_script(submission: Submission) -> str:
    """The text of the script."""
    parts = [
        "\n".join(["#!/bin/bash", *_header(submission)]),
        _START.replace("@RUN@", _run_of(submission)).replace("@ASKED@", ASKED),
        "\n".join(_environment(submission)),
        "\n".join(_launch(submission)) + _end(submission),
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


_START = r"""
@RUN@
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
asked=$run/@ASKED@             # the run leaves it if it wants to go on
outcome=$run/slurm/outcome           # the exit code of rank 0; launchers have codes of their own
failures=$run/slurm/failures         # crashes in a row without a new checkpoint
newest_checkpoint() { ls "$run/checkpoints" 2>/dev/null | grep '^step_' | sort | tail -n 1; }
say() { echo "== $(date '+%F %T') job $job: $*"; }

say "start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST, newest checkpoint: $(newest_checkpoint)"
rm -f "$asked" "$outcome"
before=$(newest_checkpoint)

# Other jobs, of other clusters too, and what is left of this job's last start may listen on this host: take a port that
# depends on the job, on the start and on this very process, and is free.
port=$((15000 + (SLURM_JOB_ID * 7 + ${SLURM_RESTART_COUNT:-0} + $$) % 15000))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((15000 + (port - 14999) % 15000)); done
MASTER_ADDR=$(hostname)
export MASTER_ADDR MASTER_PORT=$port FORGE_OUTCOME_FILE=$outcome
"""

_END = r"""
code=$?
if [ "$code" -ne 0 ] && [ -s "$outcome" ]; then code=$(cat "$outcome"); fi

requeue() {
    say "$1; back into the queue"
    scontrol requeue "$job" && sleep 60 # Slurm ends this script while it sleeps
    say "could not be requeued"
    exit "$code"
}

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
    requeue "exit code $code, after a new checkpoint"
fi
count=$(($(cat "$failures" 2>/dev/null || echo 0) + 1))
echo "$count" >"$failures"
if [ "$count" -gt @MAX_FAILURES@ ]; then
    say "exit code $code, crash $count in a row without a new checkpoint: given up"
    exit "$code"
fi
requeue "exit code $code, crash $count of at most @MAX_FAILURES@ in a row without a new checkpoint"
"""


def _end(submission: Submission) -> str:
    # Slurm may send the signal up to a minute before the lead that it is given.
    before_the_signal = max(0, seconds_of(submission.time) - submission.cluster.signal_lead - 60)
    text = _END.replace("@BEFORE_THE_SIGNAL@", str(before_the_signal))
    return text.replace("@MAX_FAILURES@", str(submission.cluster.max_failures))


def _header(submission: Submission) -> Iterator[str]:
    cluster = submission.cluster
    one_task = cluster.launcher == "torchrun"
    options = {
        "job-name": submission.name,
        "array": f"0-{len(submission.runs) - 1}" if submission.is_array else None,
        "chdir": submission.working_directory,
        "output": str(submission.log) if submission.is_array else str(submission.log).replace("%", "%%"),
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "nodes": submission.nodes,
        "ntasks-per-node": 1 if one_task else cluster.ranks_on_each_node,
        "gpus-per-node": cluster.gpus_per_node,
        "cpus-per-task": _cpus_per_task(cluster),
        "mem": cluster.memory,
        "time": submission.time,
    }
    runs = f"{len(submission.runs)} runs, a task each" if submission.is_array else str(submission.runs[0])
    yield f"# Written by `forge submit`: {runs}, on {submission.nodes} × {cluster.ranks_on_each_node} ranks."
    for name, value in options.items():
        if value is not None:
            yield f"#SBATCH --{name}={shlex.quote(str(value))}"
    yield from (f"#SBATCH {option}" for option in cluster.sbatch_options)
    yield '# To the ranks, not to this script (no "B:"): they save, requeue the job, and leave.'
    yield f"#SBATCH --signal=USR1@{cluster.signal_lead}"
    yield "# After the failure of a node, and a preemption that ends in a kill."
    yield "#SBATCH --requeue"
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


def _launch(submission: Submission) -> Iterator[str]:
    cluster = submission.cluster
    yield "# When one rank has left, the others have a minute to leave with codes of their own."
    yield "srun --kill-on-bad-exit=0 --wait=60 \\"
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
