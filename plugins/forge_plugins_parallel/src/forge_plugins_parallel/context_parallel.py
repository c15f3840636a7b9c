"""Context parallelism: each rank along the axis ``cp`` has a part of every sequence.

It gathers keys and values, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2), or lets them go round in a ring.
Shapes: B = batch, S = sequence, C = ranks along ``cp``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup, _functional_collectives
from torch.nn.attention.flex_attention import BlockMask

from forge_core.contracts.batch import Entry
from forge_core.contracts.model import canonical_name, is_within
from forge_core.contracts.observation import ANY, Ends, Part
from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError
from forge_core.ops.sequence_sum import share_out_positions
from forge_plugins_parallel.config import RING_WITHOUT_DOCUMENTS, ContextParallelConfig
from forge_plugins_parallel.context_mask import block_mask, dense_mask
from forge_plugins_parallel.ring_attention import attending_in_a_ring

# torch 2.13 calls it by a new name and warns of the old one, which is all that 2.11 has
_all_gather = getattr(_functional_collectives, "all_gather_single_autograd", None) or (
    _functional_collectives.all_gather_tensor_autograd
)


class ContextParallel:
    """The model is given this rank's positions of the batch, all other modules than attention never notice.

    Of the 2·C chunks of a sequence, rank ``r`` has number ``r`` and number ``2·C − 1 − r``: under a causal mask late
    queries see more keys than early ones, and so each rank has the same work. Every rank computes the loss of its
    positions; the gradients of parameters have to be summed over ``cp``, which ``fsdp`` does, as it does over samples.
    """

    def __init__(self, config: ContextParallelConfig) -> None:
        self._config = config

    def apply(self, model: nn.Module, context: PassContext) -> tuple[nn.Module, Sequence[str]]:
        """Same as ``ParallelPass.apply``.

        Raises:
            ConfigError: the model does not say which of its modules compute attention; or there is no ring attention.
        """
        if not hasattr(model, "context_plan"):
            raise ConfigError(
                f"parallel.cp: the model {context.job.model.qualified_name} does not say which of its modules compute "
                "attention (context_plan), so that its sequences cannot be split over ranks; set parallel.cp = 1"
            )
        mesh = context.mesh.device_mesh["cp"]
        share_out_positions(mesh.get_group())
        part = SequencePart(
            mesh.get_local_rank(),
            mesh.size(),
            masks=self._config.method == "gather",
            dims=position_dims(context.entries),
        )
        model.register_forward_pre_hook(part.take, with_kwargs=True)
        model.register_forward_hook(functools.partial(_with_whole_logits, group=mesh.get_group()), with_kwargs=True)
        touched = list(model.context_plan())  # type: ignore[operator]  # declared by the model
        modules = [model.get_submodule(name) for name in touched]
        # One object for all layers: graphs of compiled blocks are looked up by it.
        if self._config.method == "ring":
            forward = attending_in_a_ring(mesh.get_group())
            for module in modules:
                module.forward = MethodType(forward, module)
        else:
            gather = functools.partial(_with_whole_keys, group=mesh.get_group())
            for module in modules:
                module.register_forward_pre_hook(gather)
        return model, ["", *touched]

    def layout(self, model: Any) -> dict[str, Ends]:
        """Same as ``LaidOutPass.layout``. All that has positions has a part of them, but for gathered keys and values,
        whose gradients are sums over ranks. So are those in a tower, which is whole on every rank. A model without
        ``context_plan`` is never shared out."""
        if not hasattr(model, "context_plan"):
            return {}
        of_keys = dict.fromkeys((1, 2), ("cp",))
        if self._config.method == "ring":
            hidden = 'in a ring no rank has the keys of whole sequences; set method = "gather" in ' + _TABLE
            attention = Ends(hidden=hidden)
        else:
            attention = Ends(summed_inputs=of_keys)
        everywhere = Ends(inputs={ANY: _POSITIONS}, output=_POSITIONS)
        in_towers = dict.fromkeys(_modules_of_towers(model), Ends(summed_inputs={ANY: ("cp",)}, summed_output=("cp",)))
        return {"": everywhere, **in_towers, **dict.fromkeys(model.context_plan(), attention)}


class SequencePart:
    """What one rank sees of a batch."""

    def __init__(
        self, rank: int, ranks: int, *, masks: bool = True, dims: Mapping[str, int | None] | None = None
    ) -> None:
        """
        Args:
            masks: whether the model is told what its queries see of a whole sequence; not if it never has one.
            dims: along which dimension an entry has positions, or ``None`` if it has none; by default along the second.
        """
        self._masks = masks
        self._dims = dims or {}
        self._chunks = (rank, 2 * ranks - 1 - rank)
        self._n_chunks = 2 * ranks

    def take(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``Model.forward`` for this rank's positions, as a forward pre-hook: what has positions is
        cut, and ``positions`` and ``mask`` say where the rest is.

        Raises:
            ConfigError: the sequence cannot be cut; or it has documents, and nothing would keep them apart.
        """
        inputs = dict(zip(_POSITIONAL, args, strict=False)) | kwargs
        tokens = inputs["tokens"]
        has_tokens = model.embed is not None  # else hidden states, which an earlier stage has of its part only
        seq_len = tokens.shape[1] if has_tokens else tokens.shape[1] * self._n_chunks // 2
        if seq_len % self._n_chunks:
            raise ConfigError(
                f"parallel.cp: a sequence of {seq_len} tokens cannot be cut into {self._n_chunks} chunks of one length"
            )
        masks = {"mask": self._masks_of(model, seq_len, inputs.get("document"), tokens.device)} if self._masks else {}
        if not self._masks and inputs.get("document") is not None:
            raise ConfigError(f"parallel.passes.context_parallel.method: {RING_WITHOUT_DOCUMENTS}")
        if inputs.get("positions") is None:
            inputs["positions"] = torch.arange(seq_len, device=tokens.device).expand(tokens.shape[0], -1)
        arrived = frozenset() if has_tokens else {"tokens", *_travelling(model, inputs)}  # of this rank's part
        for name, value in inputs.items():
            dim = self._dims.get(name, 1)
            if isinstance(value, torch.Tensor) and dim is not None and name not in arrived:
                inputs[name] = self._cut(value, dim)
        loss: Any = inputs.get("loss")
        if hasattr(loss, "of_part"):
            inputs["loss"] = loss.of_part(self._cut)
        first = inputs.pop("tokens")
        return (first,), {**inputs, **masks}

    def _masks_of(
        self, model: Any, seq_len: int, document: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | BlockMask | dict[int, torch.Tensor | BlockMask]:
        """The mask; or one for each window, where the model has any."""
        place = self._cut(torch.arange(seq_len, device=device)[None])[0]
        make = block_mask if device.type == "cuda" else dense_mask
        windows = model.attention_windows() if hasattr(model, "attention_windows") else ()
        if windows:
            return {window: make(place, seq_len, document, window) for window in windows}
        return make(place, seq_len, document)

    def _cut(self, entry: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """``(B, S, …)`` to ``(B, S / C, …)``."""
        chunks = entry.chunk(self._n_chunks, dim=dim)
        return torch.cat([chunks[i] for i in self._chunks], dim=dim)


def _travelling(model: Any, inputs: Mapping[str, Any]) -> list[str]:
    """The names of what an earlier stage has sent beside hidden states."""
    if not hasattr(model, "travels"):
        return []
    shapes = {name: tuple(value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return list(model.travels({**shapes, "tokens": shapes["tokens"][:2]}))


def _modules_of_towers(model: Any) -> list[str]:
    towers = [name for name, role in model.parallel_plan().items() if role == "tower"]
    names = [canonical_name(name) for name, _ in model.named_modules()]
    return [name for name in names if any(is_within(name, tower) for tower in towers)]


def position_dims(entries: Mapping[str, Entry | None]) -> dict[str, int | None]:
    """Along which dimension each entry has positions, or ``None``.

    Raises:
        ConfigError: an entry has no description, which would say whether it has positions.
    """
    dims: dict[str, int | None] = {}
    for name, entry in entries.items():
        if entry is None:
            raise ConfigError(
                f"parallel.cp: the data do not describe the entry {name!r} of their batches (entries), so that it "
                "is not known whether it is to be cut; set parallel.cp = 1, or have the data source describe it"
            )
        dims[name] = entry.dims.index("position") if "position" in entry.dims else None
    return dims


_POSITIONS = (Part("cp", "position", "balanced"),)
_TABLE = "[parallel.passes.context_parallel]"
_POSITIONAL = ("tokens", "targets", "loss")


def _with_whole_logits(
    model: Any, _: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, group: ProcessGroup
) -> Any:
    """A forward hook of the model: without a loss, its last part gives the logits of whole sequences."""
    if kwargs.get("loss") is not None or model.head is None:
        return output
    parts = _all_gather(output, 0, group).split_with_sizes([output.shape[0]] * group.size())
    return in_order(parts, dim=1)


def in_order(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """What the ranks have of sequences, each its two chunks, as whole sequences."""
    heads, tails = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim=dim)


def _with_whole_keys(_: nn.Module, args: tuple[Any, ...], *, group: ProcessGroup) -> tuple[Any, ...]:
    """A forward pre-hook of what ``context_plan`` names."""
    q, k, v, *rest = args
    return q, *gather_sequence(k, v, group), *rest


def gather_sequence(k: torch.Tensor, v: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the whole sequence, in order. Backward sums the gradients of all ranks for this rank's part.

    Args:
        k, v: ``(B, H, S / C, head_dim)`` of this rank's two chunks; their ``head_dim`` may differ.

    Returns:
        Two ``(B, H, S, head_dim)``.
    """
    both = torch.cat((k, v), dim=-1)
    parts = _all_gather(both, 0, group).split_with_sizes([both.shape[0]] * group.size())
    whole_k, whole_v = in_order(parts, dim=2).tensor_split((k.shape[-1],), dim=-1)
    return whole_k, whole_v
