"""Conformance of callbacks (contract: ``forge_core.contracts.callback``)."""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.contracts.callback import Callback, OneRank, Requests, RunContext, StepContext
from forge_core.contracts.optimizer import HasEvaluationWeights
from forge_core.distributed.mesh import build_mesh
from forge_core.distributed.timeouts import set_timeouts
from forge_core.errors import PluginError
from forge_core.train.events import EVENTS, Events
from forge_core.train.initialisation import SeededInitializer
from forge_testing.component_case import ComponentCase
from forge_testing.evaluation import SmallWorld
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import SEQ_LEN, SmallModel, cross_entropy, small_job


class CallbackConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "callback"
    steps: ClassVar[int] = 4
    """Length of the small run that the callback goes through."""
    patience: ClassVar[float] = 20.0
    """Seconds that one of two ranks waits for the other in a collective of the callback."""
    host_reads_when_not_logged: ClassVar[bool] = False
    """Whether the callback may read device tensors on the host in steps that are not logged. It costs every user of the
    callback a synchronisation a step."""

    def start(self, directory: Path) -> tuple[Callback, SmallRun]:
        callback: Callback = self.make()
        return callback, SmallRun(callback, directory, self.steps)

    def test_is_a_callback(self) -> None:
        callback = self.make()

        assert isinstance(callback, Callback), (
            f"the factory must return a forge_core.contracts.callback.Callback, got {type(callback).__qualname__}"
        )

    def test_methods_are_events(self) -> None:
        callback: Callback = self.make()

        known = [*(name for name in dir(Callback) if not name.startswith("_")), "evaluation_weights"]
        own = [name for name in dir(callback) if not name.startswith("_") and name not in known]
        for name in own:
            for near in difflib.get_close_matches(name, known, 1, cutoff=0.8):
                pytest.fail(f"nothing calls {name}; did you mean {near!r}?")
        try:
            Events([("callback", callback)])
        except PluginError as error:
            pytest.fail(f"an event cannot be called: {error}")

    def test_goes_through_a_run(self, tmp_path: Path) -> None:
        _, run = self.start(tmp_path)

        run.go()

    def test_goes_through_a_failing_run(self, tmp_path: Path) -> None:
        _, run = self.start(tmp_path)

        run.fail()

    def test_does_not_wait_for_the_device_in_steps_that_are_not_logged(self, tmp_path: Path) -> None:
        if self.host_reads_when_not_logged:
            pytest.skip("the callback says that it reads values on the host")
        _, run = self.start(tmp_path)

        run.go(logged=False)

        reads = sorted(run.host_reads & {"step_start", "before_optimizer_step", "step_end"})
        assert not reads, (
            f"a device tensor is read on the host in {', '.join(reads)} of a step that is not logged; look at tensors "
            "only when context.logged is true"
        )

    def test_two_ranks_go_through_a_run_together(self) -> None:
        """A collective that only one of them calls would make a real run wait until its timeout."""
        if not any(self._talks_as(rank) for rank in range(2)):
            return  # starting two processes takes seconds
        problems = on_ranks(type(self), "_go_with_another_rank", 2)

        for rank, problem in enumerate(problems):
            assert not problem, (
                f"rank {rank} waited {self.patience:g} s for another one: {problem}; what talks to other ranks must be "
                "called by all of them, in the same events and the same order"
            )

    def _talks_as(self, rank: int) -> bool:
        """Return whether the callback may talk to the other one of two ranks, which is not there. What fails does."""
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            groups = mock.patch.object(dist, "new_group", _new_group)
            with tempfile.TemporaryDirectory() as folder, groups, _Collectives() as collectives:
                _, run = self.start(Path(folder))
                try:
                    run.go()
                except Exception:  # noqa: BLE001 - on two real ranks it will be seen why
                    return True
                return bool(collectives.count)
        finally:
            dist.destroy_process_group()

    def _go_with_another_rank(self) -> str:
        """What went wrong on this rank. Ranks meet in the store, as a collective here could be taken for the missing
        one."""
        set_timeouts(self.patience)
        store, problem = dist.distributed_c10d._get_default_store(), ""
        with tempfile.TemporaryDirectory() as folder:
            _, run = self.start(Path(folder))
            try:
                run.go()
            except RuntimeError as error:
                if "imed out" not in str(error) and "onnection closed" not in str(error):
                    raise
                problem = f"in {error.__notes__[0].rpartition(' in ')[2]}"
        store.set(f"done/{dist.get_rank()}", "")
        store.wait([f"done/{rank}" for rank in range(dist.get_world_size())])
        return problem

    def test_state_survives(self, tmp_path: Path) -> None:
        callback, run = self.start(tmp_path)
        run.go()

        version, state = callback.state_version, dict(callback.state())
        assert isinstance(version, int), f"state_version must be an int, got {type(version).__name__}"
        try:
            saved = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            pytest.fail(f"state must be made of finite JSON values: {error}")
        again: Callback = self.make()
        again.load_state(saved, version)

        restored = json.loads(json.dumps(dict(again.state())))
        assert restored == saved, f"a callback that loads the state {saved} has the state {restored}"

    def test_tensors_survive(self, tmp_path: Path) -> None:
        callback, run = self.start(tmp_path)
        run.go()
        saved = {name: tensor.detach().clone() for name, tensor in callback.tensors().items()}

        again, other = self.start(tmp_path / "again")
        again.load_state(dict(callback.state()), callback.state_version)
        other.model.load_state_dict(run.model.state_dict())
        other.begin()
        there = dict(again.tensors())
        assert there.keys() == saved.keys(), (
            f"tensors has {', '.join(there) or 'nothing'} at the end of run_start, where the engine fills them, and "
            f"{', '.join(saved) or 'nothing'} at the end of a run; the names must be the same"
        )
        for name, tensor in there.items():
            assert (tensor.shape, tensor.dtype) == (saved[name].shape, saved[name].dtype), (
                f"the tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype} at the end of run_start, and "
                f"{tuple(saved[name].shape)} {saved[name].dtype} at the end of a run"
            )
            tensor.detach().copy_(saved[name])
        for name, tensor in again.tensors().items():
            assert torch.equal(tensor, saved[name]), (
                f"tensors gives a copy of {name!r}; it must give the tensor itself, which the engine fills in place"
            )
        for name, weight in _evaluation_weights(again).items():
            assert torch.equal(weight, _evaluation_weights(callback)[name]), (
                f"the evaluation weights of {name} differ after a resume: something is neither in state nor in tensors"
            )

    def test_evaluation_weights_are_those_of_parameters(self, tmp_path: Path) -> None:
        callback, run = self.start(tmp_path)
        run.begin()
        names = [*_evaluation_weights(callback)]
        callback, run = self.start(tmp_path)
        run.go()

        before = {name: one.detach().clone() for name, one in run.run.parameters.items()}
        weights = _evaluation_weights(callback)
        assert [*weights] == names, (
            f"evaluation_weights has {', '.join(weights) or 'no names'} after a run, and {', '.join(names) or 'none'} "
            "at the end of run_start; the names must be the same each time"
        )
        for name, weight in weights.items():
            assert name in before, f"evaluation_weights has {name!r}, which is the name of no parameter"
            assert weight.shape == before[name].shape, (
                f"evaluation_weights has a tensor {tuple(weight.shape)} for {name}, which is "
                f"{tuple(before[name].shape)}"
            )
        for name, parameter in run.run.parameters.items():
            assert torch.equal(parameter, before[name]), f"evaluation_weights changes {name}"


