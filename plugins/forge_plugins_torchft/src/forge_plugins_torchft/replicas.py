"""``forge replicas``: the replicas of a run that are on this machine, and the lighthouse at which they report."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

import attrs
import click

from forge_core.config.sections import Job
from forge_core.contracts.command import options_of
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError, ExitCode
from forge_core.job import dump_job, load_job
from forge_plugins_torchft.config import EXPECTED, HOST, LIGHTHOUSE, NAME, TorchftConfig, reporting_to
from forge_plugins_torchft.lighthouse import lighthouse

if TYPE_CHECKING:
    from forge_core.contracts.command import Invocation

_FINAL = (ExitCode.COMPLETED, ExitCode.INVALID, ExitCode.STOPPED, ExitCode.NON_FINITE)
"""A replica that ends so is not started again."""
_CHATTER = re.compile(r"\S+ \[INFO\] \[torchft::")
"""What torchft prints with every step, which cannot be switched off."""
_LOOK_EVERY = 0.1
"""Seconds."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--replicas", "count", type=click.IntRange(min=1), required=True, help="Replicas on this machine.")
@click.option("--nproc", type=click.IntRange(min=1), default=1, show_default=True, help="Processes of each.")
@click.option(
    "--first", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first one on this machine."
)
@click.option(
    "--lighthouse", "named", metavar="URL", help="Report to this one; by default one is started, for this run."
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Where the lighthouse that is started listens, for other machines too; by default for this one only.",
)
@click.option(
    "--heartbeat-timeout",
    type=click.FloatRange(min=0.2, max=10**9),
    default=5.0,
    show_default=True,
    help="Seconds without a sign of life after which the others go on without a replica.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How often a replica is started again.",
)
@click.pass_obj
def replicas(
    obj: Invocation,
    config: Path,
    overrides: tuple[str, ...],
    count: int,
    nproc: int,
    first: int,
    named: str | None,
    port: int | None,
    heartbeat_timeout: float,
    max_restarts: int,
) -> None:
    """Train the job in CONFIG with several replicas, each an ordinary run in <run.dir>/<run.name>/replica_<number>.

    OVERRIDES are --section.key=value, section.key=value or --section.key value. The job names the callback torchft.
    One replica that dies costs the others about the heartbeat timeout; it is started again, and given their state.
    """
    job = load_job(config, overrides, catalog=obj.catalog, world_size=nproc, options=options_of(replicas))
    settings = _settings(job)
    devices = _devices_of_each(job, count, nproc)
    os.environ["FORGE_DISABLE_PLUGINS"] = ",".join([*obj.disabled, os.environ.get("FORGE_DISABLE_PLUGINS", "")])
    url = settings.lighthouse if named is None else reporting_to(settings, named, "--lighthouse").lighthouse
    for option in ("port", "heartbeat_timeout"):
        source = click.get_current_context().get_parameter_source(option)
        if url is not None and source is click.core.ParameterSource.COMMANDLINE:
            who = "lighthouse of the callback torchft" if named is None else "--lighthouse"
            words = f"--{option.replace('_', '-')} is for the lighthouse that is started here"
            raise ConfigError(f"{words}, and {who} names another one")
    with tempfile.TemporaryDirectory(prefix="forge-") as folder, ExitStack() as until_complete:
        at = url or until_complete.enter_context(lighthouse(port, settings, heartbeat_timeout))
        environment = {**os.environ, LIGHTHOUSE: at, EXPECTED: str(first + count)}
        if urlsplit(at).hostname == "127.0.0.1":
            environment[HOST] = "127.0.0.1"
        group = [
            _Replica(
                _job_of_replica(job, number),
                number,
                Path(folder) / f"replica_{number}.toml",
                ["--nproc", str(nproc), *(["--debug"] if obj.debug else [])],
                {**environment, NAME: f"replica_{number}", **devices[number - first]},
            )
            for number in range(first, first + count)
        ]
        code = _look_after(group, max_restarts, until_complete.close)
    if code is not ExitCode.COMPLETED:
        sys.exit(int(code))


