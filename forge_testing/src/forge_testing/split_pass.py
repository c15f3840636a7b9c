"""Conformance of split passes (contract: ``forge_core.contracts.parallel_pass.SplitPass``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_core.config.sections import Job, ParallelSection
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh
from forge_core.errors import ConfigError
from forge_core.train.build import materialise
from forge_core.train.executor import PlainExecutor
from forge_testing.component_case import ComponentCase
from forge_testing.module_state import build_on_meta
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import SEQ_LEN, SmallModel, cross_entropy, small_job

_CPU = torch.device("cpu")
_ENDS = ("embed", "norm", "head")

Tensors = Mapping[str, torch.Tensor]


@attrs.frozen
class PartReport:
    """One part of the model."""

    ends: Sequence[str]
    """Which of embedding, norm and head it has."""
    blocks: Sequence[str]
    """Their keys."""
    values: Tensors
    """Parameters by name, as they were initialised."""
    roles: Sequence[str]
    """The names that ``parameter_roles`` gives."""

    def pieces(self) -> list[str]:
        """What it has, in the order in which a batch passes it."""
        before, after = ([end for end in ends if end in self.ends] for ends in (("embed",), ("norm", "head")))
        return [*before, *(f"blocks.{key}" for key in self.blocks), *after]


@attrs.frozen
class RankReport:
    """What one rank has seen; everything is made in one launch."""

    touched: Sequence[str]
    parts: Sequence[PartReport]
    loss: torch.Tensor
    gradients: Tensors
    """After one step."""
    twice: Tensors
    """After the same step once more."""
    evaluated: tuple[torch.Tensor, torch.Tensor]
    disturbed: Sequence[str]
    """Parameters whose gradient evaluation has changed."""
    tied: Sequence[Sequence[str]] | str
    """The names in each part of a model whose head is tied to its embedding, with the names that others lend it, or the
    sentence that refuses it."""
    too_small: str
    """What was raised for a model of one block that is not a refusal; empty if nothing was."""


class SplitPassConformance(ComponentCase):
    """Subclass it at the top level of a file, name the component, and pytest runs every check below on it, on the CPU.

    The model is cut and run on real ranks, which are launched once for all checks of a class.
    """

    kind = "parallel_pass"
    degrees: ClassVar[Mapping[str, int]] = {"pp": 2}
    """The mesh, by axis; as many ranks as they multiply to."""
    microbatches: ClassVar[int] = 4
    """Of a step (``train.grad_accumulation``)."""
    tolerance: ClassVar[float] = 1e-5
    """How far losses and gradients may be from those of the whole model, relative to the largest value of a tensor."""

    def make_model(self, n_layers: int = 4) -> Any:
        """The model that is cut, in the current default device (meta); it keeps the model contract."""
        return SmallModel(n_layers=n_layers)

    def job(self) -> Job:
        """The job that the pass is given."""
        job = small_job()
        degrees: dict[str, Any] = {**self.degrees}
        return attrs.evolve(
            job,
            train=attrs.evolve(job.train, grad_accumulation=self.microbatches),
            parallel=ParallelSection(**degrees, passes={"under_test": self.use()} if self.component else {}),
        )

    # -- how the model is cut

    def test_names_what_each_rank_holds(self) -> None:
        modules = {name for name, _ in build_on_meta(self.make_model).named_modules()}
        for rank, report in enumerate(self.reports()):
            for name in report.touched:
                assert name in modules, f"rank {rank} says that it holds {name!r}, which is not a module of the model"
            for name in (name for part in report.parts for name in part.values):
                owners = {name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)} | {""}
                assert owners & {*report.touched}, f"rank {rank} holds {name}, in no module that it says it holds"

    def test_each_tensor_is_in_one_part_under_its_name(self) -> None:
        held = [name for part in self._parts() for name in part.values]
        whole = [name for name, _ in self._whole().named_parameters()]
        assert sorted({*held}) == sorted(whole), (
            f"the parts together and the whole model differ in {', '.join(sorted({*held} ^ {*whole}))}"
        )
        twice = sorted({name for name in held if held.count(name) > 1})
        assert not twice, f"{', '.join(twice)}: held twice, and trained apart"

    def test_parts_are_pieces_of_the_sequence(self) -> None:
        for rank, report in enumerate(self.reports()):
            firsts = [int(part.blocks[0]) for part in report.parts if part.blocks]
            assert firsts == sorted(firsts), (
                f"rank {rank} gives its parts in the order of blocks {firsts}; a batch passes them in another one"
            )
        pieces = [piece for part in sorted(self._parts(), key=_place) for piece in part.pieces()]
        whole = ["embed", *(f"blocks.{key}" for key in self._whole().blocks), "norm", "head"]
        assert pieces == whole, (
            f"the parts one after the other are {', '.join(pieces)}; the model is {', '.join(whole)}"
        )

    def test_parts_keep_the_model_contract(self) -> None:
        for part in self._parts():
            differing = sorted({*part.roles} ^ part.values.keys())
            assert not differing, f"parameter_roles and the parameters of a part differ in {', '.join(differing)}"

    def test_parts_start_with_the_values_of_the_whole(self) -> None:
        expected = dict(self._whole().named_parameters())
        for part in self._parts():
            for name, value in part.values.items():
                same = name in expected and torch.equal(value, expected[name])
                assert same, f"{name} starts with other values in a part than in the whole model"

    def test_tied_tensors_stay_together_or_are_refused(self) -> None:
        for rank, report in enumerate(self.reports()):
            if isinstance(report.tied, str):
                assert report.tied, f"rank {rank} refuses a model with a tied head without a sentence"
                continue
            for names in report.tied:
                assert "embed.weight" in names or "head.weight" not in names, (
                    f"rank {rank} has head.weight of a model that ties the head to the embedding, in a part without "
                    "the other: they would be trained apart. Raise a ConfigError, or say that it is borrowed"
                )

    def test_a_model_of_one_block_is_cut_or_refused(self) -> None:
        for rank, report in enumerate(self.reports()):
            assert not report.too_small, (
                f"rank {rank}: a model of one block, which may be too small to be cut, raises {report.too_small} "
                "instead of a ConfigError"
            )

    # -- how the parts are run

    def test_a_step_has_the_loss_of_the_whole(self) -> None:
        expected, _ = self._step_of_the_whole()
        losses = [report.loss for report in self.reports()]
        for rank, loss in enumerate(losses):
            got = f"got {loss.dtype} of shape {tuple(loss.shape)}"
            assert (loss.dtype, loss.shape) == (torch.float32, ()), f"rank {rank}: run must give an fp32 scalar, {got}"
        total = sum(loss.item() for loss in losses)
        assert math.isclose(total, expected, rel_tol=self.tolerance), (
            f"the losses of all ranks sum to {total:.6f}, that of the whole model is {expected:.6f}; it is summed over "
            "tokens and microbatches, and not scaled"
        )

    def test_a_step_has_the_gradients_of_the_whole(self) -> None:
        _, expected = self._step_of_the_whole()
        for report in self.reports():
            self._compare(report, report.gradients, expected, "after one step")

    def test_gradients_are_added_up(self) -> None:
        _, expected = self._step_of_the_whole()
        doubled = {name: 2 * gradient for name, gradient in expected.items()}
        for report in self.reports():
            self._compare(report, report.twice, doubled, "after two steps without clearing it")

    def test_evaluates_the_loss_of_the_whole(self) -> None:
        expected, count = PlainExecutor(self._whole(), cross_entropy).evaluate(_batch(seed=100, rows=3))
        evaluated = [report.evaluated for report in self.reports()]
        for rank, (loss, valid) in enumerate(evaluated):
            assert (loss.dtype, valid.dtype) == (torch.float32, torch.int64), (
                f"rank {rank}: evaluate must give an fp32 sum and an int64 count, got {loss.dtype} and {valid.dtype}"
            )
        total, tokens = (sum(one.item() for one in ones) for ones in zip(*evaluated, strict=True))
        assert tokens == count, f"evaluate counts {tokens} valid tokens on all ranks together, and there are {count}"
        assert math.isclose(total, expected.item(), rel_tol=self.tolerance), (
            f"evaluate gives {total:.6f} on all ranks together, and the whole model {expected.item():.6f}"
        )

    def test_evaluation_leaves_gradients_alone(self) -> None:
        for rank, report in enumerate(self.reports()):
            assert not report.disturbed, f"rank {rank}: evaluate changes the gradient of {', '.join(report.disturbed)}"

    # -- the launch

    def reports(self) -> Sequence[RankReport]:
        """What each rank has seen, in their order. Ranks are launched the first time only."""
        found = _REPORTS.get(type(self))
        if found is None:
            try:
                found = on_ranks(type(self), "report", math.prod(self.degrees.values()))
            except AssertionError as error:
                found = error
            _REPORTS[type(self)] = found
        if isinstance(found, AssertionError):
            raise found
        return found

    def report(self) -> RankReport:
        """Cut the model and run it, on the rank that this is."""
        job = self.job()
        context = PassContext(build_mesh(job, _CPU), job, _CPU)
        split: Any = self.make()
        parts, touched = split.split(build_on_meta(self.make_model), context)
        for part in parts:
            materialise(part, _CPU, seed=0)
        held = [_part_report(part) for part in parts]
        executor = split.executor(parts, cross_entropy, context)
        batches, scale = self._step()
        loss = executor.run(batches, scale)
        gradients = _gradients(parts)
        executor.run(batches, scale)
        twice = _gradients(parts)
        evaluated = executor.evaluate(_batch(seed=100, rows=3))
        after = _gradients(parts)
        return RankReport(
            touched=list(touched),
            parts=held,
            loss=loss.detach().clone(),
            gradients=gradients,
            twice=twice,
            evaluated=(evaluated[0].detach().clone(), evaluated[1].clone()),
            disturbed=[name for name in twice if not torch.equal(twice[name], after[name])],
            tied=self._cut_tied(context),
            too_small=self._cut_too_small(context),
        )

    def _cut_tied(self, context: PassContext) -> Sequence[Sequence[str]] | str:
        model: Any = build_on_meta(self.make_model)
        model.head.weight = model.embed.weight
        try:
            parts, _ = self.make().split(model, context)
        except ConfigError as error:
            return str(error)
        names = [[name for name, _ in part.named_parameters(remove_duplicate=False)] for part in parts]
        return [[*own, *getattr(part, "borrowed", {}).values()] for own, part in zip(names, parts, strict=True)]

    def _cut_too_small(self, context: PassContext) -> str:
        try:
            self.make().split(build_on_meta(lambda: self.make_model(n_layers=1)), context)
        except ConfigError as error:
            return "" if str(error) else "an empty ConfigError"
        except Exception as error:  # noqa: BLE001  # any error is told
            return f"{type(error).__name__}: {error}"
        return ""

    # -- what it is compared with

    def _parts(self) -> list[PartReport]:
        return [part for report in self.reports() for part in report.parts]

    def _whole(self) -> Any:
        model = build_on_meta(self.make_model)
        materialise(model, _CPU, seed=0)
        return model

    def _step(self) -> tuple[list[Tensors], torch.Tensor]:
        batches: list[Tensors] = [_batch(seed) for seed in range(self.microbatches)]
        valid = sum(int((batch["targets"] != IGNORED).sum()) for batch in batches)
        return batches, torch.tensor(1 / valid)

    def _step_of_the_whole(self) -> tuple[float, Tensors]:
        model = self._whole()
        loss = PlainExecutor(model, cross_entropy).run(*self._step())
        return loss.item(), _gradients([model])

    def _compare(self, report: RankReport, gradients: Tensors, expected: Tensors, when: str) -> None:
        for name in (name for part in report.parts for name in part.values):
            assert name in gradients, f"no gradient reaches {name}"
            error = ((gradients[name] - expected[name]).abs().max() / expected[name].abs().max()).item()
            assert error <= self.tolerance, (
                f"the gradient of {name} {when} is off by {error:.3g} of its largest value; tolerance says "
                f"{self.tolerance:g}. It is that of scale times the summed loss"
            )


_REPORTS: dict[type, Sequence[RankReport] | AssertionError] = {}


def _batch(seed: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """Two documents in each row, at the end of which a number of targets that depends on ``seed`` is not to be
    learned."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(32, (rows, SEQ_LEN), generator=generator) for _ in range(2))
    targets[:, SEQ_LEN - seed % 3 :] = IGNORED
    document = (torch.arange(SEQ_LEN) >= 3).long().expand(rows, -1).contiguous()
    positions = torch.tensor([*range(3), *range(SEQ_LEN - 3)]).expand(rows, -1).contiguous()
    return {"tokens": tokens, "targets": targets, "document": document, "positions": positions}


def _part_report(part: Any) -> PartReport:
    return PartReport(
        ends=[end for end in _ENDS if getattr(part, end) is not None],
        blocks=list(part.blocks),
        values={canonical_name(name): _full(p.detach()).clone() for name, p in part.named_parameters()},
        roles=[canonical_name(name) for name in part.parameter_roles()],
    )


def _place(part: PartReport) -> tuple[int, float]:
    """Of a part along the sequence."""
    if part.blocks:
        return 1, int(part.blocks[0])
    return (0, 0) if "embed" in part.ends else (2, 0)


def _gradients(parts: Sequence[nn.Module]) -> Tensors:
    named = [(canonical_name(name), p.grad) for part in parts for name, p in part.named_parameters()]
    return {name: _full(gradient).clone() for name, gradient in named if gradient is not None}


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
