"""The keys of autoencoders, of their data and of their evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import attrs
from attrs.validators import ge, gt, lt, min_len

from forge_core.api import ComponentRef, Slot
from forge_core.contracts.batch import Entry
from forge_core.contracts.data_source import DataSourceConfig
from forge_core.contracts.evaluation import EvaluationConfig

if TYPE_CHECKING:
    from forge_core.config.sections import Job


@attrs.frozen(kw_only=True)
class AutoencoderConfig:
    """The keys of every autoencoder. ``[loss] name = "own"`` goes with them: they have losses of their own."""

    vocab_size: ClassVar[int] = 1
    """They predict no tokens."""

    width: int = attrs.field(validator=ge(1))
    """Features of the site, or of the one that a transcoder reads."""
    latents: int = attrs.field(validator=ge(1))
    """Size of the dictionary."""
    dead_after: int = attrs.field(default=10_000_000, validator=ge(1))
    """Rows without firing, after which a latent is dead."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """A width that is not the data's, data without activations, and a loss that is not used."""
        if job.loss.name != "own":
            yield "", f"has a loss of its own, so that loss.name = {job.loss.name!r} has no effect; name 'own'"
        entries = _entries(job)
        for axis in ("pp", "cp", "tp"):
            if getattr(job.parallel, axis) > 1:
                yield "", f"is of one layer, and is not cut: set parallel.{axis} = 1; dp_shard takes further ranks"
        if "activation" not in entries:
            yield (
                "",
                f"reads activations, which {job.data.name} does not have; choose activation_store or activations_of",
            )
            return
        size = entries["activation"].sizes[-1]
        if size is not None and size != self.width:
            site = getattr(job.data.config, "site", "")
            yield "width", f"{self.width} is not the width of the site {site!r}, which is {size}"
        yield from self.check_target(entries)

    def check_target(self, entries: Mapping[str, Entry]) -> Iterable[tuple[str, str]]:
        """Data with a target that is not read."""
        if "target_activation" in entries:
            yield "", "reads one site; leave data.target_site out, or choose the model transcoder"


def _entries(job: Job) -> Mapping[str, Entry]:
    config = job.data.config
    return config.entries() if isinstance(config, DataSourceConfig) else {}


def _within_latents(config: TopKConfig, _: object, value: int) -> None:
    if value > config.latents:
        raise ValueError(f"must be at most latents = {config.latents}, got {value}")


@attrs.frozen(kw_only=True)
class TopKConfig(AutoencoderConfig):
    """The k largest latents of each row (Gao et al. 2024, arXiv 2406.04093)."""

    k: int = attrs.field(validator=[ge(1), _within_latents])
    """Active latents of a row."""
    aux_coefficient: float = attrs.field(default=1 / 32, validator=ge(0))
    """Of the loss by which dead latents reconstruct what is left over."""


@attrs.frozen(kw_only=True)
class BatchTopKConfig(TopKConfig):
    """The k · rows largest latents of a microbatch (Bussmann et al. 2024, arXiv 2412.06410). An evaluation takes those
    above a threshold, a moving average of the least that was active."""

    threshold_decay: float = attrs.field(default=0.999, validator=[ge(0), lt(1)])
    """Of that average, a step."""


def _ascending(config: MatryoshkaConfig, _: object, value: tuple[int, ...]) -> None:
    if list(value) != sorted(set(value)):
        raise ValueError(f"must grow, got {list(value)}")
    if value[0] < 1 or value[-1] >= config.latents:
        raise ValueError(f"must be from 1 to latents − 1 = {config.latents - 1}, got {list(value)}")


@attrs.frozen(kw_only=True)
class MatryoshkaConfig(TopKConfig):
    """Each prefix of the dictionary reconstructs by itself (Bussmann et al. 2025, arXiv 2503.17547)."""

    prefixes: tuple[int, ...] = attrs.field(validator=[min_len(1), _ascending])
    """Sizes of the prefixes, such as ``[64, 256, 1024]``; the whole dictionary comes on top."""


@attrs.frozen(kw_only=True)
class JumpReluConfig(AutoencoderConfig):
    """Latents above a threshold of their own, which is learned (Rajamanoharan et al. 2024, arXiv 2407.14435)."""

    l0_coefficient: float = attrs.field(validator=ge(0))
    """Of the number of active latents, beside the squared error a feature."""
    bandwidth: float = attrs.field(default=0.05, validator=gt(0))
    """Of the rectangle that stands for the derivative of the step."""
    initial_threshold: float = attrs.field(default=0.05, validator=gt(0))
    """Of every latent."""


