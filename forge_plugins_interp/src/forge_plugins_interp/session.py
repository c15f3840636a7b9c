"""A trained model, opened to be looked at and changed: on one process, or on the ranks that there are."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from forge_core.checkpoint.contents import model_problem
from forge_core.checkpoint.store import Checkpoint, find_checkpoint
from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import Job
from forge_core.contracts.batch import KNOWN, DescribedSource
from forge_core.contracts.data_source import DataSource
from forge_core.contracts.parallel_pass import PassContext
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.data.stream import SampleStream
from forge_core.distributed.environment import find_cluster, world_size_of
from forge_core.distributed.mesh import Mesh, build_mesh
from forge_core.errors import ConfigError
from forge_core.job import catalog_of, sort_passes
from forge_core.registry.catalog import Catalog
from forge_core.registry.discovery import discover
from forge_core.train.build import BuiltModel, build_model
from forge_core.train.sources import EvaluatedData, TrainedOn
from forge_plugins_inference.checkpoint_job import CheckpointJob
from forge_plugins_interp.aliases import canonical_site, module_names
from forge_plugins_interp.batch_shape import BATCH
from forge_plugins_interp.forwards import Forwards
from forge_plugins_interp.interventions import WholeIntervention
from forge_plugins_interp.observation import intervene, observe
from forge_plugins_interp.placement import summed, whole
from forge_plugins_interp.sites import PlacedSite, Sites
from forge_plugins_weights.loading import opened


class NotSeenError(ConfigError, KeyError):
    """A site has no value on this rank. It is a ``KeyError`` so that ``Seen.get`` and ``in`` work."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class Seen(Mapping[str, torch.Tensor]):
    """The values of one observation, by site: those of the last forward. Each is whole, in the order of tokens, on all
    ranks that hold its layer. Gathering happens as values come, on all ranks together."""

    def __init__(self, elsewhere: Mapping[str, int] | None = None) -> None:
        """
        Args:
            elsewhere: the sites of other pipeline stages, and which rank along ``pp`` has each.
        """
        self._elsewhere = elsewhere or {}
        self.forwards: dict[str, list[torch.Tensor]] = {}
        """The values of every forward, by site."""
        self._gradients: dict[tuple[str, int], torch.Tensor] = {}
        """By site and number of the forward."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """
        Raises:
            NotSeenError: this observation has no value of the site on this rank; the message says why.
        """
        names = _names(name)
        for one in names:
            if one in self.forwards:
                return self.forwards[one][-1]
        stages = [self._elsewhere[one] for one in names if one in self._elsewhere]
        if stages:
            raise NotSeenError(
                f"site {name}: another pipeline stage has it, that of rank {stages[0]} along pp; read it there"
            )
        seen = ", ".join(self.forwards) or "none, as no forward has run"
        raise NotSeenError(f"site {name}: it is not observed; the sites observed are {seen}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.forwards)

    def __len__(self) -> int:
        return len(self.forwards)

    def grad(self, name: str, forward: int = -1) -> torch.Tensor:
        """The gradient of what was differentiated, by the value of this site in a forward, by default the last one; of
        several backwards, their sum. It is there once the observation has ended.

        Args:
            forward: its number, as of ``forwards``.

        Raises:
            ConfigError: no gradient has come.
        """
        for one in _names(name):
            place = forward + len(self.forwards.get(one, ())) if forward < 0 else forward
            if (one, place) in self._gradients:
                return self._gradients[one, place]
        which = "the last forward" if forward == -1 else f"forward {forward}"
        raise ConfigError(
            f"site {name}: it has no gradient; observe with gradients = True, and call backward of a number that "
            f"depends on its value in {which} before the observation ends"
        )


def _names(name: str) -> tuple[str, ...]:
    """What a site may be called in an observation that is asked for by this name."""
    return (name, canonical_site(name), *module_names(canonical_site(name)))


class ObservedModel(ABC):
    """A model that is looked at and changed by its sites."""

    sites: Sites

    @property
    @abstractmethod
    def mesh(self) -> Mesh:
        """The ranks that it is on."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's."""

    @property
    @abstractmethod
    def batch_dims(self) -> tuple[str, ...]:
        """The names of the first dimensions of what it reads."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Samples of a forward of an extraction."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """Of random features."""

    @abstractmethod
    def run_batch(self, source: object, batch: Mapping[str, torch.Tensor]) -> None:
        """Run the model on what a data source has read.

        Args:
            source: it may describe the entries.
        """

    @contextmanager
    def observe(
        self, *patterns: str, at: Mapping[str, int | Sequence[int]] | None = None, gradients: bool = False
    ) -> Iterator[Seen]:
        """Look at sites while the context is entered.

        Args:
            patterns: names or patterns of sites; of modules (``blocks.0.attention.o``), where no site is called so.
            at: the part of each dimension to keep, such as ``{"position": -1}``; one index keeps the dimension.
            gradients: keep gradients, too.

        Raises:
            ConfigError: there is no such site, or none of the forwards has come to it; or gradients are asked for of a
                pipeline.
        """
        if gradients and self.mesh.degrees["pp"] > 1:
            raise ConfigError("gradients: a pipeline gives none of what it predicts; open the model with parallel.pp=1")
        chosen, seen = self.sites.chosen(patterns), Seen({**self.sites.modules_elsewhere, **self.sites.elsewhere})
        own: dict[tuple[str, int], torch.Tensor] = {}

        def take(placed: PlacedSite, value: torch.Tensor) -> None:
            if gradients and value.requires_grad:
                key = placed.name, len(seen.forwards.get(placed.name, ()))
                value.register_hook(lambda gradient: own.__setitem__(key, own.get(key, 0) + gradient))  # type: ignore[no-untyped-call]
            seen.forwards.setdefault(placed.name, []).append(_part(placed, whole(value, placed.cuts), at or {}))

        with observe(chosen, take):
            yield seen
        if seen.forwards:
            refuse_unseen(chosen, seen.forwards)
        if gradients:
            self._keep_gradients(chosen, own, seen, at or {})

    def _keep_gradients(
        self,
        chosen: Sequence[PlacedSite],
        own: Mapping[tuple[str, int], torch.Tensor],
        seen: Seen,
        at: Mapping[str, int | Sequence[int]],
    ) -> None:
        """Whole ones; those of parameters, which were not asked for, are dropped."""
        copies = self.mesh.degrees["cp"]  # each rank that has the logits of a sequence differentiates them
        for placed in chosen:
            for number in range(len(seen.forwards.get(placed.name, ()))):  # in one order on all ranks
                if (gradient := own.get((placed.name, number))) is not None:
                    made_whole = whole(summed(gradient, placed.sums), placed.cuts) / copies
                    seen._gradients[placed.name, number] = _part(placed, made_whole, at)
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def intervene(self, *changes: WholeIntervention) -> Iterator[None]:
        """Change sites while the context is entered, in the order of ``changes``.

        Raises:
            ConfigError: there is no such site, or it cannot be changed so.
        """
        chosen = [(change, *place) for change in changes for place in change.placed_on(self.sites)]
        is_selective = any(change.tokens or change.steps for change in changes)
        if is_selective and self.mesh.degrees["pp"] > 1:
            raise ConfigError(
                "tokens, steps: a stage of a pipeline does not know them; open the model with parallel.pp=1"
            )
        forwards = Forwards(self.sites.given[0])
        placed = [(one, functools.partial(forwards.changed, change, one, make)) for change, one, make in chosen]
        with forwards.watched() if is_selective else nullcontext(), intervene(placed):
            yield


@attrs.define(eq=False)
class Session(ObservedModel):
    """A model and what belongs to it. It is a context manager, which closes it."""

    context: PassContext
    """Its mesh, job and device."""
    built: BuiltModel
    """This rank's parts."""
    sites: Sites
    tokenizer: Tokenizer | None = None
    """The tokenizer that it was trained with."""
    checkpoint: Checkpoint | None = None
    """The checkpoint that it was opened from."""
    _open_data: Callable[[Sequence[str]], DataSource] | None = None
    _stack: ExitStack = attrs.field(factory=ExitStack)

    def open_data(self, settings: Sequence[str] = ()) -> DataSource:
        """Open data, read by index: all that ``settings`` name (``data.path=…``), or the part that the run holds out.

        Raises:
            ConfigError: the data cannot be opened, or do not fit the model.
        """
        if self._open_data is None:
            raise ConfigError("this model was not opened from a checkpoint, and so has no data")
        return self._open_data(settings)

    def model(self, tokens: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor | None:
        """Run the model in evaluation mode.

        Args:
            tokens: ``(B, S)`` int64, on any device, the same on all ranks that share the model.
            inputs: other entries of a batch, such as ``document`` and ``positions`` (``inputs_of``).

        Raises:
            ConfigError: the model needs an entry that is not given.

        Returns:
            Logits ``(B, S, V)``; ``None`` on ranks of earlier pipeline stages.
        """
        device, parts = self.context.device, self.built.parts
        for name in needed_entries(parts[0]):
            if name not in inputs:
                raise ConfigError(f"this model does not read tokens alone: it needs the entry {name!r} of a batch")
        batch = {name: entry.to(device) for name, entry in {"tokens": tokens, **inputs}.items()}
        if self.context.mesh.degrees["pp"] == 1:
            logits: torch.Tensor = parts[0](batch.pop("tokens"), **batch)
            return logits
        executor: Any = self.built.executor
        if torch.is_grad_enabled() and any(one.requires_grad for one in batch.values()):
            raise ConfigError("a pipeline gives no gradients of what it predicts; open the model with parallel.pp=1")
        predicted: torch.Tensor | None = executor.predict(batch)
        return predicted

    @property
    def mesh(self) -> Mesh:
        return self.context.mesh

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self.built.parameters

    @property
    def batch_dims(self) -> tuple[str, ...]:
        return BATCH

    @property
    def batch_size(self) -> int:
        return self.context.job.train.batch_size

    @property
    def seed(self) -> int:
        return self.context.job.train.seed

    def run_batch(self, source: object, batch: Mapping[str, torch.Tensor]) -> None:
        self.model(batch["tokens"], **inputs_of(source, batch))

    def close(self) -> None:
        """Free the model and leave the process group."""
        self._stack.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digest_of(checkpoint: Path) -> str:
    """A hash of all that a checkpoint has, by the manifest in its folder."""
    return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()


def read_batch(source: DataSource, numbers: np.ndarray) -> dict[str, torch.Tensor]:
    """Samples of a source, with ``tokens`` and ``targets``, also of one that has none."""
    arrays = SampleStream(source, seed=0, shuffle=False).read(numbers)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def needed_entries(part: nn.Module) -> list[str]:
    """The entries, beside tokens, without which a model's forward cannot run."""
    parameters = inspect.signature(part.forward).parameters.values()
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [one.name for one in parameters if one.kind in keyword and one.default is one.empty]
    return [name for name in needed if name not in ("tokens", "targets", "loss")]


def inputs_of(source: object, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries of a batch, but ``tokens``, that are for the model's forward.

    Args:
        source: it may describe them.
    """
    described = {**KNOWN, **(source.entries() if isinstance(source, DescribedSource) else {})}
    return {
        name: entry
        for name, entry in batch.items()
        if name not in ("tokens", "targets") and (name not in described or described[name].wanted_by == "model")
    }


def refuse_unseen(chosen: Sequence[PlacedSite], seen: Mapping[str, object]) -> None:
    """
    Raises:
        ConfigError: forwards have passed a site by, as a loss that takes the head's weight passes ``logits`` by.
    """
    for placed in chosen:
        if placed.name not in seen:
            raise ConfigError(f"site {placed.name}: the model has not computed it in any of the forwards")


def _part(placed: PlacedSite, value: torch.Tensor, at: Mapping[str, int | Sequence[int]]) -> torch.Tensor:
    for dim, index in at.items():
        if dim in placed.site.dims:
            indices = [index] if isinstance(index, int) else list(index)
            number, length = placed.site.dims.index(dim), value.shape[placed.site.dims.index(dim)]
            for one in indices:
                if not -length <= one < length:
                    raise ConfigError(f"at.{dim}: {one} lies beyond the {length} of site {placed.name}")
            where = torch.tensor([one % length for one in indices], device=value.device)
            value = value.index_select(number, where)
    return value


def initial_session(job: Job, catalog: Catalog, vocab_size: int, device: torch.device) -> Session:
    """Open a model with its initial values, in the layout of the job. All ranks of a process group call it together.

    Args:
        job: for as many ranks.
    """
    mesh, build = build_mesh(job, device), ComponentBuilder(catalog)
    context = PassContext(mesh, job, device, entries=job.data.config.entries())
    built = build_model(context, vocab_size, sort_passes(job, catalog), build)
    for part in built.parts:
        part.eval()
    return Session(context, built, Sites.of(built.parts, [one.use for one in built.applied], mesh, build))


def open_session(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    catalog: Callable[[Collection[str]], Catalog] = discover,
    log: Callable[[str], None] = print,
) -> Session:
    """Open a run's newest checkpoint, or a checkpoint.

    On one process it has no layout. On ranks of a launcher it has that of the run, unless ``overrides`` have degrees
    (``parallel.tp=2``).

    Args:
        path: a run's directory, or a checkpoint's.
        overrides: settings of the job.
        catalog: the installed plugins without these distributions.
        log: prints a line.

    Raises:
        ConfigError: there is no checkpoint, or it does not fit the ranks.
    """
    checkpoint = find_checkpoint(Path(path), log, model_problem)
    ranks = world_size_of(os.environ, find_cluster(catalog(()), os.environ)) or 1
    given = CheckpointJob.of(checkpoint, overrides, catalog, ranks)
    given.table.pop("eval", None)
    given.table.pop("evaluations", None)
    job = given.load(overrides)
    of_job = catalog_of(job, catalog)
    stack, build = ExitStack(), ComponentBuilder(of_job)
    model = stack.enter_context(opened(checkpoint, job, of_job, log, entries=job.data.config.entries()))
    for part in model.model.parts:
        part.eval()

    def open_data(settings: Sequence[str]) -> DataSource:
        training = TrainedOn(checkpoint.state()["vocab_size"], model.tokenizer)
        use = given.load([*overrides, *settings]).data if settings else None
        return EvaluatedData(job, training, build, lambda: None)(use, "data")

    sites = Sites.of(model.model.parts, [one.use for one in model.model.applied], model.context.mesh, build)
    return Session(
        model.context, model.model, sites, model.tokenizer, checkpoint=checkpoint, open_data=open_data, stack=stack
    )
