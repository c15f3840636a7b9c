"""A trained model and its tokenizer, from a checkpoint alone: whole, or in the layout of a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeAlias

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from forge_core.checkpoint.compatibility import installed, used_plugins
from forge_core.checkpoint.contents import leads_outside, model_problem
from forge_core.checkpoint.manifest import as_size
from forge_core.checkpoint.state_dict import model_tensors, named_parameters
from forge_core.checkpoint.store import Checkpoint
from forge_core.checkpoint.upgrading import module_changes
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.batch import Entry
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.parallel_pass import Folded, PassContext
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.distributed.fingerprint import refuse_unequal_ranks
from forge_core.distributed.mesh import build_mesh, choose_device, join_process_group
from forge_core.errors import ConfigError, ForgeError, noting
from forge_core.job import adding_passes, catalog_of, load_job, plain, sort_passes
from forge_core.registry.catalog import Catalog
from forge_core.train.build import BuiltModel, build_model, build_on_meta, cast_parameters, materialise
from forge_core.train.evaluation import NamedEvaluation, build_evaluations, held_out_loss
from forge_core.train.model_evaluator import ModelEvaluator
from forge_core.train.sources import EvaluatedData, TrainedOn

Weights: TypeAlias = Literal["training", "evaluation"]
"""The weights to read of a checkpoint: the trained ones, or averages that are evaluated in their place
(``HasEvaluationWeights``). ``None`` is averages if there are any."""

_BUFFER_BYTES = 2**30
"""A buffer that is not stored may have so many in any case."""


@attrs.frozen
class LoadedModel:
    """A whole model from a checkpoint, on one device, without passes. Parameters that a pass has added are folded into
    its weights."""

    job: Job
    model: nn.Module
    tokenizer: Tokenizer | None


def load_model(
    checkpoint: Checkpoint,
    catalog: Callable[[Collection[str]], Catalog],
    device: torch.device,
    dtype: torch.dtype | None,
    weights: Weights | None = None,
) -> LoadedModel:
    """Rebuild the model of ``checkpoint`` on ``device``, with parameters in ``dtype`` or in that of the file. The
    callbacks and trackers of its job need not be installed; the job comes without them.

    Raises:
        ConfigError: the checkpoint needs a component that is not installed, does not fit it, or has no such weights.
    """
    if problem := model_problem(checkpoint.path):
        raise ConfigError(f"checkpoint {checkpoint.path} cannot be used: {problem}")
    averages, state = _averages(checkpoint, weights), checkpoint.state()
    try:
        job = load_job(checkpoint.path / "job.toml", ["callbacks=[]", "trackers=[]"], catalog=catalog)
    except ConfigError as error:
        raise with_missing_plugins(error, checkpoint) from error
    _refuse_leading_outside(job, checkpoint)
    build = ComponentBuilder(catalog_of(job, catalog))
    model = build_within(checkpoint, job, state["vocab_size"], build)
    materialise(model, device, job.train.seed)
    checkpoint.load(_with(averages, _to_read(checkpoint, model)))
    _fold(model, checkpoint, averages, folded_weights(job, checkpoint, build, catalog_of(job, catalog)))
    if dtype is not None:
        cast_parameters(model, dtype)
    return LoadedModel(job, model, saved_tokenizer(checkpoint, build))


def folded_weights(job: Job, checkpoint: Checkpoint, build: ComponentBuilder, catalog: Catalog) -> Mapping[str, Folded]:
    """The weights of a checkpoint that passes have added parameters to, by name: how they are without these passes."""
    names = {key.removeprefix("model.") for key in checkpoint.saved_tensors() if key.startswith("model.")}
    found: dict[str, Folded] = {}
    for use in adding_passes(job, catalog).values():
        found |= build(use).folded(names)
    return found


def _fold(model: nn.Module, checkpoint: Checkpoint, averages: Collection[str], weights: Mapping[str, Folded]) -> None:
    def read(name: str) -> torch.Tensor:
        key = f"evaluation.{name}"
        return checkpoint.read(key if key in averages else f"model.{name}")

    for name, folded in weights.items():
        model.get_parameter(name).data.copy_(folded.make(*map(read, folded.reads)))


class CheckpointEvaluator(ModelEvaluator):
    """Of a model that is not trained: evaluations may ask it for the checkpoint."""

    checkpoint: Checkpoint


@attrs.frozen
class OpenModel:
    """A model from a checkpoint in the layout of a job, on all ranks of a process group."""

    checkpoint: Checkpoint
    context: PassContext
    """Mesh, job and device."""
    model: BuiltModel
    """This rank's parts, and the executor that runs them."""
    tokenizer: Tokenizer | None
    evaluations: Mapping[str, NamedEvaluation]
    """The job's, by label."""
    validation: DataSource | None
    """The data of the job's ``[eval]``."""
    log: Callable[[str], None]
    """Prints a line, on rank 0."""

    @contextmanager
    def evaluating(self) -> Iterator[ModelEvaluator]:
        """Put the model into evaluation mode without gradients, and give it as an ``EvaluationContext``. All ranks
        call it together."""
        evaluator = CheckpointEvaluator(self.context, self.model, self.tokenizer, self.log)
        evaluator.checkpoint = self.checkpoint
        with evaluator.evaluating():
            yield evaluator

    def evaluate(self) -> dict[str, float]:
        """All that the job asks for, by the names of ``metrics.jsonl``. All ranks call it together.

        Raises:
            ConfigError: the model has not what one of them is to measure; nothing is measured yet.
            PluginError: an evaluation gives something that is no number.
        """
        values: dict[str, float] = {}
        for one in self.evaluations.values():
            look_at = noting(f"raised by {one.words}")(one.evaluation.look_at)
            run_on_all_ranks(partial(look_at, self.model.parts, self.context.mesh, self.context.job))
        with self.evaluating() as evaluator:
            if self.validation is not None:
                samples = self.context.job.eval.batches * self._samples_per_step()
                values |= held_out_loss(evaluator, self.validation, samples)
            for one in self.evaluations.values():
                values |= one.run(evaluator)
        return values

    def _samples_per_step(self) -> int:
        """Those of the run, which has resolved them; a checkpoint that no run has written may not say."""
        train = self.checkpoint.job()["train"]
        return int(train.get("global_batch_size") or train["batch_size"])


