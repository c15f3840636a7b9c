"""From a job to a model on its mesh: build on meta, apply passes, materialise, initialise by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import nn

from forge_core.checkpoint.state_dict import model_tensors, named_parameters
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.batch import Entry
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.data_source import Source
from forge_core.contracts.executor import Executor
from forge_core.contracts.model import ParameterRole, canonical_name
from forge_core.contracts.optimizer import NamedParameter
from forge_core.contracts.parallel_pass import ParallelPass, PassContext, SplitPass
from forge_core.contracts.phase_plan import KnownParameters, PhasePlan
from forge_core.errors import ConfigError, PluginError, and_more, noting
from forge_core.ops.auxiliary_loss import LEDGER
from forge_core.ops.local_tensor import local_tensor
from forge_core.ops.partial_gradients import PartialGradients
from forge_core.ops.sequence_sum import share_out_positions
from forge_core.train.component_checks import CheckedLoss
from forge_core.train.executor import Batch, PlainExecutor
from forge_core.train.initialisation import initialise
from forge_core.train.parametrization import SizedParameters, with_multipliers


@attrs.frozen
class AppliedPass:
    """The trace of a pass, for ``--dry-run``."""

    use: ComponentRef
    touched: Sequence[str]


@attrs.frozen
class BuiltModel:
    """This rank's parts of the model, on their device, with their first values."""

    parts: Sequence[nn.Module]
    applied: Sequence[AppliedPass]
    roles: Mapping[str, ParameterRole]
    """Roles of every parameter of the whole model."""
    known: KnownParameters
    """Every parameter of the whole model."""
    parameters: Mapping[str, nn.Parameter]
    """This rank's, by their names in the whole model, as the optimizer updates them. While FSDP has a unit gathered,
    the modules hold others."""
    flops_per_token: float
    """FLOPs of the whole model, forward and backward."""
    executor: Executor
    partial_gradients: PartialGradients
    loss: CheckedLoss
    """The loss that the executor computes."""
    sized: SizedParameters | None
    """The parameters of the whole model beside those of its base, with a parametrization."""

    def run(self, microbatches: Sequence[Batch], scale: torch.Tensor) -> torch.Tensor:
        """Run forward and backward of a step, as ``Executor.run``. Afterwards gradients are whole."""
        total = self.executor.run(microbatches, scale)
        self.partial_gradients.sum()
        return total

    @property
    def n_parameters(self) -> int:
        """Elements of the whole model's; a tied one counts once."""
        return sum(self.known.sizes.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the model that this rank saves, by key."""
        return model_tensors(self.parameters, self.parts)


@attrs.frozen
class Built:
    """Everything that is trained."""

    model: BuiltModel
    optimizer: torch.optim.Optimizer
    phases: PhasePlan


def build_model(
    context: PassContext,
    vocab_size: int,
    passes: Sequence[ComponentRef],
    build: ComponentBuilder,
    *,
    fill: Callable[[nn.Module, torch.device, int], None] | None = None,
) -> BuiltModel:
    """The model of a job, cut, sharded, materialised and initialised.

    Args:
        context: as passes are given it.
        vocab_size: the model's, as ``choose_vocab_size`` gives it.
        passes: in the order in which they are applied.
        fill: gives a part its memory and values; by default ``materialise``.

    Raises:
        ConfigError: a pass was asked for and finds nothing to do.
        PluginError: the model leaves a tensor uninitialised, or declares less than the contract asks.
    """
    job, device = context.job, context.device
    LEDGER.start_run()
    share_out_positions(None)
    model: Any = build_on_meta(job, vocab_size, build)
    built = _with_added(model, passes, build)
    _refuse_entries(model, context.entries, job.model.qualified_name)
    roles, flops = model.parameter_roles(), model.flops_per_token(job.train.seq_len)
    known_parameters = KnownParameters.of(model)
    sized = None if job.parametrization is None else SizedParameters(job, build, roles, model, vocab_size)
    parts: list[nn.Module] = [model]
    known = _all_names(parts)
    split: SplitPass | None = None
    on_host = False
    applied = []
    for use, one in built:
        on_host |= getattr(one, "parameters_on_host", False)
        if hasattr(one, "split"):
            if split is not None:
                raise ConfigError(f"parallel.passes.{use.name}: another pass has cut the model; keep one of them")
            split = one
            [*parts], touched = one.split(model, context)
        else:
            with noting(f"raised by {build.words_for(use)}"):
                parts, touched = _apply(one, parts, context)
        _refuse_renaming(known, _all_names(parts), is_split=split is one, words=build.words_for(use))
        if not touched and split in (None, one):  # one pipeline stage may have nothing that another has
            raise ConfigError(f"parallel.passes.{use.name}: it found nothing to do on this model; take it out")
        applied.append(AppliedPass(use, touched))
        known = _all_names(parts)
    if fill is None:
        _refuse_too_large(parts, torch.device("cpu") if on_host else device)
        fill = partial(materialise, on_host=on_host, scales=sized.initial_scales() if sized else {})
    for part in parts:
        fill(part, device, job.train.seed)
    loss = CheckedLoss(build(job.loss), build.words_for(job.loss), context.entries)
    loss.refuse_model(model, job.model.qualified_name, context.entries)
    executor = split.executor(parts, loss, context) if split else PlainExecutor(parts[0], loss)
    own = [name for name, entry in context.entries.items() if entry is not None and entry.wanted_by != "model"]
    if own and not getattr(executor, "binds_loss", False):
        raise ConfigError(
            f"data: batches have {own[0]}, which is not for the model's forward, and {type(executor).__qualname__} "
            "would give it that; the pass that splits the model needs an executor with binds_loss"
        )
    parameters = named_parameters(parts)
    gradients = PartialGradients.of(parts, context.mesh, device)
    return BuiltModel(parts, applied, roles, known_parameters, parameters, flops, executor, gradients, loss, sized)


def _with_added(
    model: nn.Module, passes: Sequence[ComponentRef], build: ComponentBuilder
) -> list[tuple[ComponentRef, Any]]:
    """The passes, built. Parameters that some of them add are in the model from here on."""
    built = [(use, build(use)) for use in passes]
    for use, one in built:
        if build.description_of(use).adds_parameters:
            one.add(model)
    return built


_GIVEN_BY_ENGINE = ("tokens", "targets", "loss")


def _refuse_entries(model: nn.Module, entries: Mapping[str, Entry | None], name: str) -> None:
    """
    Raises:
        ConfigError: batches have an entry that the model's forward does not take, or lack one that it needs.
        PluginError: it does not take what the engine gives to all models.
    """
    if not entries:
        return
    parameters = inspect.signature(model.forward).parameters.values()
    taken = [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if not takes_any and (lacking := [own for own in _GIVEN_BY_ENGINE if own not in taken]):
        raise PluginError(f"the model {name} has a forward without {lacking[0]!r}, which each model's must take")
    for entry, described in entries.items():
        if entry not in taken and not takes_any and (described is None or described.wanted_by == "model"):
            more = ", ".join(one for one in taken if one not in _GIVEN_BY_ENGINE)
            raise ConfigError(
                f"data: batches have the entry {entry!r}, which the model {name} does not take; besides tokens and "
                f"targets it takes {more or 'nothing'}. Choose other data, or a model for these."
            )
    for one in parameters:
        is_needed = one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if is_needed and one.name not in (*_GIVEN_BY_ENGINE, *entries):
            raise ConfigError(
                f"data: the model {name} needs the entry {one.name!r} in batches, which have {', '.join(entries)}. "
                "Choose other data, or another model."
            )


def _refuse_too_large(parts: Sequence[nn.Module], device: torch.device) -> None:
    """Parameters alone that are more than the memory of this machine or its GPU; gradients and state come on top."""
    if device.type == "cuda":
        memory, where = torch.cuda.get_device_properties(device).total_memory, "its GPU"
    else:
        memory, where = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    size = sum(local_tensor(tensor).nbytes for part in parts for tensor in (*part.parameters(), *part.buffers()))
    if size > memory:
        raise ConfigError(
            f"model: the parameters of one rank take {size / 2**30:,.0f} GiB, and {where} has "
            f"{memory / 2**30:,.0f}; make the model smaller, or share it out to more ranks (see forge plan)"
        )


def _apply(one: ParallelPass, parts: Sequence[nn.Module], context: PassContext) -> tuple[list[nn.Module], list[str]]:
    """A pass on every part; what it touched in all of them."""
    results = [one.apply(part, context) for part in parts]
    return [part for part, _ in results], [name for _, touched in results for name in touched]


def _all_names(parts: Sequence[nn.Module]) -> dict[str, None]:
    """Names of parameters; a tied one has several."""
    named = (name for part in parts for name, _ in part.named_parameters(remove_duplicate=False))
    return dict.fromkeys(canonical_name(name) for name in named)


def _refuse_renaming(known: Mapping[str, None], names: Mapping[str, None], *, is_split: bool, words: str) -> None:
    """A name is how a parameter is initialised, given to the optimizer, and found again in a checkpoint.

    Args:
        known: names before the pass.
        is_split: whether it leaves parameters to other ranks.
    """
    lost = [] if is_split else [name for name in known if name not in names]
    new = [name for name in names if name not in known]
    if not lost and not new:
        return
    what = f"renames {lost[0]} to {new[0]}" if lost and new else f"removes {lost[0]}" if lost else f"adds {new[0]}"
    more = and_more(max(len(lost), len(new)), 1)
    raise PluginError(
        f"{words} {what}{more}. A pass leaves the names of parameters as they are: wrap a module's forward, or replace "
        "a module by one of the same names. This is a bug in the pass."
    )


def build_on_meta(job: Job, vocab_size: int, build: ComponentBuilder) -> nn.Module:
    """The whole model without memory, checked against its declarations."""
    try:
        with torch.device("meta"):
            model: nn.Module = build(with_multipliers(job, build), vocab_size=vocab_size)
    except (RuntimeError, TypeError) as error:
        if "verflow" in (why := str(error).partition("\n")[0]):  # in the number of bytes, or in one size
            raise ConfigError(f"model: a tensor of it is too large to be counted; make it smaller ({why})") from error
        raise
    if job.train.precision == "bf16_pure":
        cast_parameters(model, torch.bfloat16)
    declared = set(model.parameter_roles())  # type: ignore[operator]  # the contract of a model
    if wrong := ", ".join(sorted(declared ^ {name for name, _ in model.named_parameters()})[:5]):
        raise PluginError(f"{type(model).__qualname__}.parameter_roles and its parameters differ: {wrong}")
    return model


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast parameters, as FSDP's mixed precision does. Buffers keep the dtype that a module gave them, as counts and
    biases are finer than what bf16 can tell apart."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return module


def materialise(
    model: nn.Module,
    device: torch.device,
    seed: int,
    *,
    on_host: bool = False,
    scales: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Give every tensor memory and its initial value, which is that on ``device`` wherever the memory is.

    Args:
        on_host: whether parameters are in the host's memory, and only buffers on ``device``.
        scales: as ``initialise`` takes them.
    """
    allocate(model, device, on_host=on_host)
    initialise(model, seed, device if on_host else None, scales)


def allocate(model: nn.Module, device: torch.device, *, on_host: bool = False) -> None:
    """Give every tensor memory, as ``materialise``; what is in it is undefined."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device="cpu" if on_host else device)  # replaces each parameter once a module, which unties them
    for (owner, name), *tied in places.values():
        for other, other_name in tied:
            setattr(other, other_name, getattr(owner, name))
    for module in model.modules() if on_host else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device))


def build_optimizer(job: Job, model: BuiltModel, build: ComponentBuilder) -> torch.optim.Optimizer:
    """The optimizer over this rank's parameters that can be trained.

    Raises:
        ConfigError: the job's parametrization has no rule for it.
        PluginError: it does not take each of them exactly once, or cannot be asked for a step.
    """
    trainable = {name: p for name, p in model.parameters.items() if p.requires_grad}
    elsewhere = frozenset(model.roles.keys() - model.parameters.keys() - model.known.fixed)
    optimizer: torch.optim.Optimizer = build(
        job.optimizer,
        parameters=[
            NamedParameter(name, p, model.roles[name], elsewhere, model.known.aliases_of(name))
            for name, p in trainable.items()
        ],
    )
    groups, step = getattr(optimizer, "param_groups", ()), getattr(optimizer.step, "__func__", optimizer.step)
    taken = [id(parameter) for group in groups for parameter in group["params"]]
    problem = ""
    if sorted(taken) != sorted(id(parameter) for parameter in trainable.values()):
        problem = f"holds {len(taken)} parameters of {len(trainable)}; it must take each exactly once"
    elif not all(isinstance(group.get("lr"), Real | torch.Tensor) for group in groups):
        problem = "has a group of parameters whose 'lr' is no number; each has its learning rate there"
    elif inspect.unwrap(step) is inspect.unwrap(torch.optim.Optimizer.step):
        problem = "has no step of its own"
    if problem:
        raise PluginError(f"{build.words_for(job.optimizer)} {problem}. This is a bug in the optimizer.")
    if model.sized is not None:
        model.sized.scale_rates(optimizer, {parameter: name for name, parameter in trainable.items()})
    return optimizer


def choose_vocab_size(job: Job, data: Source) -> int:
    """The model's vocabulary: its own if its config names one, else the data's.

    Raises:
        ConfigError: the data have ids that the model's vocabulary does not.
    """
    configured: Any = getattr(job.model.config, "vocab_size", None)
    if configured is None:
        return data.vocab_size
    if configured < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {configured} is smaller than the data's vocabulary of {data.vocab_size}; "
            f"leave it out, or make it at least {data.vocab_size}"
        )
    return int(configured)