@attrs.define
class _Replica:
    """One of this machine: a process, and its successors."""

    job: Job
    number: int
    file: Path
    """Its job is written there."""
    options: Sequence[str]
    environment: Mapping[str, str]
    restarts: int = 0
    code: int | None = None
    """How it has ended, once it is not started again."""
    process: subprocess.Popen[str] | None = None
    _readers: list[threading.Thread] = attrs.field(factory=list)

    def start(self) -> None:
        self.file.write_text(dump_job(_resuming(self.job)))
        python = [sys.executable, "-P", "-m"]
        command = [*python, "forge_core", "run", str(self.file), *self.options]
        # a session of its own: what a terminal's Ctrl-C sends must come once, from here
        bound = [*python, "forge_plugins_torchft.with_parent", str(os.getpid()), *command]
        # one that comes back waits for another, if there are any: it would begin at a checkpoint older than theirs
        expected = self.environment[EXPECTED] if self.restarts == 0 or self.environment[EXPECTED] == "1" else "2"
        self.process = subprocess.Popen(
            bound,
            env={**self.environment, EXPECTED: expected},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for source, to_stderr in ((self.process.stdout, False), (self.process.stderr, True)):
            reader = threading.Thread(target=self._pass_on, args=(source, to_stderr), daemon=True)
            reader.start()
            self._readers.append(reader)

    def tell(self, number: int) -> None:
        """Pass a signal on."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def finish(self) -> None:
        """After the process has ended: pass on its last words."""
        for reader in self._readers:
            reader.join(timeout=5)
        self._readers.clear()

    def say(self, line: str) -> None:
        click.echo(f"[replica {self.number}] {line}", err=True)

    def _pass_on(self, source: IO[str], to_stderr: bool) -> None:
        for line in source:
            if not _CHATTER.match(line):
                with suppress(OSError):  # who reads here may have left; the replica must not be held up by that
                    click.echo(f"[replica {self.number}] {line.rstrip()}", err=to_stderr)


def _look_after(group: Sequence[_Replica], max_restarts: int, close_lighthouse: Callable[[], None]) -> ExitCode:
    """Start them, and start those again that die, until the run is complete, is stopped, or none is left."""
    with _counted_signals() as signals:
        for one in group:
            one.start()
        while any(one.code is None for one in group):
            time.sleep(_LOOK_EVERY)
            signals.pass_on(group)
            for one in group:
                if one.code is not None or one.process is None or one.process.poll() is None:
                    continue
                code = one.process.returncode
                if code == ExitCode.COMPLETED:
                    close_lighthouse()  # one that comes now would find no other, and train by itself
                one.finish()
                is_complete = any(other.code == ExitCode.COMPLETED for other in group)
                if code in _FINAL or signals.came or is_complete or one.restarts == max_restarts:
                    one.code = code
                    if code == ExitCode.INVALID:
                        one.say(f"{_ended(code)}; it is not started again")
                    elif code not in _FINAL and is_complete:
                        one.say(f"{_ended(code)}; the run is complete without it")
                    elif code not in _FINAL and not signals.came:
                        one.say(f"{_ended(code)}; given up after {max_restarts} restarts")
                    continue
                one.restarts += 1
                one.say(f"{_ended(code)}; started again, {max_restarts - one.restarts} more times at most")
                one.start()
    return _outcome([one.code for one in group])


def _outcome(codes: Sequence[int | None]) -> ExitCode:
    """One that has reached the end has the whole model; otherwise what happened to the first that ended by itself."""
    if ExitCode.COMPLETED in codes:
        return ExitCode.COMPLETED
    for code in (ExitCode.STOPPED, ExitCode.NON_FINITE, ExitCode.INVALID):
        if code in codes:
            return code
    return ExitCode.LOST_PEER


@attrs.define
class _Signals:
    """The signals that have come and ask to stop."""

    came: list[int] = attrs.field(factory=list)
    _passed_on: int = 0

    def pass_on(self, group: Sequence[_Replica]) -> None:
        """Tell all replicas of the new ones. One that was being started as a signal came hears of it, too."""
        for number in self.came[self._passed_on :]:
            self._passed_on += 1
            for one in group:
                one.tell(number)


@contextmanager
def _counted_signals() -> Iterator[_Signals]:
    signals = _Signals()

    def handle(number: int, _: FrameType | None) -> None:
        signals.came.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _settings(job: Job) -> TorchftConfig:
    """Raises ConfigError if the job does not say that it has replicas."""
    found = [use.config for use in job.callbacks if isinstance(use.config, TorchftConfig)]
    if not found:
        raise ConfigError('the job does not say that it has replicas; add\n\n[[callbacks]]\nname = "torchft"\n')
    settings: TorchftConfig = found[0]
    return settings


def _devices_of_each(job: Job, count: int, nproc: int) -> list[dict[str, str]]:
    """What each replica's environment says about GPUs.

    Raises:
        ConfigError: there are too few.
    """
    import torch  # completion needs the options of the command alone

    there = torch.cuda.device_count() if job.run.device in ("auto", "cuda") else 0
    if there == 0:
        return [{} for _ in range(count)]
    if there < count * nproc:
        raise ConfigError(f"--replicas {count} with --nproc {nproc} need {count * nproc} GPUs, and {there} are there")
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if names == [""]:
        names = [str(device) for device in range(there)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[i * nproc : (i + 1) * nproc])} for i in range(count)]


def _job_of_replica(job: Job, number: int) -> Job:
    """Resolved once, and the same but for its directory, here and at the mirror."""
    name, mirror = str(job.run.name), job.checkpoint.mirror
    return attrs.evolve(
        job,
        run=attrs.evolve(job.run, dir=job.run.dir / name, name=f"replica_{number}"),
        checkpoint=attrs.evolve(job.checkpoint, mirror=None if mirror is None else _within(mirror, name)),
    )


def _within(mirror: ComponentRef, name: str) -> ComponentRef:
    """The mirror of a run, for its replicas."""
    if not hasattr(mirror.config, "within"):
        raise ConfigError(
            f"checkpoint.mirror: '{mirror.qualified_name}' has no folders within its place, so several replicas cannot "
            "share it"
        )
    return attrs.evolve(mirror, config=mirror.config.within(name))


def _resuming(job: Job) -> Job:
    """The job of a replica. One without a checkpoint goes on from the newest of another, if that can be seen from here.
    Otherwise it would begin afresh if the others do not come."""
    from forge_core.checkpoint.store import CheckpointStore
    from forge_core.launch import RunDirectory

    directory = RunDirectory(job, writes=False)
    if job.checkpoint.resume != "auto" or CheckpointStore(directory.checkpoints).steps():
        return job
    others = {one: CheckpointStore(one / "checkpoints").steps() for one in directory.path.parent.glob("replica_*")}
    newest = max((one for one in others if others[one]), key=lambda one: others[one][-1], default=None)
    if newest is None:
        return job
    return attrs.evolve(job, checkpoint=attrs.evolve(job.checkpoint, resume=str(newest), load=None))


def _ended(code: int) -> str:
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
