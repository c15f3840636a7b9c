"""Callbacks that record what only the ranks themselves can see of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import attrs
import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from forge_core.checkpoint.state_dict import model_tensors, named_parameters, optimizer_state
from forge_core.contracts.callback import Callback, RunContext, StepContext
from parity_matrix.config import NothingToChoose


@attrs.frozen
class Seen:
    """What one rank saw of a run, from its (last) start to its end."""

    start: Mapping[str, str]
    """Digests of the whole tensors that it held parts of, by key, before its first step."""
    end: Mapping[str, str]
    """The same after the last step."""
    gradient_norms: Mapping[str, float]
    """By step."""
    gradients: Mapping[str, torch.Tensor]
    """Whole gradients of its parameters at step 1, by name; empty if the run began later."""


class Probe(Callback):
    """Gathers tensors from the ranks that share them, which no step does by itself."""

    def __init__(self, config: NothingToChoose) -> None:
        self._norms: dict[str, float] = {}
        self._gradients: dict[str, torch.Tensor] = {}

    def run_start(self, run: RunContext) -> None:
        self._parameters = named_parameters(run.parts)  # FSDP has others in the modules after the first forward
        self._start = self._digests(run)

    def before_optimizer_step(self, context: StepContext) -> None:
        self._norms[str(context.step)] = context.metrics["grad_norm"].item()
        if context.step == 1:
            self._gradients = whole({name: p.grad for name, p in self._parameters.items() if p.grad is not None})

    def run_end(self, run: RunContext) -> None:
        file = _file(run.run_dir, run.rank)
        file.parent.mkdir(exist_ok=True)
        torch.save(self._gradients, file.with_suffix(".pt"))
        seen = {"start": self._start, "end": self._digests(run), "gradient_norms": self._norms}
        file.write_text(json.dumps(seen))

    def _digests(self, run: RunContext) -> dict[str, str]:
        state, _ = optimizer_state(run.optimizer, self._parameters)
        tensors = {**model_tensors(self._parameters, run.parts), **state}
        return {key: digest(tensor) for key, tensor in whole(tensors).items()}


class WeightNorm(Callback):
    """Logs one number, which every layout has to make from what its ranks hold."""

    def __init__(self, config: NothingToChoose) -> None:
        pass

    def run_start(self, run: RunContext) -> None:
        run.log(f"weights: {weight_norm(run):.9g}")


def weight_norm(run: RunContext) -> float:
    """The L2 norm of all weights, in any layout, as ``docs/hooks/forge_callbacks.md`` has it."""
    squares = torch.zeros((), device=run.device)
    for part in run.parts:
        for parameter in part.parameters():
            square = parameter.detach().float().square().sum()
            squares += square.full_tensor() if isinstance(square, DTensor) else square
    return run.sum_over_stages(squares).sqrt().item()


def seen_by(run_dir: Path, rank: int) -> Seen:
    """What the rank recorded in the folder of its run."""
    file = _file(run_dir, rank)
    return Seen(**json.loads(file.read_text()), gradients=torch.load(file.with_suffix(".pt")))


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the host, each gathered on all ranks that share it. Those that are cut over one mesh dimension travel
    together: one by one, a few hundred took as long as several steps."""
    copies = {key: _local(tensor.detach()).cpu().clone() for key, tensor in tensors.items()}
    cuts = {key: _cuts(tensor) for key, tensor in tensors.items() if isinstance(tensor, DTensor)}
    while any(cuts.values()):
        together: dict[str, list[str]] = {}
        for key, left in cuts.items():
            if left:
                together.setdefault(left[-1][0], []).append(key)
        for group, keys in together.items():
            pieces = _of_all_ranks({key: copies[key] for key in keys}, group)
            for key in keys:
                copies[key] = torch.cat([of_rank[key] for of_rank in pieces], dim=cuts[key].pop()[1])
    return copies


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's part, or the whole tensor where parts do not simply follow each other."""
    if not isinstance(tensor, DTensor):
        return tensor
    if all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return tensor.to_local()
    if tensor.dtype == torch.int16:  # no collective has it
        return tensor.int().full_tensor().short()
    return tensor.full_tensor()


def _cuts(tensor: DTensor) -> list[tuple[str, int]]:
    """Groups of ranks that have different parts of what ``_local`` gives, with the dimension that is cut; the last one
    was cut last."""
    if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
        return []
    places = enumerate(tensor.placements)
    mesh = tensor.device_mesh
    return [(mesh.get_group(i).group_name, place.dim) for i, place in places if isinstance(place, Shard)]


def _of_all_ranks(tensors: Mapping[str, torch.Tensor], group: str) -> list[dict[str, torch.Tensor]]:
    """The tensors of each rank of a group, by their bits, as no collective has all dtypes."""
    ranks = dist.distributed_c10d._resolve_process_group(group)
    bits = {key: (tuple(tensor.shape), _bits(tensor).numpy().tobytes()) for key, tensor in tensors.items()}
    found: list[dict[str, tuple[tuple[int, ...], bytes]]] = [{}] * ranks.size()
    dist.all_gather_object(found, bits, group=ranks)
    return [{key: _tensor(*of_rank[key], like=tensors[key]) for key in tensors} for of_rank in found]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _tensor(shape: tuple[int, ...], bits: bytes, like: torch.Tensor) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(bits), dtype=like.dtype) if bits else like.new_empty(0)
    return flat.reshape(shape)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bits; dtype and shape count as well."""
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    hashed.update(_bits(tensor).numpy())
    return hashed.hexdigest()


def _file(run_dir: Path, rank: int) -> Path:
    return run_dir / "seen" / f"rank{rank}.json"
