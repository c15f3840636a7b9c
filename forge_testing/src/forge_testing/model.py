"""Conformance of models (contract: ``forge_core.contracts.model``)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, ClassVar, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.contracts.batch import KNOWN, Entry
from forge_core.contracts.loss import IGNORED, LossSum
from forge_core.contracts.model import PARAMETER_ROLES, SHARD_ROLES, Recompute, fits
from forge_core.train.build import cast_parameters
from forge_core.train.initialisation import SeededInitializer
from forge_testing.component_case import ComponentCase
from forge_testing.module_state import (
    assert_forward_is_pure,
    assert_gradients_everywhere,
    assert_initialised,
    build_on_meta,
    materialise,
    snapshot,
)
from forge_testing.observable import ObservableConformance
from forge_testing.small_model import cross_entropy

_PARTS = ("embed", "blocks", "norm", "head")


class ModelConformance(ObservableConformance, ComponentCase):
    """Subclass it, name the component with a small configuration, and pytest runs every check below on it."""

    kind = "model"
    vocab_size: ClassVar[int] = 61
    seq_len: ClassVar[int] = 12
    """Length of the sequences in the checks; at most the model's ``max_seq_len``."""
    learning_rate: ClassVar[float] = 1e-2
    """For the 20 AdamW steps that must lower the loss."""
    takes_documents: ClassVar[bool] = True
    """Whether forward takes ``document`` and ``positions``, for packed sequences."""
    entries: ClassVar[Mapping[str, Entry]] = {}
    """What else batches have, with sizes. Forward is given it in every check."""

    further_roles: ClassVar[Collection[str]] = ()
    """Roles of parameters and modules that the package brings, beside those of ``forge_core.contracts.model``."""

    def build_model(self, seed: int = 0) -> Any:
        """Build on meta, materialise and initialise, as the engine does."""
        return self._initialised(seed)

    # -- what it declares

    def test_declares_its_parts(self) -> None:
        model = self._on_meta()

        for part in _PARTS:
            assert isinstance(getattr(model, part, None), nn.Module), f"the whole model must have the module {part!r}"
        assert isinstance(model.blocks, nn.ModuleDict), "blocks must be an nn.ModuleDict"
        keys = list(model.blocks)
        assert keys == [str(layer) for layer in range(len(keys))], (
            f"the keys of blocks must be the global layer indices 0, 1, …, got {keys}"
        )
        assert keys, "blocks is empty"
        further = _further_parts(model)
        for part, stage in further.items():
            assert isinstance(getattr(model, part, None), nn.Module), f"stage_of: the model has no module {part!r}"
            assert part not in _PARTS, f"stage_of: {part!r} has its place already"
            assert stage in ("first", "last"), f"stage_of gives {part!r} the unknown stage {stage!r}"
        known = (*_PARTS, *further)
        outside = [name for name, _ in model.named_parameters() if name.partition(".")[0] not in known]
        assert not outside, (
            f"{', '.join(outside)}: parameters outside of embed, blocks, norm, head and the parts in stage_of are in "
            "no stage"
        )

    def test_units_are_called_with_hidden_states(self) -> None:
        model = self.build_model().eval()
        if not hasattr(model, "units"):
            pytest.skip("the model has no units beside its blocks")
        modules, called = dict(model.named_modules()), set()

        def see(name: str) -> Any:
            def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                given = next(iter(args), None)
                is_hidden = torch.is_tensor(given) and given.is_floating_point()
                assert is_hidden, f"the unit {name} must be called with hidden states as its first positional argument"
                assert torch.is_tensor(hidden), f"the unit {name} must give hidden states, got {type(output).__name__}"
                called.add(name)

            return after

        names = list(model.units())
        for name in names:
            assert name in modules, f"units names {name!r}, which is no module of the model"
            owners = {"blocks", *names} & {name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)}
            assert not owners, f"the unit {name} is in {', '.join(sorted(owners))}, and must stand beside it"
            modules[name].register_forward_hook(see(name))
        with torch.no_grad():
            model(self.tokens(), **self.inputs())
        assert called == set(names), f"forward does not call the units {', '.join(sorted(set(names) - called))}"

    def test_states_its_sizes(self) -> None:
        model = self._on_meta()

        assert model.vocab_size == self.vocab_size, f"vocab_size must be {self.vocab_size}, got {model.vocab_size}"
        shape = tuple(model.head.weight.shape)
        assert shape[0] == self.vocab_size, f"head.weight must be (V, D) with V = {self.vocab_size}, got {shape}"
        longest = model.max_seq_len
        assert isinstance(longest, int), f"max_seq_len must be an int, got {type(longest).__name__}"
        assert longest >= self.seq_len, f"max_seq_len is {longest}; set seq_len of this test class to at most that"

    def test_parameter_roles_cover_every_parameter(self) -> None:
        _assert_roles(self._on_meta(), (*PARAMETER_ROLES, *self.further_roles))

    def test_parallel_plan_names_modules(self) -> None:
        model = self._on_meta()
        modules = [name for name, _ in model.named_modules()]

        for pattern, role in model.parallel_plan().items():
            assert any(fits(name, pattern) for name in modules), f"parallel_plan: {pattern!r} matches no module"
            known = (*SHARD_ROLES, *self.further_roles)
            assert role in known, f"parallel_plan gives {pattern!r} the unknown role {role!r}"

    def test_recompute_plan_names_operations(self) -> None:
        for operation, choice in self._on_meta().recompute_plan().items():
            namespace, _, name = operation.partition(".")
            known = hasattr(getattr(torch.ops, namespace), name) if name else False
            assert known, f"recompute_plan names {operation!r}, which torch does not have; write as in 'aten.mm'"
            assert choice in get_args(Recompute), f"recompute_plan says {choice!r} for {operation!r}"

    def test_flops_per_token_is_plausible(self) -> None:
        model = self._on_meta()
        short, long = (model.flops_per_token(length) for length in (self.seq_len, 2 * self.seq_len))

        head = 6 * model.head.weight.numel()
        assert short > head, (
            f"flops_per_token is {short:.4g}, less than the head alone takes forward and backward ({head:.4g})"
        )
        assert long >= short, f"flops_per_token falls with the sequence's length: {short:.4g} to {long:.4g}"

    # -- initial values

    def test_init_weights_fills_everything(self) -> None:
        model = self._on_meta()
        materialise(model)
        rng = SeededInitializer(0)
        model.init_weights(rng)

        assert_initialised(model, rng)

    def test_same_seed_same_weights(self) -> None:
        torch.manual_seed(1)
        first = snapshot(self._initialised(seed=0))
        torch.manual_seed(2)
        second, other = snapshot(self._initialised(seed=0)), snapshot(self._initialised(seed=1))

        for name in first:
            assert torch.equal(first[name], second[name]), (
                f"{name} differs between two models of one seed; init_weights must use the generator that it is given"
            )
        assert any(not torch.equal(first[name], other[name]) for name in first), "another seed gives the same weights"

    def test_a_stage_has_the_weights_of_the_whole(self) -> None:
        whole = snapshot(self._initialised())

        last = self._on_meta()
        _drop(last, "embed", *_parts_at(last, "first"), *list(last.blocks)[:-1])
        materialise(last)
        last.init_weights(SeededInitializer(0))

        for name, value in snapshot(last).items():
            # a tied head has a name of its own only where the embedding is not
            assert name not in whole or torch.equal(value, whole[name]), (
                f"{name} differs when the model holds only its last block, norm and head; init_weights must give every "
                "tensor under its own name"
            )

    # -- what it computes

    def test_logits_have_the_right_shape(self) -> None:
        logits = self.build_model()(self.tokens(), **self.inputs())

        expected = (2, self.seq_len, self.vocab_size)
        assert tuple(logits.shape) == expected, f"logits must be (B, S, V) = {expected}, got {tuple(logits.shape)}"
        assert torch.isfinite(logits).all(), "the logits have values that are not finite"

    def test_is_causal(self) -> None:
        model = self.build_model().eval()
        tokens = self.tokens()
        other = tokens.clone()
        place = self.seq_len // 2
        other[:, place] = (other[:, place] + 1) % self.vocab_size

        difference = (model(other, **self.inputs()) - model(tokens, **self.inputs())).abs().amax(dim=(0, 2))

        early = difference[:place].max().item()
        assert early < 1e-5, (
            f"changing token {place} changes logits before it (by {early:.3g}): the model sees the future"
        )
        assert difference[place] > 0, f"changing token {place} does not change the logits there"

    def test_loss_is_applied_to_its_hidden_states(self) -> None:
        model = self.build_model().eval()
        tokens, targets = self.tokens(), self._targets()

        result = model(tokens, targets=targets, loss=cross_entropy, **self.inputs())
        logits = model(tokens, **self.inputs())

        assert isinstance(result, LossSum), f"with a loss, forward must return its LossSum, got {type(result).__name__}"
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        torch.testing.assert_close(
            result.total,
            expected,
            rtol=1e-5,
            atol=1e-4,
            msg=f"forward with a loss gives {result.total.item():.6f}, the loss of its own logits is "
            f"{expected.item():.6f}; the loss must see the normed hidden states and self.head",
        )

    def test_documents_do_not_see_each_other(self) -> None:
        if not self.takes_documents:
            pytest.skip("the model says that it takes no documents")
        model = self.build_model().eval()
        tokens, cut = self.tokens(), self.seq_len // 3
        document = (torch.arange(self.seq_len) >= cut).long().expand(2, -1)
        positions = torch.cat([torch.arange(cut), torch.arange(self.seq_len - cut)]).expand(2, -1)

        packed = model(tokens, document=document, positions=positions, **self.inputs())
        parts = [model(tokens[:, part], **self.inputs(part)) for part in (slice(cut), slice(cut, None))]
        alone = torch.cat(parts, dim=1)

        difference = (packed - alone).abs().max().item()
        assert difference < 1e-4, (
            f"two documents packed into one sequence give other logits than each alone (by {difference:.3g}); "
            "attention must keep to equal document ids, and positions must be used where they are given"
        )

    def test_stages_chained_equal_the_whole(self) -> None:
        whole = self.build_model().eval()
        first, last = copy.deepcopy(whole), copy.deepcopy(whole)
        keys = list(whole.blocks)
        cut = (len(keys) + 1) // 2
        _drop(first, "norm", "head", *_parts_at(first, "last"), *keys[cut:])
        _drop(last, "embed", *_parts_at(last, "first"), *keys[:cut])
        tokens, targets = self.tokens(), self._targets()

        sent = first(tokens, **self.inputs())
        hidden, along = self._received(first, sent)
        chained = last(hidden, **self.inputs(), **along)

        expected = whole(tokens, **self.inputs())
        assert hidden.shape[:2] == tokens.shape, (
            f"a stage without head must return hidden states (B, S, D), got {tuple(hidden.shape)}"
        )
        difference = (chained - expected).abs().max().item()
        assert difference < 1e-4, f"two stages in a row give other logits than the whole model (by {difference:.3g})"
        loss = last(hidden, targets=targets, loss=cross_entropy, **self.inputs(), **along)
        torch.testing.assert_close(
            loss.total,
            whole(tokens, targets=targets, loss=cross_entropy, **self.inputs()).total,
            msg="the last stage gives another loss than the whole model",
        )
        for stage in (first, last):
            _assert_roles(stage, (*PARAMETER_ROLES, *self.further_roles))

    def test_works_in_bf16(self) -> None:
        tokens, targets = self.tokens(), self._targets()
        inputs = self.inputs()
        full = self.build_model().eval()(tokens, targets=targets, loss=cross_entropy, **inputs).total.item()

        model = cast_parameters(self.build_model(), torch.bfloat16).eval()
        inputs = {name: one.bfloat16() if one.is_floating_point() else one for name, one in inputs.items()}
        logits = model(tokens, **inputs)
        half = model(tokens, targets=targets, loss=cross_entropy, **inputs).total.item()

        assert logits.dtype == torch.bfloat16, f"with bf16 weights the logits are {logits.dtype}; something is cast up"
        assert abs(half - full) < 0.05 * full, f"the loss is {half:.4f} in bf16 and {full:.4f} in fp32"

    def test_cache_gives_the_logits_of_the_whole(self) -> None:
        model = self.build_model().eval()
        if not hasattr(model, "make_cache"):
            pytest.skip("the model has no make_cache")
        tokens = self.tokens()
        half = self.seq_len // 2
        parts = [slice(*ends) for ends in pairwise([0, half, *range(half + 2, self.seq_len + 1)])]

        with torch.no_grad():
            expected = model(tokens, **self.inputs())
            cache = model.make_cache(2, self.seq_len)
            cached = torch.cat([model(tokens[:, part], cache=cache, **self.inputs(part)) for part in parts], dim=1)

        difference = (cached - expected).abs().max().item()
        assert difference < 1e-4, (
            f"feeding the sequence in chunks through a cache changes the logits by {difference:.3g}"
        )

    def test_left_padding_in_the_cache_is_not_seen(self) -> None:
        model = self.build_model().eval()
        if not hasattr(model, "make_cache"):
            pytest.skip("the model has no make_cache")
        tokens, padding = self.tokens(), 3
        positions = (torch.arange(self.seq_len) - padding).clamp(min=-1).expand(2, -1)

        with torch.no_grad():
            expected = model(tokens[:, padding:], **self.inputs(slice(padding, None)))
            cache = model.make_cache(2, self.seq_len)
            padded = model(tokens, cache=cache, positions=positions, **self.inputs())[:, padding:]

        difference = (padded - expected).abs().max().item()
        assert difference < 1e-4, (
            f"padding on the left (positions −1) changes the logits by {difference:.3g}; nothing may attend to it"
        )

    # -- how it learns

    def test_gradients_reach_every_parameter(self) -> None:
        model = self.build_model().train()

        model(**self.gradients_need(model), loss=cross_entropy).total.backward()

        assert_gradients_everywhere(model)

    def test_forward_changes_only_accumulators(self) -> None:
        model = self.build_model().train()
        before = snapshot(model)

        model(self.tokens(), targets=self._targets(), loss=cross_entropy, **self.inputs()).total.backward()

        assert_forward_is_pure(before, model)

    def test_loss_falls_in_twenty_steps(self) -> None:
        model = self.build_model().train()
        tokens = self.tokens()
        targets = F.pad(tokens[:, 1:], (0, 1), value=IGNORED)
        optimizer = torch.optim.AdamW(model.parameters(), self.learning_rate)

        losses = []
        for _ in range(20):
            result = model(tokens, targets=targets, loss=cross_entropy, **self.inputs())
            mean = result.total / result.count
            mean.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean.item())

        assert losses[-1] < 0.7 * losses[0], (
            f"20 AdamW steps on one batch bring the loss from {losses[0]:.3f} to {losses[-1]:.3f}; hardly anything is "
            "learned"
        )

    def _initialised(self, seed: int = 0) -> Any:
        model = self._on_meta()
        materialise(model)
        model.init_weights(SeededInitializer(seed))
        return model

    def _on_meta(self) -> Any:  # a Model is an nn.Module with more, which a Protocol cannot say
        return build_on_meta(functools.partial(self.make, vocab_size=self.vocab_size))

    def batch(self) -> dict[str, torch.Tensor]:
        """All that forward is given in the checks: ``tokens`` ``(2, S)`` int64, ``targets`` ``(2, S)`` int64, some of
        them −100, and what ``entries`` describe, numbers from 0 to 2; always the same.

        Override it for a model whose entries belong together, such as places in the tokens and what is put there, and
        give ``entries`` the dims of each, by which checks cut it to some positions.
        """
        tokens, targets = (
            torch.randint(self.vocab_size, (2, self.seq_len), generator=torch.Generator().manual_seed(seed))
            for seed in (0, 1)
        )
        targets[:, -2:] = IGNORED
        drawn, generator = {}, torch.Generator().manual_seed(2)
        for name, entry in self.entries.items():
            shape = entry.shape(2, self.seq_len)
            assert None not in shape, (
                f"the entry {name!r} needs a size for each of its dims {entry.dims}, got {entry.sizes}"
            )
            whole = 2 * torch.rand([size or 0 for size in shape], generator=generator)
            drawn[name] = whole.to(getattr(torch, entry.dtype))
        return {"tokens": tokens, "targets": targets, **drawn}

    def gradients_need(self, model: Any) -> dict[str, torch.Tensor]:
        """What forward is given in the check that gradients reach every parameter: by default ``batch()``, with as many
        token ids as there is room for.

        Override it where other entries are needed. It may change values of ``model`` that let no gradient through at
        first, such as those of a gate.
        """
        tokens = torch.arange(2 * self.seq_len).view(2, -1) % self.vocab_size
        return {**self.batch(), "tokens": tokens}

    def tokens(self) -> torch.Tensor:
        """``(2, S)`` int64."""
        return self.batch()["tokens"]

    def _targets(self) -> torch.Tensor:
        """``(2, S)`` int64, some of them −100."""
        return self.batch()["targets"]

    def inputs(self, positions: slice = slice(None)) -> dict[str, torch.Tensor]:
        """What ``batch`` has besides, for these positions of the two sequences."""
        found = {}
        for name, whole in self.batch().items():
            if name not in ("tokens", "targets"):
                described = {**KNOWN, **self.entries}
                assert name in described, f"batch has {name!r}, of which entries says no dims"
                dims = described[name].dims
                found[name] = whole[tuple(positions if dim == "position" else slice(None) for dim in dims)]
        return found

    def _received(self, first: Any, sent: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Hidden states, and what travels beside them, of what a stage has given."""
        shapes = {name: tuple(entry.shape) for name, entry in self.batch().items()}
        declared = first.travels(shapes) if hasattr(first, "travels") else {}
        if not declared:
            assert torch.is_tensor(sent), f"a stage without head must return hidden states, got {type(sent).__name__}"
            return sent, {}
        is_pair = isinstance(sent, tuple) and len(sent) == 2
        assert is_pair, f"a stage without head must return hidden states and what travels, got {type(sent).__name__}"
        hidden, along = sent
        assert along.keys() == declared.keys(), f"travels says {', '.join(declared)}, and {', '.join(along)} is given"
        for name, (shape, _) in declared.items():
            given = tuple(along[name].shape)
            assert given == tuple(shape), f"travels says that {name} is {tuple(shape)}, and it is {given}"
        return hidden, along


def _assert_roles(model: Any, known: Collection[str]) -> None:
    roles, actual = model.parameter_roles(), {name for name, _ in model.named_parameters()}
    forgotten, unknown = sorted(actual - set(roles)), sorted(set(roles) - actual)
    assert not forgotten, f"parameter_roles leaves out {', '.join(forgotten)}"
    assert not unknown, f"parameter_roles names {', '.join(unknown)}, which this stage does not have"
    for name, role in roles.items():
        assert role in known, f"{name} has the unknown role {role!r}"


def _further_parts(model: Any) -> dict[str, str]:
    return dict(model.stage_of()) if hasattr(model, "stage_of") else {}


def _parts_at(model: Any, stage: str) -> list[str]:
    return [name for name, end in _further_parts(model).items() if end == stage]


def _drop(model: Any, *parts: str) -> None:
    """Take parts off a model, as a pipeline split does: names of parts, or keys of blocks."""
    for part in parts:
        if part not in model.blocks:
            setattr(model, part, None)
        else:
            del model.blocks[part]
