"""Upcycling on disk: a checkpoint of a dense model to one of a sparse model, a tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from forge_core.checkpoint.store import Checkpoint
from forge_core.checkpoint.upgrading import module_versions
from forge_core.config.builder import ComponentBuilder
from forge_core.config.describe import literal
from forge_core.config.diff import Difference, differences
from forge_core.config.sections import Job
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError
from forge_core.job import adding_passes, catalog_of, dump_job, load_job, plain
from forge_core.registry.catalog import Catalog
from forge_core.train.build import build_on_meta
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_moe.upcycle import UpcycledState, Upcycling
from forge_plugins_weights.export import versions_of, write_checkpoint

CHECKPOINT = "checkpoint"
CONFIG = "train.toml"


class UpcycledTensors(Protocol):
    """Parameters and persistent buffers of a model, by name; each is made when it is asked for."""

    @property
    def shapes(self) -> Mapping[str, torch.Tensor]:
        """All of them, on meta."""
        ...

    def __getitem__(self, name: str, /) -> torch.Tensor:
        """One of them, on the CPU."""
        ...


def upcycle_checkpoint(
    source: Checkpoint,
    out: Path,
    how: Upcycling,
    *,
    n_experts: int,
    overrides: Sequence[str] = (),
    catalog: Callable[[Collection[str]], Catalog],
) -> tuple[UpcycledState, list[Difference]]:
    """Write ``out/checkpoint/``, and ``out/train.toml``: a run in the directory ``out`` that begins with its weights.

    The sparse job is the one of ``source`` with another feed-forward layer. ``out/checkpoint/job.toml`` is the same
    without ``checkpoint.load``: resumed from ``out/checkpoint``, it goes on at the step and the position in the data of
    ``source``. The optimizer's state is left out. ``state.json`` says under ``upcycled`` where the weights are from.

    Args:
        n_experts: of each sparse layer.
        overrides: settings of the sparse job, as on the command line (``model.feed_forward.router.top_k=4``).

    Returns:
        What was written, and the keys of the model beside the feed-forward layer that ``overrides`` change, by which
        it may compute something else than the dense one.

    Raises:
        ConfigError: the source's model has no dense layers that experts can be made of, or adapters; the settings are
            wrong, or do not go together; or there is something at ``out``, or too little room on its disk.
        SaveError: it cannot be written.
    """
    job = load_job(source.path / "job.toml", catalog=catalog)
    installed = catalog_of(job, catalog)
    refuse_added(source, job, installed)
    out = free_place(out)
    settings = [*_sparse_settings(job, source, n_experts, how), *run_settings(out), *overrides]
    sparse_job = load_job(source.path / "job.toml", settings, catalog=catalog)
    _refuse_two_counts(sparse_job, n_experts)
    sparse = build_on_meta(sparse_job, source.state()["vocab_size"], ComponentBuilder(installed))
    saved = SavedModel(source)
    upcycled = UpcycledState(saved.shapes, sparse, how, read=saved.read)
    provenance = {**attrs.asdict(how), "layers": {name: attrs.asdict(one) for name, one in upcycled.layers.items()}}
    write_upcycled(source, out, sparse_job, sparse, upcycled, provenance=provenance, installed=installed)
    now = plain(sparse_job.model)
    dense = {**now, "feed_forward": now["feed_forward"].get("dense")}
    return upcycled, differences({"model": plain(job.model)}, {"model": dense})


def refuse_added(source: Checkpoint, job: Job, installed: Catalog) -> None:
    """
    Raises:
        ConfigError: a pass has added parameters, such as adapters, which another model would lack.
    """
    for key in adding_passes(job, installed):
        raise ConfigError(
            f"{source.path} was trained with the pass {key}, whose parameters another model would lack; "
            "fold them into the weights with forge convert, and upcycle that"
        )


def free_place(out: Path) -> Path:
    """The absolute path of a folder to be written.

    Raises:
        ConfigError: there is something of an upcycled run in it.
    """
    out = out.expanduser().resolve()
    for path in (out / CHECKPOINT, out / CONFIG):
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another --out, or remove it")
    return out


def write_upcycled(
    source: Checkpoint,
    out: Path,
    job: Job,
    model: nn.Module,
    tensors: UpcycledTensors,
    *,
    provenance: Mapping[str, Any],
    installed: Catalog,
) -> None:
    """Write ``out/checkpoint/`` and ``out/train.toml``, as ``upcycle_checkpoint`` says.

    Args:
        out: as ``free_place`` gives it.
        job: with the settings of ``run_settings``.
        model: of the job, on meta.
        provenance: further facts of ``state.json``, under ``upcycled``.

    Raises:
        SaveError: it cannot be written.
    """
    state = source.state()

    def write_more(folder: Path) -> None:
        whole = attrs.evolve(job, checkpoint=attrs.evolve(job.checkpoint, load=None))
        (folder / "job.toml").write_text(dump_job(whole))
        if "tokenizer" in state:
            shutil.copytree(source.path / "tokenizer", folder / "tokenizer")

    facts = {"source": str(source.path.resolve()), "step": source.step, "written": source.manifest.written}
    write_checkpoint(
        out / CHECKPOINT,
        {f"model.{name}": tensor for name, tensor in tensors.shapes.items()},
        lambda key: tensors[key.removeprefix("model.")],
        state={
            **state,
            "modules": module_versions([model]),
            "optimizer": {"values": {}, "on_host": []},
            "callbacks": {},
            "trackers": {},
            "upcycled": {**facts, **provenance},
        },
        step=source.step,
        tokens=source.manifest.tokens,
        versions=versions_of(installed),
        write_more=write_more,
    )
    (out / CONFIG).write_text(dump_job(job))


def _refuse_two_counts(job: Job, n_experts: int) -> None:
    own = getattr(job.model.config.feed_forward.config, "n_experts", n_experts)
    if own != n_experts:
        raise ConfigError(f"model.feed_forward.n_experts={own}: --experts {n_experts} says how many; leave one out")


def _sparse_settings(job: Job, source: Checkpoint, n_experts: int, how: Upcycling) -> list[str]:
    """The feed-forward layer of the sparse model: experts of the right width, and the dense layer where it stays."""
    dense: Any = getattr(job.model.config, "feed_forward", None)
    if not isinstance(dense, ComponentRef) or not isinstance(dense.config, MLPConfig):
        what = (
            f"the feed-forward layer {dense.qualified_name!r}"
            if isinstance(dense, ComponentRef)
            else "no feed-forward layer"
        )
        raise ConfigError(
            f"{source.path}: the model {job.model.qualified_name!r} has {what}; experts can be made of 'mlp' alone"
        )
    dim = job.model.config.dim
    width = dense.config.width(dim)
    if width % how.granularity:
        raise ConfigError(
            f"granularity = {how.granularity} does not divide the {width} hidden features of the dense layers evenly"
        )
    layer = {
        "name": "forge-plugins-moe:moe",
        "n_experts": n_experts,
        "hidden_dim": width // how.granularity,
        "dense": plain(dense),
    }
    return [f"model.feed_forward={literal(layer)}"]


def run_settings(out: Path) -> list[str]:
    """Settings of a run in ``out`` that begins with the weights that are written there."""
    load = {"path": str(out / CHECKPOINT), "include": ["model.*"], "exclude": []}
    return [
        f"run.name={literal(out.name)}",
        f"run.dir={literal(str(out.parent))}",
        'checkpoint.resume="auto"',
        f"checkpoint.load={literal(load)}",
    ]


class SavedModel:
    """The model's tensors in a checkpoint, of which the matrices of one block are in memory at a time."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.shapes: Mapping[str, torch.Tensor] = {
            key.removeprefix("model."): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for key, entry in checkpoint.saved_tensors().items()
            if key.startswith("model.")
        }
        """On meta, by name."""
        self._vectors = self._load([name for name, tensor in self.shapes.items() if tensor.ndim < 2])
        self._block: str | None = None
        self._matrices: dict[str, torch.Tensor] = {}

    def read(self, name: str) -> torch.Tensor:
        """One of them."""
        if name in self._vectors:
            return self._vectors[name]
        block = _block_of(name)
        if block != self._block:
            self._matrices = {}  # before there are others
            self._matrices = self._load([one for one in self.shapes.keys() - self._vectors if _block_of(one) == block])
            self._block = block
        return self._matrices[name]

    def _load(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty_like(self.shapes[name], device="cpu") for name in names}
        self._checkpoint.load({f"model.{name}": tensor for name, tensor in tensors.items()})
        return tensors


def _block_of(name: str) -> str:
    """``"blocks.3"`` of what is in a block, and each other part of the model by itself."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