@attrs.frozen(kw_only=True)
class TranscoderConfig(TopKConfig):
    """From the input of a layer to its output (Dunefsky et al. 2024, arXiv 2406.11944), by the k largest latents."""

    target_width: int = attrs.field(validator=ge(1))
    """Features of what is predicted."""
    skip: bool = False
    """A linear map from the input on top (Paulo et al. 2025, arXiv 2501.18823), zero at first."""

    def check_target(self, entries: Mapping[str, Entry]) -> Iterable[tuple[str, str]]:
        """Data without a target, and another width of it."""
        if "target_activation" not in entries:
            yield "", "predicts another site; name it as data.target_site"
        elif (size := entries["target_activation"].sizes[-1]) is not None and size != self.target_width:
            yield "target_width", f"{self.target_width} is not the width of data.target_site, which is {size}"


@attrs.frozen(kw_only=True)
class ActivationStoreConfig(DataSourceConfig):
    """Rows of a store that ``forge extract`` has written, each position of a sample a row, in random order."""

    path: str = attrs.field(validator=min_len(1))
    """The folder of the store. Relative to the working directory."""
    site: str = attrs.field(validator=min_len(1))
    """The site whose values are read."""
    target_site: str = ""
    """The site that a transcoder predicts."""
    validation: float = attrs.field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """The share of the store's samples that is held out, its last ones: whole documents, so that no neighbours of a
    held-out row are trained on."""
    scale: bool = True
    """Divide by a number, so that the mean norm of rows is √width; what a model reconstructs is scaled back."""

    def entries(self) -> Mapping[str, Entry]:
        """The activations, with their widths, from the manifest of the store."""
        from forge_plugins_interp.autoencoders.store_source import width_of

        dims = ("sample", "position", "width")
        found = {"activation": Entry(dims=dims, dtype="float32", sizes=(None, None, width_of(self, "site")))}
        if self.target_site:
            size = width_of(self, "target_site")
            found["target_activation"] = Entry(dims=dims, dtype="float32", sizes=(None, None, size))
        return {**found, "scales": Entry(dims=("sample", "which"), dtype="float32", sizes=(None, 2))}

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Evaluations without data."""
        if job.data.config is self and job.eval.data is None and job.eval.interval > 0 and self.validation == 0:
            yield (
                "validation",
                "is 0, so that eval.interval has nothing to evaluate; hold some out, or set it to 0",
            )

    def missing(self) -> Iterable[str]:
        """The store, if it is not there."""
        if not (Path(self.path) / "manifest.json").exists():
            yield f"{self.path} is no store of activations: it has no manifest.json"


@attrs.frozen(kw_only=True)
class ActivationsOfConfig(DataSourceConfig):
    """What a trained model computes on its data, which is run for each batch: no store, and no end of disk. A sample is
    one of these data, with its positions in their order. Each rank holds the whole model."""

    run: str = attrs.field(validator=min_len(1))
    """A run's directory (its newest checkpoint) or a checkpoint's. Relative to the working directory. Name a checkpoint
    of a run that still goes on: a resume refuses another one."""
    site: str = attrs.field(validator=min_len(1))
    """The site whose values are read."""
    target_site: str = ""
    """The site that a transcoder predicts."""
    inputs: Annotated[ComponentRef | None, Slot("data_source")] = None
    """What the model reads; by default the data of the run."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the model."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the model runs; ``auto`` is this rank's GPU, if it has one."""
    scale: bool = True
    """Divide by a number, so that the mean norm of rows is √width; what a model reconstructs is scaled back."""

    def entries(self) -> Mapping[str, Entry]:
        """The activations; their widths are known once the model is there."""
        entry = Entry(dims=("sample", "position", "width"), dtype="float32", sizes=(None, None, None))
        names = ("activation", "target_activation") if self.target_site else ("activation",)
        scales = Entry(dims=("sample", "which"), dtype="float32", sizes=(None, 2))
        return {**dict.fromkeys(names, entry), "scales": scales}

    def missing(self) -> Iterable[str]:
        """The run, if it is not there."""
        if not Path(self.run).is_dir():
            yield f"{self.run} is no run and no checkpoint: there is no such folder"


@attrs.frozen(kw_only=True)
class AutoencoderEvaluationConfig(EvaluationConfig):
    """How much of held-out activations an autoencoder explains, and with how many latents."""

    samples: int = attrs.field(default=0, validator=ge(0))
    """How many sequences of ``train.seq_len`` rows, from the first; 0 takes all."""

    def check(self, job: Job) -> Iterable[tuple[str, str]]:
        """Data without activations."""
        if "activation" not in _entries(job):
            yield "name", f"measures autoencoders, such as the model topk_sae, and [data] is {job.data.name}; remove it"
