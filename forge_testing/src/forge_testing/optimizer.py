"""Conformance of optimizers (contract: ``forge_core.contracts.optimizer``)."""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge_core.checkpoint.state_dict import empty_slot
from forge_core.contracts.model import PARAMETER_ROLES, ParameterRole
from forge_core.contracts.optimizer import HasEvaluationWeights, NamedParameter, StateLayout, UpdateSize
from forge_core.train.parameter_groups import members_of
from forge_testing.component_case import ComponentCase
from forge_testing.several_ranks import on_ranks

_SHAPES: dict[str, tuple[ParameterRole, tuple[int, ...]]] = {
    "embed.weight": ("embedding", (11, 6)),
    "blocks.0.norm.weight": ("norm", (5,)),  # an odd length, so that two ranks hold unequal shards
    "blocks.0.attention.q.weight": ("matrix", (8, 6)),
    "blocks.0.attention.q.bias": ("bias", (8,)),
    "blocks.0.feed_forward.experts.up": ("expert", (3, 4, 6)),
    "head.weight": ("head", (11, 6)),
}

_AFTER_A_CHANGE = 6
"""Steps after a resume on another layout."""

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class OptimizerConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it.

    Choose a learning rate with which 20 steps get somewhere. The check on two ranks starts processes that import the
    file of the subclass, so define it at the top level of its module.
    """

    kind = "optimizer"
    period: ClassVar[int] = 1
    """Steps after which everything that the optimizer does has been done: 100 for one that recomputes something every
    100. It is resumed, and compared with itself on shards, over so many, and over 24 at least."""
    roles: ClassVar[Collection[ParameterRole]] = PARAMETER_ROLES
    """The roles that it takes: ``("matrix", "expert")`` for one that refuses the others."""

    def test_takes_every_parameter_once(self) -> None:
        parameters = self._parameters()
        optimizer = self.make(parameters=parameters)

        assert isinstance(optimizer, torch.optim.Optimizer), (
            f"the factory must return a torch.optim.Optimizer, got {type(optimizer).__qualname__}"
        )
        taken = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        for entry in parameters:
            count = taken.count(id(entry.parameter))
            assert count == 1, f"{entry.name} is in param_groups {count} times; every parameter must be there once"
        assert len(taken) == len(parameters), "param_groups holds parameters that were not given"

    def test_states_its_base_learning_rates(self) -> None:
        for group in self.make(parameters=self._parameters()).param_groups:
            lr = float(group["lr"])
            assert math.isfinite(lr) and lr >= 0, (  # noqa: PT018 – one sentence for both
                f'the base learning rate must stand in param_groups[i]["lr"] after construction, found {lr}'
            )

    def test_construction_changes_nothing(self) -> None:
        parameters = self._parameters()
        before = _values(parameters)
        optimizer = self.make(parameters=parameters)

        assert not optimizer.state, (
            "there is state before the first step; create it in step, the engine restores state into a fresh optimizer"
        )
        _assert_equal(before, _values(parameters), "the constructor changes {name}")

    @each_dtype
    def test_lowers_a_quadratic(self, dtype: torch.dtype) -> None:
        parameters = self._parameters(dtype)
        # Away from zero, so that weight decay alone does not get there.
        goals = {entry.name: 2 * entry.parameter.detach() + 1 for entry in parameters}
        before = {entry.name: float((entry.parameter.detach() - goals[entry.name]).norm()) for entry in parameters}
        optimizer = self.make(parameters=parameters)

        for _ in range(20):
            for entry in parameters:
                entry.parameter.grad = entry.parameter.detach() - goals[entry.name]
            optimizer.step()

        for entry in parameters:
            assert entry.parameter.dtype == dtype, f"step changes {entry.name} to {entry.parameter.dtype}"
            after = float((entry.parameter.detach() - goals[entry.name]).norm())
            assert after != before[entry.name] or before[entry.name] == 0, (
                f"20 steps leave {entry.name} where it was in {dtype}; step must change every parameter whose grad is "
                "set, in place"
            )
            assert after < before[entry.name], (
                f"20 steps on ½‖{entry.name} − goal‖² in {dtype} lead from the distance {before[entry.name]:.4g} to "
                f"{after:.4g}; a learning rate larger than {_rates(optimizer)} may help"
            )

    def test_reads_the_learning_rate_at_each_step(self) -> None:
        changes = []
        for factor in (1.0, 0.5):
            parameters = self._parameters()
            optimizer = self.make(parameters=parameters)
            for step in range(2):
                _step(optimizer, parameters, step)
            before = _values(parameters)
            for group in optimizer.param_groups:
                group["lr"] = factor * float(group["lr"])
            _step(optimizer, parameters, 2)
            after = _values(parameters)
            changes.append({name: float((after[name] - before[name]).norm()) for name in before})

        for name, whole in changes[0].items():
            assert changes[1][name] <= 0.75 * whole, (
                f'half of the learning rate changes {name} by {changes[1][name]:.4g} instead of {whole:.4g}; read "lr" '
                "from the parameter group at each step, where the schedule puts it"
            )

    def test_updates_are_as_large_as_it_says(self) -> None:
        sizes, plain = self._first_update()
        _, steep = self._first_update(gradient=100.0)
        _, large = self._first_update(parameter=4.0)

        for name, size in sizes.items():
            if size is None:
                continue
            assert size in get_args(UpdateSize), (
                f"update_size is {size!r}, and must be one of {', '.join(map(repr, get_args(UpdateSize)))}"
            )
            for what, factor, changed, follows in (
                ("gradients", 100.0, steep, size == "gradient"),
                ("parameters", 4.0, large, size == "parameter"),
            ):
                grown, expected = changed[name] / max(plain[name], 1e-30), factor if follows else 1.0
                assert 0.7 * expected < grown < 1.4 * expected, (
                    f"update_size is {size!r}, and with {what} {factor:g} times as large, the first update of {name} "
                    f"is {grown:.3g} times as large instead of {expected:g}"
                )

    def test_bears_a_learning_rate_of_zero(self) -> None:
        parameters = self._parameters()
        optimizer = self.make(parameters=parameters)
        for group in optimizer.param_groups:
            group["lr"] = 0.0

        try:
            for step in range(2):
                _step(optimizer, parameters, step)
        except ArithmeticError as error:
            raise AssertionError(f"step raises {error!r} while a schedule keeps the learning rate at 0") from error

        for name, value in _values(parameters).items():
            assert torch.isfinite(value).all(), f"a step with the learning rate 0 leaves {name} with non-finite values"

    def test_leaves_parameters_without_a_gradient_alone(self) -> None:
        parameters = self._parameters()
        skipped = parameters[2::3] or parameters[:1]
        before = _values(skipped)
        optimizer = self.make(parameters=parameters)

        for step in range(2):
            _step(optimizer, [entry for entry in parameters if entry not in skipped], step)

        _assert_equal(before, _values(skipped), "step changes {name}, which has no gradient")
        _step(optimizer, parameters, 2)
        for entry in skipped:
            assert not torch.equal(entry.parameter.detach(), before[entry.name]), (
                f"{entry.name} does not change when it gets its first gradient later than others"
            )

    @each_dtype
    def test_keeps_its_state_by_parameter(self, dtype: torch.dtype) -> None:
        parameters = self._parameters(dtype)
        optimizer = self.make(parameters=parameters)

        _step(optimizer, parameters, 0)

        unknown = set(optimizer.state) - {entry.parameter for entry in parameters}
        assert not unknown, (
            f"optimizer.state has {len(unknown)} keys that are no parameters; only state[parameter] is saved"
        )
        for entry in parameters:
            for slot, value in optimizer.state.get(entry.parameter, {}).items():
                assert isinstance(slot, str) and slot and "." not in slot, (  # noqa: PT018 – one sentence for all
                    f"the state of {entry.name} has the key {slot!r}; only strings without dots can be saved by name"
                )
                assert value is None or isinstance(value, (torch.Tensor, bool, int, float, str)), (
                    f"the state {slot!r} of {entry.name} is a {type(value).__name__}; only tensors, numbers and "
                    "strings can be saved"
                )

    def test_resumes_bit_identical(self) -> None:
        parameters = self._parameters()
        optimizer = self.make(parameters=parameters)
        steps = self._steps()
        half = steps // 2 + 1  # in the midst of what takes an even number of steps
        for step in range(half):
            _step(optimizer, parameters, step)

        resumed = [
            NamedParameter(entry.name, nn.Parameter(entry.parameter.detach().clone()), entry.role)
            for entry in parameters
        ]
        fresh = self.make(parameters=resumed)
        for old, new in zip(parameters, resumed, strict=True):
            for slot, value in optimizer.state.get(old.parameter, {}).items():
                fresh.state[new.parameter][slot] = value.clone() if isinstance(value, torch.Tensor) else value
        for step in range(half, half + steps):
            _step(optimizer, parameters, step)
            _step(fresh, resumed, step)

        _assert_equal(
            _values(parameters),
            _values(resumed),
            "{name} differs after a resume: something that affects later steps is not in optimizer.state[parameter]",
        )
        _assert_equal(
            _evaluation_weights(optimizer),
            _evaluation_weights(fresh),
            "the evaluation weights of {name} differ after a resume: something is not in optimizer.state[parameter]",
        )

    def test_leaves_out_a_step_if_it_says_so(self) -> None:
        parameters, plain = self._parameters(), self._parameters()
        optimizer, other = self.make(parameters=parameters), self.make(parameters=plain)
        if not getattr(optimizer, "leaves_out", False):
            pytest.skip("it does not state leaves_out")
        for step in range(6):
            if step in (0, 3):
                state = _tensors_of_state(optimizer, parameters)
                _step(optimizer, parameters, step, left_out=1.0)
                _assert_equal(_values(plain), _values(parameters), "a step that is left out changes {name}")
                after = _tensors_of_state(optimizer, parameters)
                _assert_equal(state, after, "a step that is left out changes the state {name}")
            _step(optimizer, parameters, step, left_out=0.0)
            _step(other, plain, step)
            _assert_equal(_values(plain), _values(parameters), "with left_out = 0, {name} is another than without it")

    def test_scales_gradients_if_it_says_so(self) -> None:
        parameters, plain = self._parameters(), self._parameters()
        optimizer, other = self.make(parameters=parameters), self.make(parameters=plain)
        if not getattr(optimizer, "scales_gradients", False):
            pytest.skip("it does not state scales_gradients")
        for step in range(4):
            factor = 1 / (1 + 2 * step)
            _step(optimizer, parameters, step, gradient_scale=factor)
            _step(other, plain, step, times=factor)
        expected = _values(plain) | _tensors_of_state(other, plain)
        found = _values(parameters) | _tensors_of_state(optimizer, parameters)
        for name, value in expected.items():
            assert torch.allclose(value, found[name], rtol=1e-5, atol=1e-7), (
                f"with gradient_scale, {name} is another than with gradients that are scaled before the step"
            )

    def test_evaluation_weights_are_those_of_its_parameters(self) -> None:
        parameters, plain = self._parameters(), self._parameters()
        optimizer: Any = self.make(parameters=parameters)
        other = self.make(parameters=plain)
        if not hasattr(optimizer, "evaluation_weights"):
            pytest.skip("it has no evaluation_weights")
        known = {entry.name: entry.parameter for entry in parameters}
        names = [*optimizer.evaluation_weights()]
        assert not optimizer.state, "evaluation_weights makes state; it must change nothing"
        for step in range(4):
            _step(optimizer, parameters, step)
            _step(other, plain, step)
            before = _values(parameters)
            weights = optimizer.evaluation_weights()
            assert [*weights] == names, (
                f"evaluation_weights has {', '.join(weights) or 'no names'} after a step, and had "
                f"{', '.join(names) or 'none'} before the first one; the names must be the same each time"
            )
            for name, weight in weights.items():
                assert name in known, f"evaluation_weights has {name!r}, which is the name of no parameter it was given"
                _assert_is_like(name, weight, known[name])
            kept = {name: weight.clone() for name, weight in weights.items()}
            _assert_equal(kept, dict(optimizer.evaluation_weights()), "asked again, it has other weights for {name}")
            _assert_equal(before, _values(parameters), "evaluation_weights changes {name}")
            _assert_equal(
                _values(plain), before, "{name} is trained to another value where evaluation_weights is asked for"
            )

    def test_updates_shards_like_whole_tensors(self, tmp_path: Path) -> None:
        """``DTensor`` parameters on a mesh of one rank."""
        meeting = (tmp_path / "meeting").as_uri()
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        try:
            _compare_sharded_with_whole(self)
        finally:
            dist.destroy_process_group()

    def test_updates_shards_like_whole_tensors_on_two_ranks(self) -> None:
        reports = on_ranks(type(self), "_compare_with_another_rank", 2)

        # A rank that has lost its connection to one that failed a check has less to say than that one.
        found = [sentence for sentence, _ in reports if sentence] + [other for _, other in reports if other]
        assert not found, f"on two ranks: {found[0]}"

    def _compare_with_another_rank(self) -> tuple[str, str]:
        """On one of two ranks: what a check says, or what else went wrong."""
        torch.set_num_threads(1)
        try:
            _compare_sharded_with_whole(self)
        except AssertionError as error:
            return str(error), ""
        except Exception:  # noqa: BLE001 – the test shows any error
            return "", traceback.format_exc()
        return "", ""

    def _first_update(
        self, *, gradient: float = 1.0, parameter: float = 1.0
    ) -> tuple[dict[str, str | None], dict[str, float]]:
        """What the optimizer says of each parameter's updates, and the norm of the first, without decay.

        Args:
            gradient: times as large gradients.
            parameter: times as large parameters.
        """
        parameters = self._parameters()
        generator = torch.Generator().manual_seed(0)
        for entry in parameters:
            entry.parameter.data.mul_(parameter)
            entry.parameter.grad = gradient * torch.randn(entry.parameter.shape, generator=generator)
        before, optimizer = _values(parameters), self.make(parameters=parameters)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        optimizer.step()
        after = _values(parameters)
        sizes = {
            id(one): getattr(member, "update_size", None)
            for member in members_of(optimizer)
            for group in member.param_groups
            for one in group["params"]
        }
        return (
            {entry.name: sizes[id(entry.parameter)] for entry in parameters},
            {name: float((after[name] - before[name]).norm()) for name in before},
        )

    def _steps(self) -> int:
        return max(24, self.period)

    def _parameters(self, dtype: torch.dtype = torch.float32) -> list[NamedParameter]:
        return _parameters(self.roles, dtype)


def _compare_sharded_with_whole(case: OptimizerConformance) -> None:
    """So many steps on plain tensors and on ``DTensor``s of the same values, over all ranks of the process group; and
    some more of each with the state of the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    steps, whole = case._steps(), case._parameters()
    sharded = _sharded(whole, mesh)
    optimizers = case.make(parameters=whole), case.make(parameters=sharded)
    for step in range(steps):
        _step(optimizers[0], whole, step)
        _step(optimizers[1], sharded, step, mesh)

    pieces = f"sharded over {mesh.size()} ranks differs by {{error:.2g}} from the same parameter in one piece"
    _assert_close(whole, sharded, 4e-7 * steps, f"{{name}} {pieces} after {steps} steps")
    for shard in sharded:
        for slot, value in optimizers[1].state.get(shard.parameter, {}).items():
            if isinstance(value, torch.Tensor):
                _assert_can_be_saved(optimizers[1], shard, slot, value)
    of_whole, of_shards = (_evaluation_weights(optimizer) for optimizer in optimizers)
    for shard in sharded:
        if shard.name in of_shards:
            weight = of_shards[shard.name]
            _assert_is_like(shard.name, weight, shard.parameter)
            error = float((weight.full_tensor() - of_whole[shard.name]).abs().max())  # type: ignore[attr-defined]
            assert error <= 4e-7 * steps, (
                f"the evaluation weights of {shard.name} sharded over {mesh.size()} ranks differ by {error:.2g} from "
                f"those of the same parameter in one piece after {steps} steps"
            )

    others = _plain(sharded), _sharded(whole, mesh)
    resumed = [case.make(parameters=other) for other in others]
    for i, (before, other) in enumerate(zip((sharded, whole), others, strict=True)):
        _read_state(optimizers[1 - i], before, resumed[i], other, mesh)
    for step in range(steps, steps + _AFTER_A_CHANGE):
        _step(optimizers[0], whole, step)
        _step(optimizers[1], sharded, step, mesh)
        _step(resumed[0], others[0], step)
        _step(resumed[1], others[1], step, mesh)
    sentence = "after a resume on {layout}, {{name}} differs by {{error:.2g}} from what it is without"
    tolerance = 4e-7 * (steps + _AFTER_A_CHANGE)
    _assert_close(others[0], sharded, tolerance, sentence.format(layout="one rank, which has all of each parameter"))
    _assert_close(whole, others[1], tolerance, sentence.format(layout=f"{mesh.size()} ranks with parts of parameters"))


