"""The callback that joins a run to its replicas, by torchft's manager."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]  # torch forgets to export it
from torchft.manager import Manager  # type: ignore[import-untyped]  # it has no types
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL  # type: ignore[import-untyped]

from forge_core.contracts.callback import RunContext
from forge_core.contracts.replication import Handover, LiveState, Replication, Share
from forge_core.errors import ConfigError, ForgeError, LostPeerError
from forge_plugins_torchft.config import EXPECTED, HOST, LIGHTHOUSE, NAME, TorchftConfig
from forge_plugins_torchft.state_transport import StateTransport

_LOOK_EVERY = 2.0
"""Seconds after which a replica that waits for others looks whether the lighthouse still answers."""
_LOST_AFTER = 10.0
"""Seconds without an answer."""
_STOP = "forge/stop"
"""Key of the store of a replica: a rank is told to stop."""
_BUCKET = 16 * 2**20
"""Elements that are sent at once: enough for the network, and little beside the gradients."""


class _WatchfulManager(Manager):  # type: ignore[misc]  # torchft's
    """torchft's would wait for a lighthouse that is gone for as long as for other replicas; and for these, although it
    is told to stop."""

    look: Callable[[], None]
    stop: _Stop

    def wait_quorum(self) -> None:
        while not self._quorum_future.done() and not self.stop.is_asked():
            try:
                self._quorum_future.result(timeout=_LOOK_EVERY)
            except TimeoutError:
                if not self._quorum_future.done():
                    self.look()
        if self.stop.any_rank(not self._quorum_future.done()):
            raise _StoppedError
        self._quorum_future.result()


class _DaemonThreads(Executor):
    """Python waits at its end for the thread of torchft's own executor, which may wait for other replicas."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


class _StoppedError(ForgeError):
    """This replica is told to stop, and waits for others."""


