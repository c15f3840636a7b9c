"""Tensor and sequence parallelism, from the model's plan alone.

Each rank along ``tp`` has some output features of the layers that read the residual stream (``column``), the matching
input features of the ones that write to it (``row``), and some rows of embedding and head. Between them the residual
stream is cut by token (sequence parallelism, Korthikanti et al. 2022, arXiv 2205.05198): a ``sequence`` module works
on its rank's tokens, and its output is gathered once for all that read it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from forge_core.contracts.model import SHARD_ROLES, ShardRole, canonical_name, fits
from forge_core.contracts.observation import Ends
from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError, PluginError, nearest_hint
from forge_core.ops.auxiliary_loss import LEDGER
from forge_plugins_parallel.config import TensorParallelConfig, rank_without_rows
from forge_plugins_parallel.cut_layers import (
    ColumnParallel,
    FeatureNorm,
    FeatureParallel,
    Ranks,
    Residual,
    RowParallel,
    TensorParallelExperts,
    VocabParallelEmbedding,
    VocabParallelHead,
    become,
    distributed,
    gather_copies_of_tokens,
    own_share,
    sum_gradients,
    sum_over_tp,
)
from forge_plugins_parallel.tensor_layout import is_in_tower, is_norm, tensor_layout

_KEY = "parallel.passes.tensor_parallel"
_ASYNC = f"{_KEY}.async_tp"


class TensorParallel:
    """Cuts a model over the mesh axis ``tp``.

    What is cut becomes a ``DTensor`` on that axis. What is not stays as it is, whole on every rank: parameters that
    work on a part of the activations (in ``sequence``, ``residual`` and ``replicate`` modules) get the sum of all
    ranks' gradients, once per step, and those of modules that the plan does not name see the same activations, and so
    have the same gradient, on every rank.
    """

    def __init__(self, config: TensorParallelConfig) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """Same as ``ParallelPass.apply``.

        Raises:
            ConfigError: a layer cannot be cut into so many parts, or there is nothing that ``async_tp`` could overlap.
            PluginError: the plan names modules that are not there, or of a kind that its role does not fit; or modules
                of different roles hold one parameter.
        """
        plan = matched_plan(model)
        mesh = context.mesh.device_mesh["tp"]
        has_sequence = "sequence" in plan.values()
        by_token = self._cuts_tokens(plan)
        if by_token:
            _refuse_unplanned(model, plan)
        ranks = Ranks.of(mesh, by_token=by_token, gradients_arrive_partial=not has_sequence)
        if self._config.async_tp:
            ranks = _fusible(ranks, model, context.device)

        shards = context.mesh.degrees["dp_shard"] * context.mesh.degrees["cp"]
        cut: dict[int, nn.Parameter] = {}  # by the whole parameter's id: a tied one is cut once
        # in a tower all activations are whole, and a layer that is cut by output sums the gradient of what it reads
        in_tower = attrs.evolve(ranks, by_token=False, gradients_arrive_partial=True, fusible=False)
        for name, role in plan.items():
            of_layer = in_tower if is_in_tower(name, plan) else ranks
            _cut(name, model.get_submodule(name), role, of_layer, mesh, shards, cut)
        _refuse_cut_within(model)
        _refuse_shared(model)
        if by_token:
            _watch_shapes(model, [name for name, role in plan.items() if role == "embedding"], ranks.size)
            _cut_stage_ends(model, ranks)
            LEDGER.share_out_stream()
        return model, list(plan)

    def layout(self, model: nn.Module) -> dict[str, Ends]:
        """Same as ``LaidOutPass.layout``."""
        plan = matched_plan(model)
        return tensor_layout(model, plan, by_token=self._cuts_tokens(plan))

    def _cuts_tokens(self, plan: Mapping[str, ShardRole]) -> bool:
        """Return whether each rank has a part of the tokens of the residual stream."""
        return "sequence" in plan.values() and self._config.sequence_parallel


def matched_plan(model: Any) -> dict[str, ShardRole]:
    """The role of each module by its name, from the patterns that the model gives.

    Raises:
        PluginError: a pattern matches nothing, a module has two roles, or one that this pass does not know.
    """
    names = list(dict.fromkeys(canonical_name(name) for name, _ in model.named_modules(remove_duplicate=False)))
    plan: dict[str, ShardRole] = {}
    for pattern, role in model.parallel_plan().items():
        matches = [name for name in names if fits(name, pattern)]
        if not matches and not _is_of_another_stage(pattern, model):
            raise PluginError(f"{_class(model)}.parallel_plan names {pattern!r}, which is no module of the model")
        if role not in SHARD_ROLES:
            raise PluginError(
                f"{_class(model)}.parallel_plan gives {pattern!r} the role {role!r}, which tensor_parallel does not "
                f"know{nearest_hint(role, SHARD_ROLES)}; it knows {', '.join(SHARD_ROLES)}"
            )
        for name in matches:
            if plan.setdefault(name, role) != role:
                raise PluginError(f"{_class(model)}.parallel_plan says both {plan[name]!r} and {role!r} for {name}")
    return plan


def _fusible(ranks: Ranks, model: nn.Module, device: torch.device) -> Ranks:
    """With the compiler told to fuse the collectives of this group, whose ranks come to share memory.

    Raises:
        ConfigError: tokens are not shared out, so that none are gathered; or ranks cannot share memory.
    """
    if not ranks.by_token:
        raise ConfigError(
            f"{_ASYNC}: overlaps gathering tokens, and the parallel_plan of {_class(model)} has no role 'sequence', "
            "so that each rank has all of them; remove it"
        )
    import torch._inductor.config as compiler  # takes a second, for which only those wait who compile

    compiler._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 says that it is not needed any more, and fuses nothing without it
        warnings.filterwarnings("ignore", "`enable_symm_mem_for_group` is deprecated", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(ranks.group.group_name)
    if device.type == "cuda":
        try:
            symmetric_memory.get_symm_mem_workspace(ranks.group.group_name, min_size=1)
        except RuntimeError as error:
            raise ConfigError(
                f"{_ASYNC}: the GPUs of the {ranks.size} ranks along tp cannot read each other's memory ({error}); "
                "lower parallel.tp to what is joined by NVLink, or remove it"
            ) from error
    return attrs.evolve(ranks, fusible=True)


def _is_of_another_stage(pattern: str, model: Any) -> bool:
    """Return whether it names what a pipeline stage does not hold: a plan may list the whole model on each of them."""
    part, *rest = pattern.split(".")
    if part != "blocks":
        return getattr(model, part, model) is None
    is_whole = None not in (model.embed, model.norm, model.head)
    return not is_whole and rest != [] and rest[0].isdigit() and rest[0] not in model.blocks


def _cut(
    name: str,
    module: Any,
    role: ShardRole,
    ranks: Ranks,
    mesh: DeviceMesh,
    shards: int,
    cut: dict[int, nn.Parameter],
) -> None:
    """``shards``: ranks over which the parts may be cut once more."""
    match role:
        case "column" if not hasattr(module, "weight"):  # a number a feature, which is whole like a bias
            _refuse_uneven(name, module.out_features, "output", ranks)
            become(module, FeatureParallel, ranks)
            _distribute(module, _vector(module, mesh, shards), mesh, cut)
        case "column" if is_norm(module):
            _refuse_uneven(name, module.out_features, "normed", ranks)
            become(module, FeatureNorm, ranks)
            _distribute(module, _vector(module, mesh, shards, "weight"), mesh, cut)
        case "column":
            _refuse_unless(name, module, role, nn.Linear)
            _refuse_uneven(name, module.out_features, "output", ranks)
            become(module, ColumnParallel, ranks)
            _distribute(module, {"weight": Shard(0), **_vector(module, mesh, shards)}, mesh, cut)
        case "row":
            _refuse_unless(name, module, role, nn.Linear)
            _refuse_uneven(name, module.in_features, "input", ranks)
            become(module, RowParallel, ranks)
            added_to_own_tokens: dict[str, Placement | None] = {"bias": None} if ranks.by_token else {}
            _distribute(module, {"weight": Shard(1), **added_to_own_tokens}, mesh, cut)
        case "vocab":
            if not hasattr(module, "cap"):  # else a linear layer that caps its logits, as HeadInParts says
                _refuse_unless(name, module, role, nn.Linear)
            _refuse_small_vocabulary(name, module.out_features, ranks)
            become(module, VocabParallelHead, ranks)
            _distribute(module, {"weight": Shard(0), **_vector(module, mesh, shards)}, mesh, cut)
        case "embedding":
            _refuse_unless(name, module, role, nn.Embedding)
            _refuse_special_embedding(name, module)
            _refuse_small_vocabulary(name, module.num_embeddings, ranks)
            become(module, VocabParallelEmbedding, ranks)
            _distribute(module, {"weight": Shard(0)}, mesh, cut)
        case "expert":
            _cut_experts(name, module, ranks, mesh, cut)
        case _:
            if role == "replicate" and hasattr(module, "part"):
                module.part = ranks.rank
            _share_out_activations(module, role, ranks)


def _share_out_activations(module: nn.Module, role: ShardRole, ranks: Ranks) -> None:
    """For a module that is whole on every rank."""
    match role:
        case "replicate":
            _sum_gradients(module)
        case "residual":
            if ranks.by_token:
                _sum_gradients(module)
                become(module, Residual, ranks)
            else:
                module.register_forward_pre_hook(functools.partial(_share_towers, ranks), with_kwargs=True)
        case "tower":
            module.register_forward_hook(lambda _, __, given: sum_gradients(given, ranks))
        case "sequence":
            if ranks.by_token:
                _sum_gradients(module)
            module.register_forward_hook(lambda _, __, hidden: ranks.enter(hidden))
        case "router":
            _sum_gradients(module)
            module.register_forward_pre_hook(lambda _, args: (ranks.read(args[0]), *args[1:]))
        case "whole":
            if not ranks.gradients_arrive_partial:  # else it is like any module that the plan does not name
                _sum_gradients(module)
                module.register_forward_hook(lambda _, __, hidden: own_share(hidden, ranks))


def _share_towers(
    ranks: Ranks, _: nn.Module, args: tuple[Any, ...], given: dict[str, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, torch.Tensor]]:
    """Where each rank does the work of all tokens: what comes from a tower, whose gradients are to add up."""
    return args, {name: own_share(one, ranks) for name, one in given.items()}


def _cut_experts(name: str, module: Any, ranks: Ranks, mesh: DeviceMesh, cut: dict[int, nn.Parameter]) -> None:
    if not hasattr(module, "feature_dims"):
        raise PluginError(
            f"the model's parallel_plan gives {name} the role 'expert', and it does not say by feature_dims how an "
            "expert is cut; the role 'whole' leaves it whole on every rank"
        )
    dims = module.feature_dims()
    for parameter, dim in dims.items():
        _refuse_uneven(f"{name}.{parameter}", getattr(module, parameter).shape[dim], "hidden", ranks)
    become(module, TensorParallelExperts, ranks)
    _distribute(module, {parameter: Shard(dim) for parameter, dim in dims.items()}, mesh, cut)
    sum_over_tp(module, *(name for name, _ in module.named_parameters(recurse=False) if name not in dims))


def _sum_gradients(module: nn.Module) -> None:
    """Of all parameters in a module: each rank sees a part of the activations."""
    for one in module.modules():
        if names := [name for name, _ in one.named_parameters(recurse=False)]:
            sum_over_tp(one, *names)


def _vector(module: Any, mesh: DeviceMesh, shards: int, name: str = "bias") -> dict[str, Placement | None]:
    """A vector that cannot be shared out evenly stays whole on every rank: unlike a matrix, it has no other dimension
    along which its parts could be sharded."""
    return {name: Shard(0) if module.out_features % (mesh.size() * shards) == 0 else None}


def _distribute(
    module: nn.Module, placements: Mapping[str, Placement | None], mesh: DeviceMesh, cut: dict[int, nn.Parameter]
) -> None:
    """Cut the parameters that the module has, in place. Each rank sees a part of the gradient of one that is to stay
    whole, ``None``."""
    for name, placement in placements.items():
        whole = getattr(module, name)
        if whole is None:
            continue
        if placement is None:
            sum_over_tp(module, name)
            continue
        if id(whole) not in cut:
            cut[id(whole)] = cut_one = distributed(whole, mesh, placement)
            cut[id(cut_one)] = cut_one
        setattr(module, name, cut[id(whole)])


def _watch_shapes(model: nn.Module, embeddings: Sequence[str], ranks: int) -> None:
    """Look at what a forward is given. Positions may be given once for all rows, ``(S,)`` or ``(1, S)``; they are given
    to each row, as a rank's tokens are of some rows.

    Raises:
        ConfigError: in a forward, of sequences that ranks cannot share out evenly.
    """
    rows = 1

    def look(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        nonlocal rows
        rows, positions = (given["tokens"] if "tokens" in given else args[0]).shape[:2]
        if positions % ranks:
            raise ConfigError(
                f"parallel.tp = {ranks}: sequences of {positions} positions cannot be shared out evenly; give as many "
                f"as {ranks} divides, or set {_KEY}.sequence_parallel = false"
            )

    def repeat(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = torch.atleast_2d(args[0])  # type: ignore[no-untyped-call]  # torch's; further tokens are (B, S, K)
        return ids.expand(rows, *ids.shape[1:]), *args[1:]

    model.register_forward_pre_hook(look, with_kwargs=True)
    for name in embeddings:
        model.get_submodule(name).register_forward_pre_hook(repeat)


def _cut_stage_ends(model: Any, ranks: Ranks) -> None:
    """What travels between pipeline stages is whole: a stage may ask it for the number of positions."""
    within = [*model.blocks.values(), *([] if model.norm is None else [model.norm])]
    if model.embed is None:
        # a stage of nothing but predictors of further tokens: the norm too reads what arrives
        only_predicts = model.head is not None and len(model.blocks) == getattr(model, "n_predictors", 0)
        for reader in [within[0], within[-1]] if only_predicts and len(within) > 1 else within[:1]:
            reader.register_forward_pre_hook(lambda _, args: (own_share(args[0], ranks), *args[1:]))
    if model.head is None and model.norm is None:
        last = within[-1] if within else model.embed
        last.register_forward_hook(lambda _, __, hidden: gather_copies_of_tokens(hidden, ranks))


def _refuse_cut_within(model: nn.Module) -> None:
    """The parts of a parameter that is cut are not to be added up."""
    for name, module in model.named_modules():
        if any(isinstance(getattr(module, one), DTensor) for one in getattr(module, "partial_gradients", {})):
            raise PluginError(
                f"{_class(model)}.parallel_plan cuts {name}, and gives a role to a module that it is in, by which all "
                "in that is whole; remove one of the two roles"
            )


def _refuse_shared(model: nn.Module) -> None:
    """The gradient of a parameter is summed for all modules that have it, or for none."""
    summed: dict[int, tuple[str, bool]] = {}
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_summed = name in getattr(module, "partial_gradients", {})
            other, of_other = summed.setdefault(id(parameter), (owner, is_summed))
            if is_summed != of_other:
                raise PluginError(
                    f"{_class(model)}.parallel_plan: {other} and {owner} share the parameter {name}, and one of them "
                    "sees a part of the activations, the other one all; give both a role of one kind"
                )


def _refuse_unplanned(model: nn.Module, plan: Mapping[str, ShardRole]) -> None:
    """With tokens apart, a parameter outside of the plan would get the gradient of this rank's tokens only."""
    for name in _unplanned(model, plan):
        raise PluginError(
            f"{_class(model)}.parallel_plan has the role 'sequence', and so must have one for every module with "
            f"parameters; {name} has none ('residual' and 'replicate' keep it whole)"
        )