def _evaluation_weights(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return dict(optimizer.evaluation_weights()) if isinstance(optimizer, HasEvaluationWeights) else {}


def _assert_is_like(name: str, weight: Any, parameter: Any) -> None:
    assert isinstance(weight, torch.Tensor), f"evaluation_weights has a {type(weight).__name__} for {name}, no tensor"
    assert weight.shape == parameter.shape, (
        f"evaluation_weights has a tensor {tuple(weight.shape)} for {name}, which is {tuple(parameter.shape)}"
    )
    placements, expected = (getattr(one, "placements", "whole") for one in (weight, parameter))
    assert placements == expected, (
        f"evaluation_weights has a tensor {placements} for {name}, which is {expected}; make it with "
        "zeros_like(parameter), so that it is sharded as the parameter is"
    )


def _assert_close(plain: Sequence[NamedParameter], sharded: Sequence[NamedParameter], limit: float, said: str) -> None:
    for one, shard in zip(plain, sharded, strict=True):
        error = float((_whole(shard.parameter.detach()) - one.parameter.detach()).abs().max())
        assert error <= limit, said.format(name=one.name, error=error)


def _read_state(
    before: torch.optim.Optimizer,
    saved: Sequence[NamedParameter],
    fresh: torch.optim.Optimizer,
    here: Sequence[NamedParameter],
    mesh: DeviceMesh,
) -> None:
    """As in a resume: each tensor into one that is laid out as the optimizer has it on this layout."""
    for old, new in zip(saved, here, strict=True):
        for slot, value in before.state.get(old.parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                fresh.state[new.parameter][slot] = value
                continue
            empty = empty_slot(fresh, new.parameter, slot, value.shape, value.dtype)
            assert (empty.shape, empty.dtype) == (value.shape, value.dtype), (
                f"the state {slot!r} of {new.name} has the shape {tuple(value.shape)} and {value.dtype} on one layout, "
                f"and on another empty_state gives {tuple(empty.shape)} and {empty.dtype}; they must be the same on all"
            )
            whole = _whole(value)
            if isinstance(empty, DTensor):
                # on this mesh: tensors may have an equal one that torch remembers, of a group that is gone
                whole = distribute_tensor(whole, mesh, empty.placements)
            fresh.state[new.parameter][slot] = whole.clone()


def _assert_can_be_saved(
    optimizer: torch.optim.Optimizer, entry: NamedParameter, slot: str, value: torch.Tensor
) -> None:
    """State is sharded as its parameter is, or as the optimizer says, or the same on all ranks."""
    parameter: Any = entry.parameter
    empty = empty_slot(optimizer, parameter, slot, value.shape, value.dtype)
    says = isinstance(optimizer, StateLayout)
    if isinstance(value, DTensor) or (says and isinstance(empty, DTensor)):
        found = getattr(value, "placements", "whole"), tuple(value.shape)
        expected = getattr(empty, "placements", "whole"), tuple(empty.shape)
        assert found == expected, (
            f"the state {slot!r} of {entry.name} is sharded as {found[0]} {found[1]}, the parameter as "
            f"{parameter.placements} {tuple(parameter.shape)}; "
            + (f"empty_state gives {expected[0]} {expected[1]}" if says else "an optimizer says by empty_state how")
        )
    if isinstance(value, DTensor):
        return
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, value)
    assert all(torch.equal(value, other) for other in of_ranks), (
        f"the state {slot!r} of {entry.name} is a plain tensor {tuple(value.shape)} that differs between ranks; make "
        "it with zeros_like(parameter), so that it is sharded as the parameter is"
    )


def _sharded(parameters: Sequence[NamedParameter], mesh: DeviceMesh) -> list[NamedParameter]:
    values = [e.parameter.detach().clone() for e in parameters]
    return [
        NamedParameter(e.name, nn.Parameter(distribute_tensor(value, mesh, _placements(e.role))), e.role)
        for e, value in zip(parameters, values, strict=True)
    ]


def _plain(parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
    return [NamedParameter(e.name, nn.Parameter(_whole(e.parameter.detach()).clone()), e.role) for e in parameters]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placements(role: ParameterRole) -> list[Shard]:
    return [Shard(1 if role == "expert" else 0)]


def _parameters(roles: Collection[ParameterRole], dtype: torch.dtype) -> list[NamedParameter]:
    """One parameter of each role, always with the same values."""
    generator = torch.Generator().manual_seed(0)
    return [
        NamedParameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)), role)
        for name, (role, shape) in _SHAPES.items()
        if role in roles
    ]