class _Stop:
    """A request to stop, which reaches one rank of a replica before another: all end their wait together.

    Args:
        store: of the ranks of this replica.
    """

    def __init__(self, run: RunContext, store: TCPStore) -> None:
        self._run = run
        self._store = store

    def is_asked(self) -> bool:
        """Return whether this rank is told to stop, or has heard of another one that is."""
        if self._run.requests.stop and self._run.world_size > 1:
            self._store.set(_STOP, "")
        return bool(self._run.requests.stop) or (self._run.world_size > 1 and self._store.check([_STOP]))

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank says so. All ranks ask, and wait for each other."""
        flags = torch.tensor(float(flag), device=self._run.device)
        return self._run.mesh.sum_over(flags, tuple(self._run.mesh.degrees)).item() > 0


class TorchftReplication(Replication):
    """Each rank of a replica talks to those of the same number in the others. The first one runs torchft's manager
    server, through which ranks vote."""

    def __init__(self, config: TorchftConfig, /) -> None:
        self._config = config
        self._manager: Manager | None = None
        self._saved = {"step": 0, "batches_committed": 0}
        self._fails_since: float | None = None
        self._failure = ""
        if config.lighthouse_url is None:
            raise ConfigError(
                "callbacks: torchft has no lighthouse, at which replicas report: start them with forge replicas, or "
                f"start torchft_lighthouse and set {LIGHTHOUSE} or the key lighthouse"
            )
        self._lighthouse = config.lighthouse_url

    def run_start(self, run: RunContext) -> None:
        self._run = run

    def join(self, handover: Handover) -> None:
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # it reports what it is there for with tracebacks
        self._wait_for_lighthouse(0 if urlsplit(self._lighthouse).hostname == "127.0.0.1" else self._config.timeout)
        timeout = timedelta(seconds=self._config.timeout)
        host = os.environ.get(HOST) or socket.gethostname()
        self._store = _store_of_replica(host, self._run.rank)
        self._transport = StateTransport(timeout, host)
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(self._config.timeout))  # torchft would, and warn
        self._group = (ProcessGroupNCCL if self._run.device.type == "cuda" else ProcessGroupGloo)(timeout)
        try:
            self._manager = _WatchfulManager(
                pg=self._group,
                load_state_dict=handover.take,
                state_dict=lambda: _settled(handover),
                min_replica_size=self._config.min_replicas,
                use_async_quorum=False,  # who takes part decides which samples are read
                timeout=timeout,
                quorum_timeout=timedelta(seconds=self._config.join_timeout),
                connect_timeout=timeout,
                rank=self._run.rank,
                world_size=self._run.world_size,
                store_addr=host,
                store_port=self._store.port,
                lighthouse_addr=self._lighthouse,
                replica_id=os.environ.get(NAME) or socket.gethostname(),
                hostname=host,
                checkpoint_transport=self._transport,
                init_sync=False,  # the same seed is the same model
            )
        except RuntimeError as error:  # it is gone since it was waited for, or is none; torchft says so by texts only
            raise LostPeerError(f"no lighthouse answers at {self._lighthouse}: {error}") from error
        self._manager._executor = _DaemonThreads()
        self._manager.stop = _Stop(self._run, self._store)
        self._manager.look = lambda: self._wait_for_lighthouse(_LOST_AFTER)
        self._manager.load_state_dict({**self._saved, "step": handover.step})
        self._expected = int(os.environ.get(EXPECTED) or 1)
        self._begins_by = time.monotonic() + self._config.timeout
        self._formation = -1

    def begin_step(self) -> Share | None:
        try:
            while not self._joined.stop.any_rank(bool(self._run.requests.stop)):
                share = self._agree()
                if share.formation == self._formation or self._may_begin(share.count):
                    self._formation = share.formation
                    return share
        except _StoppedError:
            pass
        return None

    def _agree(self) -> Share:
        """Settle with the others who is there."""
        manager = self._joined
        try:
            manager.start_quorum()
        except ForgeError:
            raise
        except Exception as error:
            raise LostPeerError(
                f"the lighthouse at {self._lighthouse} is gone, or {self._config.min_replicas} replicas have not come "
                f"within {self._config.join_timeout:g} s: {_first_line(error)}"
            ) from error
        if self._transport.failure is not None:
            why = _first_line(self._transport.failure)
            raise LostPeerError(f"the state of another replica could not be had: {why}")
        index = manager.participating_rank()
        assert index is not None, "all that are there take part, once they have the state of the others"
        return Share(index, manager.num_participants(), manager._quorum_id)

    def _may_begin(self, count: int) -> bool:
        """Asked of each new formation: whether one of them has begun already, or all have come that were started
        together. Else the first to come would train by itself for a while, on other batches each time."""
        has_begun = self._formation >= 0
        ready = has_begun or count >= self._expected or time.monotonic() > self._begins_by
        readiness = torch.tensor([float(ready)], device=self._run.device)
        if self.sum([readiness]) and readiness.item() > 0:
            return True
        self._joined.report_error(TimeoutError("not all replicas have come"))
        self.commit()  # it says no, so that another formation is asked for
        time.sleep(0.1)
        return False

    def sum(self, tensors: Sequence[torch.Tensor]) -> bool:
        under_way: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(self._run.device)
            under_way.append((bucket, flat, self._joined.allreduce(flat, reduce_op=ReduceOp.SUM)))
            if len(under_way) > 1:  # one on its way while the next is packed
                _unpack(*under_way.pop(0))
        for bucket, flat, work in under_way:
            _unpack(bucket, flat, work)
        return self._works()

    def _works(self) -> bool:
        """Whether replicas could add up. A replica that is lost is left out the next time; what fails each time is
        another thing, such as a network that NCCL cannot use.

        Raises:
            LostPeerError: nothing could be added up for ``join_timeout``.
        """
        failed = self._joined.errored()
        if failed is None:
            self._fails_since, self._failure = None, ""
            return True
        failure = _first_line(failed.original_exception)
        if failure != self._failure:
            self._run.log(f"the replicas could not add up: {failure}")
        now = time.monotonic()
        self._fails_since, self._failure = self._fails_since or now, failure
        if now - self._fails_since > self._config.join_timeout:
            seconds = f"{self._config.join_timeout:g} s (join_timeout)"
            raise LostPeerError(f"the replicas could not add up for {seconds}: {failure}")
        return False

    def commit(self) -> bool:
        try:
            return bool(self._joined.should_commit())
        except Exception as error:
            raise LostPeerError(f"the ranks of this replica could not vote: {_first_line(error)}") from error

    def run_end(self, run: RunContext, step: int, stopped: str) -> None:
        self._leave()

    def run_failed(self, run: RunContext, step: int, error: BaseException) -> None:
        self._leave()

    def state(self) -> Mapping[str, Any]:
        """Steps that were committed, and how many replicas' batches were in them, in all."""
        return self._saved if self._manager is None else self._manager.state_dict()

    def load_state(self, state: Mapping[str, Any], version: int) -> None:
        self._saved = dict(state)

    @property
    def _joined(self) -> Manager:
        assert self._manager is not None, "join() comes first"
        return self._manager

    def _wait_for_lighthouse(self, seconds: float) -> None:
        """It may be on a machine that starts later; one on this machine is there first, unless the run is over.

        Raises:
            LostPeerError: it does not answer for so long.
        """
        address = urlsplit(self._lighthouse)
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection((address.hostname, address.port), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LostPeerError(f"no lighthouse answers at {self._lighthouse}: {error}") from error
                time.sleep(0.5)

    def _leave(self) -> None:
        if self._manager is not None:
            self._saved = self._manager.state_dict()
            self._manager.shutdown(wait=False)
            self._group.shutdown()
            self._manager = None


def _store_of_replica(host: str, rank: int) -> TCPStore:
    """A store that other replicas can reach too, unlike that of ``--nproc``. Its master is rank 0's, to be kept for as
    long as it is needed."""
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store else 0]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(port, src=0)
    return store or TCPStore(host, port[0])


def _settled(handover: Handover) -> LiveState:
    """With the last update done: torchft reads it on another stream."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return handover.give()


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Of one dtype and device each, in the same order in all replicas."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in by_kind.values():
        bucket, elements = [], 0
        for tensor in alike:
            bucket.append(tensor)
            elements += tensor.numel()
            if elements >= _BUCKET:
                yield bucket
                bucket, elements = [], 0
        if bucket:
            yield bucket


def _unpack(bucket: Sequence[torch.Tensor], flat: torch.Tensor, work: Any) -> None:
    work.wait()
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):  # type: ignore[no-untyped-call]  # torch's
        tensor.copy_(part.view(tensor.shape))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
