"""Conformance of passes (contract: ``forge_core.contracts.parallel_pass``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.config.sections import Job, Precision
from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.train.build import materialise
from forge_testing.component_case import ComponentCase
from forge_testing.module_state import build_on_meta
from forge_testing.small_model import SEQ_LEN, SmallModel, cross_entropy, small_job

_PARTS = ("embed", "blocks", "norm", "head")


class ParallelPassConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it, on one rank on the CPU."""

    kind = "parallel_pass"
    precision: ClassVar[Precision] = "fp32"
    """``train.precision`` of the job that the pass is given."""
    tolerance: ClassVar[float] = 1e-5
    """How far loss and gradients may be from those without the pass, relative to the largest value of a tensor."""
    changes_parameters: ClassVar[bool] = False
    """Whether the pass adds, removes or replaces parameters by design (adapters do)."""

    @pytest.fixture(autouse=True)
    def _one_rank(self) -> Iterator[None]:
        join_process_group(torch.device("cpu"))
        yield
        dist.destroy_process_group()

    def make_model(self) -> Any:
        """The model that the pass is tried on, in the current default device (meta); it keeps the model contract."""
        return SmallModel()

    def job(self) -> Job:
        """The job that the pass is given."""
        uses = {"under_test": self.use()} if self.component else {}
        job = small_job(passes=uses)
        return attrs.evolve(job, train=attrs.evolve(job.train, precision=self.precision))

    def apply(self, seed: int = 0) -> tuple[Any, Sequence[str]]:
        """Build on meta, apply the pass, materialise and initialise, as the engine does."""
        device, job = torch.device("cpu"), self.job()
        model = build_on_meta(self.make_model)
        under_test = self.make()
        if hasattr(under_test, "add"):
            under_test.add(model)
        model, touched = under_test.apply(model, PassContext(build_mesh(job, device), job, device))
        materialise(model, device, seed)
        return model, touched

    def test_names_what_it_touched(self) -> None:
        model, touched = self.apply()

        assert touched, "the pass touched nothing; the engine refuses that"
        modules = {canonical_name(name) for name, _ in model.named_modules()}
        for name in touched:
            assert name in modules, f"the pass says that it touched {name!r}, which is not a module of the model"

    def test_the_model_keeps_its_declarations(self) -> None:
        model, _ = self.apply()

        for part in _PARTS:
            assert isinstance(getattr(model, part, None), nn.Module), (
                f"the transformed model has no module {part!r} any more, which later passes and the engine look for"
            )
        keys, expected = list(model.blocks), list(self._untouched().blocks)
        assert keys == expected, f"the keys of blocks are {keys} after the pass, and were {expected}"
        names = {canonical_name(name) for name, _ in model.named_parameters()}
        roles = {canonical_name(name) for name in model.parameter_roles()}
        assert roles == names, f"parameter_roles and the parameters differ in {', '.join(sorted(roles ^ names))}"

    def test_parameters_keep_their_names_and_shapes(self) -> None:
        if self.changes_parameters:
            pytest.skip("the pass says that it changes parameters")
        model, _ = self.apply()

        before = {name: tuple(p.shape) for name, p in build_on_meta(self.make_model).named_parameters()}
        after = {canonical_name(name): tuple(p.shape) for name, p in model.named_parameters()}
        assert set(after) == set(before), (
            f"the pass renames, adds or removes {', '.join(sorted(set(after) ^ set(before)))}; checkpoints and "
            "optimizers know parameters by name"
        )
        for name, shape in before.items():
            assert after[name] == shape, f"{name} has the global shape {after[name]} after the pass, and had {shape}"

    def test_parameters_keep_their_initial_values(self) -> None:
        if self.changes_parameters:
            pytest.skip("the pass says that it changes parameters")
        model, _ = self.apply()

        expected = dict(self._untouched().named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(_full(parameter.detach()), expected[canonical_name(name)]), (
                f"{name} starts with other values than without the pass"
            )

    def test_computes_the_same(self) -> None:
        model, _ = self.apply()
        plain = self._untouched()

        loss, expected = _train_once(model), _train_once(plain)

        error = abs(loss - expected) / expected
        assert error <= self.tolerance, (
            f"the loss is {loss:.7f} with the pass and {expected:.7f} without; tolerance says {self.tolerance:g}"
        )
        references = {name: parameter.grad for name, parameter in plain.named_parameters()}
        gradients = {canonical_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
        for name in gradients:
            assert gradients[name] is not None, f"no gradient reaches {name} with the pass"
        for name in gradients.keys() & references.keys():
            reference, gradient = references[name], _full(gradients[name]).float()
            error = ((gradient - reference).abs().max() / reference.abs().max()).item()
            assert error <= self.tolerance, (
                f"the gradient of {name} is off by {error:.3g} of its largest value; tolerance says {self.tolerance:g}"
            )

    def test_evaluates_as_it_trains(self) -> None:
        model, _ = self.apply()
        tokens, targets = _batch()

        trained = _train_once(model)
        with torch.no_grad():
            evaluated = model.eval()(tokens, targets=targets, loss=cross_entropy).total.item()

        assert abs(evaluated - trained) <= max(self.tolerance, 1e-6) * abs(trained), (
            f"the loss is {trained:.7f} in training and {evaluated:.7f} in evaluation"
        )

    def _untouched(self) -> Any:
        model = build_on_meta(self.make_model)
        materialise(model, torch.device("cpu"), seed=0)
        return model


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(32, (2, SEQ_LEN), generator=generator) for _ in range(2))
    return tokens, targets


def _train_once(model: Any) -> float:
    tokens, targets = _batch()
    result = model.train()(tokens, targets=targets, loss=cross_entropy)
    result.total.backward()
    total: float = result.total.item()
    return total


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