def _step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[NamedParameter],
    step: int,
    mesh: DeviceMesh | None = None,
    *,
    left_out: float | None = None,
    gradient_scale: float | None = None,
    times: float = 1.0,
) -> None:
    """One step with gradients that depend on the step and on the parameter's name only; NaN in one that is left out.

    Args:
        gradient_scale: what the optimizer is told.
        times: a factor of the gradients.
    """
    optimizer.zero_grad(set_to_none=True)
    if left_out is not None:
        optimizer.left_out = torch.tensor(left_out)  # type: ignore[attr-defined]  # the contract of leaves_out
    if gradient_scale is not None:
        optimizer.gradient_scale = torch.tensor(gradient_scale)  # type: ignore[attr-defined]  # of scales_gradients
    for entry in parameters:
        generator = torch.Generator().manual_seed(1000 * step + list(_SHAPES).index(entry.name))
        gradient = torch.randn(entry.parameter.shape, generator=generator).mul_(times).to(entry.parameter.dtype)
        if left_out:
            gradient.fill_(math.nan)
        entry.parameter.grad = gradient if mesh is None else distribute_tensor(gradient, mesh, _placements(entry.role))
    optimizer.step()


def _values(parameters: Sequence[NamedParameter]) -> dict[str, torch.Tensor]:
    return {entry.name: entry.parameter.detach().clone() for entry in parameters}


def _tensors_of_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[NamedParameter]
) -> dict[str, torch.Tensor]:
    return {
        f"{slot} of {entry.name}": value.clone()
        for entry in parameters
        for slot, value in optimizer.state.get(entry.parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _assert_equal(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], sentence: str) -> None:
    for name, value in before.items():
        assert torch.equal(value, after[name]), sentence.format(name=name)


def _rates(optimizer: torch.optim.Optimizer) -> str:
    return ", ".join(f"{rate:g}" for rate in sorted({float(group["lr"]) for group in optimizer.param_groups}))