def _evaluation_weights(callback: Callback) -> dict[str, torch.Tensor]:
    return dict(callback.evaluation_weights()) if isinstance(callback, HasEvaluationWeights) else {}


class SmallRun:
    """A run of a few steps of a small model on the CPU, as a callback sees it."""

    def __init__(self, callback: Callback, directory: Path, steps: int) -> None:
        self._lifecycle = Events([("callback", callback)])
        self._checkpoint = directory / "checkpoints" / "step"
        self._checkpoint.mkdir(parents=True, exist_ok=True)
        self._steps = steps
        self.model = SmallModel()
        self.model.init_weights(SeededInitializer(0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.lines: list[str] = []
        """What the callback has logged."""
        self.reports: list[Mapping[str, torch.Tensor]] = []
        """What it has reported."""
        self.host_reads: set[str] = set()
        """Events in which a tensor was read on the host."""
        self.run = RunContext(
            job=small_job(steps),
            run_dir=directory,
            rank=dist.get_rank() if dist.is_initialized() else 0,
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            device=torch.device("cpu"),
            parts=[self.model],
            optimizer=self.optimizer,
            total_steps=steps,
            requests=Requests(),
            log=self.lines.append,
            parameters=dict(self.model.named_parameters()),
            mesh=build_mesh(small_job(steps), torch.device("cpu")) if dist.is_initialized() else OneRank(),
            report=self.reports.append,
        )

    def go(self, logged: bool = True) -> None:
        """All events of a run that reaches its end; every step, or none, is logged."""
        generator = torch.Generator().manual_seed(0)
        self.begin()
        for step in range(1, self._steps + 1):
            self._call("step_start", step=step)
            tokens = torch.randint(32, (2, SEQ_LEN + 1), generator=generator)
            total, count, _ = self.model(tokens[:, :-1], targets=tokens[:, 1:], loss=cross_entropy)
            loss = total / count
            loss.backward()
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            metrics = {"loss": loss.detach(), "grad_norm": nn.utils.get_total_norm(gradients)}
            context = StepContext(step, 2 * SEQ_LEN * step, metrics, logged)
            self._call("before_optimizer_step", context=context)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._call("step_end", context=attrs.evolve(context, left_out=torch.zeros(())))
            if logged and self.run.rank == 0:
                values = {
                    "loss": loss.item(),
                    "grad_norm": metrics["grad_norm"].item(),
                    "lr": 1e-3,
                    "tokens": 2.0 * SEQ_LEN * step,
                }
                self._call("step_logged", step=step, metrics=values)
        if logged:
            world = SmallWorld(1)
            world.model = self.model
            self._call("eval_start", step=self._steps, model=world.context(0))
            self._call("eval_batch", step=self._steps, batch={"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
            self._call("eval_end", step=self._steps, metrics={"eval/loss": 1.0, "eval/perplexity": 2.718})
            self._call("checkpoint_saved", step=self._steps, path=self._checkpoint)
            self._call("run_end", step=self._steps, stopped="")

    def begin(self) -> None:
        """The event before the first step."""
        self._call("run_start")

    def fail(self) -> None:
        """A run that ends with an error in its first step."""
        self.begin()
        self._call("step_start", step=1)
        self._call("run_failed", step=1, error=RuntimeError("the step failed"))

    def _call(self, event: str, **given: Any) -> None:
        assert event in EVENTS
        with _HostReads() as reads:
            self._lifecycle.call(event, run=self.run, **given)
        if reads.count:
            self.host_reads.add(event)


def _new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, **options: Any) -> Any:
    """
    Raises:
        RuntimeError: the ranks of the group would have to find each other. Where one is not there, torch 2.15 crashes.
    """
    if backend not in (None, "fake"):
        raise RuntimeError("the other rank is not there")
    return dist.distributed_c10d.new_group(ranks, timeout, backend, **options)


class _Collectives(TorchDispatchMode):
    """Counts what talks to other ranks, and lets none of it happen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.count += 1
            raise RuntimeError("no other rank is there")
        return func(*args, **(kwargs or {}))


class _HostReads(TorchDispatchMode):
    """Counts what would make a device wait: ``item()``, ``float()`` and ``bool()`` of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))