@contextmanager
def opened(
    checkpoint: Checkpoint,
    job: Job,
    catalog: Catalog,
    log: Callable[[str], None],
    weights: Weights | None = None,
    entries: Mapping[str, Entry] | None = None,
) -> Iterator[OpenModel]:
    """Join the ranks that the environment describes, open the data that ``job`` evaluates, and read the model.

    Args:
        job: the checkpoint's, perhaps with other data, evaluations and degrees.
        log: prints a line; it is called on rank 0 only.
        entries: of the batches that the model is to be given, besides those of ``job``'s evaluations.

    Raises:
        ConfigError: the job does not fit the checkpoint, the ranks or this machine.
    """
    device = choose_device(job.run.device)
    join_process_group(device, job.run.first_step_timeout)
    try:
        run_on_all_ranks(lambda: refuse_unequal_ranks(job, catalog))
        mesh = run_on_all_ranks(lambda: build_mesh(job, device))
        run_on_all_ranks(lambda: _refuse_other_than(run_on_rank0(lambda: checkpoint.path.name), checkpoint))
        speak = log if mesh.rank == 0 else _say_nothing
        context = PassContext(mesh, job, device, entries=entries or {})
        model, tensors = run_on_all_ranks(lambda: _build(checkpoint, context, catalog, speak, weights))
        checkpoint.load(tensors)
        yield model
    finally:
        dist.destroy_process_group()


def _refuse_other_than(name: str, checkpoint: Checkpoint) -> None:
    """A run that goes on may save between two looks at its directory."""
    if checkpoint.path.name != name:
        raise ConfigError(f"this rank has found {checkpoint.path.name}, and rank 0 {name}; name one of them")


def _build(
    checkpoint: Checkpoint, context: PassContext, catalog: Catalog, log: Callable[[str], None], weights: Weights | None
) -> tuple[OpenModel, dict[str, torch.Tensor]]:
    """The model with its first values, and its tensors by their keys in the checkpoint, to be read into."""
    job, state, build = context.job, checkpoint.state(), ComponentBuilder(catalog)
    averages = _averages(checkpoint, weights)
    _refuse_leading_outside(job, checkpoint)
    tokenizer = saved_tokenizer(checkpoint, build)
    evaluated = EvaluatedData(job, TrainedOn(state["vocab_size"], tokenizer), build, lambda: None)
    named = {one.label: one for one in build_evaluations(job, build, evaluated, tokenizer)}
    validation = evaluated(job.eval.data, "eval.data") if job.eval.interval else None
    context = attrs.evolve(context, entries={**context.entries, **evaluated.entries})
    build_within(checkpoint, job, state["vocab_size"], build)
    model = build_model(context, state["vocab_size"], sort_passes(job, catalog), build)
    tensors = module_changes(model.parts, state.get("modules", {})).to_read(model.tensors())
    tensors = _with(averages, tensors)
    checkpoint.refuse_misfits(tensors)
    return OpenModel(checkpoint, context, model, tokenizer, named, validation, log), tensors


def _say_nothing(line: str) -> None:
    """On all ranks but rank 0."""