def _unplanned(model: nn.Module, plan: Mapping[str, ShardRole]) -> Iterator[str]:
    for name, _ in model.named_parameters():
        owners = name.split(".")[:-1]
        if not any(".".join(owners[:depth]) in plan for depth in range(1, len(owners) + 1)):
            yield name


def _refuse_unless(name: str, module: nn.Module, role: str, wanted: type[nn.Module]) -> None:
    if type(module) is not wanted:
        raise PluginError(
            f"the model's parallel_plan gives {name} the role {role!r}, which is for {wanted.__qualname__} itself, "
            f"and it is a {type(module).__qualname__}"
        )


def _refuse_uneven(name: str, features: int, what: str, ranks: Ranks) -> None:
    if features % ranks.size:
        raise ConfigError(
            f"parallel.tp = {ranks.size}: the {features} {what} features of {name} cannot be shared out evenly"
        )


def _refuse_small_vocabulary(name: str, rows: int, ranks: Ranks) -> None:
    if problem := rank_without_rows(rows, ranks.size):
        raise ConfigError(f"{_KEY}: {name}: {problem}")


def _refuse_special_embedding(name: str, module: nn.Embedding) -> None:
    for option in ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option) not in (None, False):
            raise ConfigError(
                f"{name} has the option {option}, which an embedding that is cut by vocabulary does not have; "
                "set parallel.tp = 1"
            )


def _class(model: nn.Module) -> str:
    return type(model).__qualname__
