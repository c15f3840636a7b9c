"""Upcycling: a model with weights for each modality, from one with the same weights for both."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from forge_core.checkpoint.state_dict import model_tensors, named_parameters
from forge_core.config.builder import ComponentBuilder
from forge_core.config.describe import literal
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError
from forge_core.job import catalog_of, load_job, plain
from forge_core.train.build import build_on_meta
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_moe.upcycle import Drawing, UpcycledState, Upcycling
from forge_plugins_moe.upcycle_checkpoint import SavedModel, free_place, refuse_added, run_settings, write_upcycled
from forge_plugins_vlm.config import VisionLanguageConfig

if TYPE_CHECKING:
    from pathlib import Path

    from forge_core.checkpoint.store import Checkpoint
    from forge_core.config.sections import Job
    from forge_core.registry.catalog import Catalog

_MODEL = "forge-plugins-vlm:vision_language"
_COPIES = (re.compile(r"(blocks\.\d+\.)image\.(.*)"), re.compile(r"(blocks\.\d+\.)image_(feed_forward\..*)"))
"""Names of image weights; joined, the groups are the name of what they are copies of."""
_ROUTER = {"name": "expert_choice", "experts_per_token": 1.0, "score_function": "sigmoid", "predictor": True}
"""That of MoMa (Lin et al. 2024, arXiv 2407.21770): each expert takes ``1 / E`` of the tokens of its modality."""


@attrs.frozen
class Upcycled:
    """What became of a model."""

    copied: int
    """Image tensors that are copies of those of text."""
    drawn: Sequence[str]
    """Tensors with first values, as the run does not have them."""
    n_experts: int
    """Of each modality in a layer."""

    @property
    def words(self) -> str:
        """For people."""
        parts = [f"{self.copied} image tensors are copies of those of text"] if self.copied else []
        parts += [f"{self.n_experts} experts for each modality in a layer"] if self.n_experts > 1 else []
        if self.drawn:
            parts.append(f"{len(self.drawn)} tensors have their first values ({', '.join(self.drawn[:3])}, …)")
        return "; ".join(parts)


def upcycle_to_modalities(
    source: Checkpoint,
    out: Path,
    fusion: str,
    *,
    n_experts: int = 1,
    overrides: Sequence[str] = (),
    seed: int = 0,
    catalog: Callable[[Collection[str]], Catalog],
) -> Upcycled:
    """Write ``out/checkpoint/`` and ``out/train.toml``, as ``forge_plugins_moe.upcycle_checkpoint`` does.

    Args:
        fusion: ``mixture_of_transformers``, which computes what the source does; or ``moma``.
        n_experts: of each modality, with ``moma``. With one, it computes what the source does; with more, each is a
            copy, scaled by the mean weight that the router gives.
        overrides: settings of the new job, as on the command line.
        seed: decides first values of what the source does not have.

    Raises:
        ConfigError: the source is no such model; the settings are wrong; there is something at ``out``, or
            too little room on its disk.
        SaveError: it cannot be written.
    """
    job = load_job(source.path / "job.toml", catalog=catalog)
    out = free_place(out)
    installed = catalog_of(job, catalog)
    refuse_added(source, job, installed)
    build = ComponentBuilder(installed)
    vocab_size: int = source.state()["vocab_size"]

    def made(experts: int) -> tuple[Job, nn.Module]:
        settings = [f"model={literal(_model_table(job, source, fusion, experts))}", *run_settings(out), *overrides]
        made_job = load_job(source.path / "job.toml", settings, catalog=catalog)
        return made_job, build_on_meta(made_job, vocab_size, build)

    whole_job, whole = made(1)
    copies = CopiedState(SavedModel(source), whole, seed)
    tensors: Any = copies
    if n_experts > 1:
        whole_job, whole = made(n_experts)
        tensors = UpcycledState(copies.shapes, whole, Upcycling(seed=seed), read=copies.__getitem__)
    provenance = {"fusion": fusion, "n_experts": n_experts, "seed": seed}
    write_upcycled(source, out, whole_job, whole, tensors, provenance=provenance, installed=installed)
    return Upcycled(len(copies.copied), sorted(copies.drawn), n_experts)


class CopiedState(Mapping[str, torch.Tensor]):
    """Parameters and persistent buffers of a model with weights for each modality, by name; each is read when it is
    asked for.

    Args:
        saved: a model with the same weights for both, or without images.
        model: the new one, on meta.
        seed: decides first values of what ``saved`` does not have, such as an encoder.

    Raises:
        ConfigError: the two differ in more than modalities.
    """

    def __init__(self, saved: SavedModel, model: nn.Module, seed: int) -> None:
        tensors = model_tensors(named_parameters([model]), [model])
        self.shapes = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
        """All of them, on meta."""
        self._saved = saved
        names = {name: name if name in saved.shapes else _copied_from(name) for name in self.shapes}
        self._sources = {name: there for name, there in names.items() if there is not None and there in saved.shapes}
        self.copied = {name for name, there in self._sources.items() if name != there}
        """Names of image tensors that are those of text."""
        self._refuse_misfits()
        drawing = Drawing(seed, lambda name: name not in self._sources)
        with torch.no_grad():
            model.init_weights(drawing)  # type: ignore[operator]  # the contract of a model
        self.drawn = {name: drawing.drawn[name] for name in self.shapes if name not in self._sources}
        """First values of what there is nothing for."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.drawn:
            return self.drawn[name]
        return self._saved.read(self._sources[name]).to(self.shapes[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _refuse_misfits(self) -> None:
        if strange := sorted(self._saved.shapes.keys() - set(self._sources.values())):
            raise ConfigError(f"the two models differ in more than modalities: the new one has no {strange[0]}")
        missing = [name for name in self.shapes if name not in self._sources and not name.startswith("vision.")]
        if missing:
            raise ConfigError(f"the two models differ in more than modalities: the run has no {missing[0]}")
        for name, there in self._sources.items():
            found, wanted = tuple(self._saved.shapes[there].shape), tuple(self.shapes[name].shape)
            if found != wanted:
                raise ConfigError(f"{there} of the run has shape {found}, and {name} of the new model {wanted}")


def _copied_from(name: str) -> str | None:
    found = next((match for one in _COPIES if (match := one.fullmatch(name))), None)
    return None if found is None else "".join(found.groups())


def _model_table(job: Job, source: Checkpoint, fusion: str, n_experts: int) -> dict[str, Any]:
    """The section ``[model]`` of the new job."""
    table: dict[str, Any] = {**plain(job.model), "name": _MODEL}
    config = job.model.config
    before = config.fusion if isinstance(config, VisionLanguageConfig) else None
    is_seed = before is not None and before.name == fusion == "moma"
    if not isinstance(config, TransformerConfig) or (before and before.name != "joint_decoder" and not is_seed):
        what = job.model.qualified_name + (f" with {before.name}" if before else "")
        raise ConfigError(
            f"{source.path}: its model is {what}; give a run of transformer, or of vision_language with joint_decoder"
            + (" or with moma of one expert" if fusion == "moma" else "")
        )
    table["fusion"] = {"name": fusion}
    if fusion == "moma":
        image: Any = before.config.image if is_seed and before is not None else config.feed_forward
        table["fusion"]["image"] = _layer(image, source, config.dim, n_experts)
        table["feed_forward"] = _layer(config.feed_forward, source, config.dim, n_experts)
    return table


def _layer(dense: Any, source: Checkpoint, dim: int, n_experts: int) -> Any:
    """A feed-forward layer of one modality."""
    if n_experts == 1:
        return plain(dense)
    if not isinstance(dense, ComponentRef) or not isinstance(dense.config, MLPConfig):
        name = dense.qualified_name if isinstance(dense, ComponentRef) else "none"
        raise ConfigError(f"{source.path}: its feed-forward layer is {name}; experts can be made of 'mlp' alone")
    width = dense.config.width(dim)
    layer = {"name": "forge-plugins-moe:moe", "n_experts": n_experts, "hidden_dim": width, "dense": plain(dense)}
    return {**layer, "router": _ROUTER}