def with_missing_plugins(error: ConfigError, checkpoint: Checkpoint) -> ConfigError:
    """An error about a checkpoint's job, with the packages that it was written with and that are not installed."""
    used = used_plugins(checkpoint.job(), checkpoint.state().get("tokenizer"))
    versions = checkpoint.manifest.versions
    missing = [f"{name} {versions[name]}" for name in sorted(used) if name in versions and installed(name) is None]
    if not missing:
        return ConfigError(str(error))
    what = ", ".join(missing) + (", which is" if len(missing) == 1 else ", which are")
    return ConfigError(f"{error}\n{checkpoint.path} was written with {what} not installed")


def _refuse_leading_outside(job: Job, checkpoint: Checkpoint) -> None:
    """A path in a model's table that is not of the checkpoint may be a stranger's way to a file of this machine."""
    if (outside := leads_outside(plain(job.model))) is not None:
        raise ConfigError(f"{checkpoint.path}/job.toml: model: {outside!r} leads outside of the checkpoint")


def build_within(checkpoint: Checkpoint, job: Job, vocab_size: int, build: ComponentBuilder) -> nn.Module:
    """The model of ``job`` on meta, whose tensors are those of ``checkpoint``. What a stranger has written may mean any
    size; building stops as soon as it goes beyond what is stored.

    Raises:
        ConfigError: the model cannot be built, or has other tensors.
    """
    sizes = [entry.size.numel() for key, entry in checkpoint.saved_tensors().items() if key.startswith("model.")]
    most_parameters, most_values = 4 * len(sizes) + 100, sum(sizes)  # tied ones are made before they are one
    made = 0

    def refuse_more(_: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal made
        made += parameter is not None
        if made > most_parameters or (parameter is not None and parameter.numel() > most_values):
            raise ConfigError(
                f"{checkpoint.path}: job.toml describes another model than the one whose {len(sizes)} tensors of "
                f"{most_values:,} values are stored: it is larger (at {name!r})"
            )

    watch = register_module_parameter_registration_hook(refuse_more)
    try:
        model = build_on_meta(job, vocab_size, build)
    except ForgeError:
        raise
    except Exception as error:
        first_line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(
            f"{checkpoint.path}: the model that job.toml describes cannot be built ({first_line})"
        ) from error
    finally:
        watch.remove()
    checkpoint.refuse_misfits(_to_read(checkpoint, model))
    _refuse_large_buffers(checkpoint, model)
    return model


def _to_read(checkpoint: Checkpoint, model: nn.Module) -> dict[str, torch.Tensor]:
    """By their keys in the checkpoint."""
    changes = module_changes([model], checkpoint.state().get("modules", {}))
    return changes.to_read(model_tensors(named_parameters([model]), [model]))


def _averages(checkpoint: Checkpoint, weights: Weights | None) -> set[str]:
    """The keys of weights to be read in place of the trained ones.

    Raises:
        ConfigError: there are none, and they are asked for.
    """
    keys = {key for key in checkpoint.saved_tensors() if key.startswith("evaluation.")}
    if weights == "evaluation" and not keys:
        raise ConfigError(
            f"weights = 'evaluation': {checkpoint.path} has the trained ones alone; use 'training', or leave it out"
        )
    return set() if weights == "training" else keys


def _with(averages: Collection[str], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of ``_to_read``, by the keys of averages where there are such."""
    others = {key: key.replace("model.", "evaluation.", 1) for key in tensors}
    return {others[key] if others[key] in averages else key: tensor for key, tensor in tensors.items()}


def _refuse_large_buffers(checkpoint: Checkpoint, model: nn.Module) -> None:
    """The buffers that are not stored, such as tables of positions."""
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        n_bytes = buffer.numel() * buffer.itemsize
        if name not in stored and n_bytes > max(_BUFFER_BYTES, 16 * checkpoint.manifest.n_bytes):
            raise ConfigError(
                f"{checkpoint.path}: by its job.toml, {name} would take {as_size(n_bytes)}, and the whole checkpoint "
                f"has {as_size(checkpoint.manifest.n_bytes)}"
            )


def saved_tokenizer(checkpoint: Checkpoint, build: ComponentBuilder) -> Tokenizer | None:
    """Build the tokenizer that a checkpoint has beside its tensors, if its data had one.

    Raises:
        ConfigError: it names a file that the manifest does not, or it cannot be built.
    """
    table = checkpoint.state().get("tokenizer")
    if table is None:
        return None
    folder = checkpoint.path / "tokenizer"
    for name in filter(lambda value: isinstance(value, str), table.values()):
        if (folder / str(name)).exists() and f"tokenizer/{name}" not in checkpoint.manifest.files:
            raise ConfigError(f"{checkpoint.path}: tokenizer/{name} is not among the files that its manifest names")
    tokenizer: Tokenizer = build(build.resolve("tokenizer", table), base=folder)
    return tokenizer
