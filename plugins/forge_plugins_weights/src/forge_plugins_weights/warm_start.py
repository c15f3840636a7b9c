"""Beginning with tensors of other runs: ``[checkpoint.load]``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import torch

from forge_core.checkpoint.contents import model_problem
from forge_core.checkpoint.state_dict import empty_optimizer_state
from forge_core.checkpoint.store import Checkpoint, find_checkpoint
from forge_core.config.builder import ComponentBuilder
from forge_core.config.problems import ConfigProblems, Problem, key_path
from forge_core.config.sections import Job, LoadSection
from forge_core.contracts.model import longest_first
from forge_core.contracts.parallel_pass import AddingPass
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.contracts.warm_start import WarmStart
from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError, nearest
from forge_core.job import adding_passes
from forge_core.registry.catalog import Catalog
from forge_core.train.build import BuiltModel
from forge_plugins_weights.foreign_weights import ForeignWeights, find_foreign_weights
from forge_plugins_weights.loading import saved_tokenizer

_WEIGHTS = ("model.", "evaluation.")


@attrs.frozen
class _Chosen:
    """A part of a checkpoint to load."""

    key: str
    """Names the section in messages: ``checkpoint.load``, or an entry of it."""
    checkpoint: Checkpoint | ForeignWeights
    here: Mapping[str, str]
    """Keys of the checkpoint that the patterns match, and the keys that they have in this run."""
    others: frozenset[str]
    added: Mapping[str, Sequence[str]] = {}
    """Of each weight that a pass adds to: the keys of what it adds, all of the checkpoint."""


@attrs.frozen
class Loaded:
    """The fate of every tensor, by sorted keys, over all ranks."""

    source: str
    loaded: Sequence[str]
    """By the keys of this run."""
    left_out: Sequence[str]
    """Keys of the checkpoint that the patterns exclude."""
    without_a_place: Sequence[str]
    """Keys of the checkpoint that are chosen, and that this run does not have."""
    fresh: Sequence[str]
    """Tensors of this run's model that keep their first values."""


class LoadedTensors(WarmStart):
    """Same as ``WarmStart``, of checkpoints and of folders that an installed ``weight_source`` reads."""

    def __init__(self, *, job: Job, catalog: Catalog, say: Callable[[str], None]) -> None:
        self._job = job
        self._catalog = catalog
        self._say = say
        self._starts: Sequence[_Chosen] = ()

    def choose(self) -> None:
        """Resolve ``checkpoint.load``.

        Raises:
            ConfigError: there is no whole checkpoint; a pattern means nothing in it; what is chosen would not be the
                state of this optimizer; or two sections load the same tensor.
        """
        self._starts = _choose_all(self._job, self._catalog, self._say)

    def look_at(self, tokenizer: Tokenizer | None) -> None:
        """Say which of the runs had another tokenizer: their embedding knows its ids, and not those of this one."""
        if tokenizer is not None:
            for line in run_on_rank0(lambda: [*_other_tokenizers(self._starts, tokenizer, self._catalog)]):
                self._say(line)

    @property
    def sources(self) -> Sequence[Path]:
        return [start.checkpoint.path for start in self._starts]

    def load(self, model: BuiltModel, optimizer: torch.optim.Optimizer, mesh: Mesh) -> Mapping[str, Any]:
        """Read what was chosen into model and optimizer, each rank its own part, and report what else there is.

        Raises:
            ConfigError: a tensor has another shape or dtype here; or nothing of what was chosen has a place.
        """
        reads = [_load(start, model, optimizer, mesh) for start in self._starts]
        tensors = {key for stage in mesh.gather_over("pp", sorted(model.tensors())) for key in stage}
        fresh = sorted(tensors.difference(*reads))
        loads = [
            Loaded(
                source=str(start.checkpoint.path),
                loaded=sorted(read),
                left_out=sorted(start.others),
                without_a_place=sorted(there for there, here in start.here.items() if here not in read),
                fresh=fresh,
            )
            for start, read in zip(self._starts, reads, strict=True)
        ]
        for start in self._starts:
            if isinstance(start.checkpoint, Checkpoint):
                start.checkpoint.forget_tensors()
        _tell(loads, self._say)
        accounts = [attrs.asdict(one) for one in loads]
        return {"loads": accounts} if isinstance(self._job.checkpoint.load, tuple) else accounts[0]


def _choose_all(job: Job, catalog: Catalog, report: Callable[[str], None]) -> list[_Chosen]:
    starts: list[_Chosen] = []
    for index, section in enumerate(job.checkpoint.loads):
        at = f"checkpoint.load[{index}]" if isinstance(job.checkpoint.load, tuple) else "checkpoint.load"
        path = section.path.expanduser()
        try:
            foreign = find_foreign_weights(path, job, catalog, report)
            found = foreign or find_checkpoint(path, report, model_problem)
        except ConfigError as error:
            if not str(error):  # rank 0 says it
                raise
            raise ConfigProblems([Problem(key_path(f"{at}.path"), str(error))]) from error
        start = _choose(at, section, found)
        start = _with_added(job, start, catalog)
        _refuse_foreign_optimizer(job, start)
        for before in starts:
            if both := set(before.here.values()) & set(start.here.values()):
                raise ConfigError(
                    f"{at}: {before.key} loads {_some(both)} already; leave them out of one of the two with exclude"
                )
        starts.append(start)
    return starts


def _other_tokenizers(starts: Sequence[_Chosen], tokenizer: Tokenizer, catalog: Catalog) -> Iterator[str]:
    for start in starts:
        if isinstance(start.checkpoint, ForeignWeights) or not _has_ids(start, start.checkpoint):
            continue
        try:
            theirs = saved_tokenizer(start.checkpoint, ComponentBuilder(catalog))
        except ConfigError:  # such as that its package is not installed; the weights do without
            continue
        if theirs is not None and theirs.fingerprint != tokenizer.fingerprint:
            yield (
                f"warning: {start.key}: {start.checkpoint.path} was trained with another tokenizer, by which these ids "
                f"are other tokens; give the data that one, which is in {start.checkpoint.path / 'tokenizer'}, or "
                f"leave embedding and head out with {start.key}.exclude"
            )


def _has_ids(start: _Chosen, checkpoint: Checkpoint) -> bool:
    """Return whether a weight is chosen that has a row for each token: an embedding or a head."""
    size, described = checkpoint.state()["vocab_size"], checkpoint.saved_tensors()
    return any(key.startswith(_WEIGHTS) and size in described[key].size for key in start.here)


def _load(start: _Chosen, model: BuiltModel, optimizer: torch.optim.Optimizer, mesh: Mesh) -> set[str]:
    """Read what was chosen of one checkpoint; return the keys of this run that it has, on all pipeline stages."""
    checkpoint, there = start.checkpoint, {here: there for there, here in start.here.items()}
    own = model.tensors()
    tensors = {there[key]: tensor for key, tensor in own.items() if key in there}
    in_all_stages = {name for stage in mesh.gather_over("pp", [*model.parameters]) for name in stage}
    state = {
        before
        for before, here in start.here.items()
        if here.startswith("optimizer.") and _parameter(here) in in_all_stages
    }
    names_there = {_parameter(here): _parameter(before) for before, here in start.here.items() if before in state}
    names = {names_there[name]: parameter for name, parameter in model.parameters.items() if name in names_there}

    def match() -> None:
        saved = {key: entry for key, entry in checkpoint.saved_tensors().items() if key in state}
        facts = _optimizer_facts(checkpoint)
        values = {key: value for key, value in facts["values"].items() if key in state}
        elsewhere = {there for name, there in names_there.items() if name not in model.parameters}
        tensors.update(empty_optimizer_state(optimizer, names, saved, {**facts, "values": values}, elsewhere))
        try:
            checkpoint.refuse_misfits(tensors)
        except ConfigError as error:
            raise ConfigError(f"{start.key}: {error}\nLeave them out with {start.key}.exclude.") from error

    run_on_all_ranks(match)  # before they read together
    ours = sorted({start.here[key] for key in {*tensors, *state}})
    read = {key for stage in mesh.gather_over("pp", ours) for key in stage}
    run_on_all_ranks(lambda: _refuse_nothing(start, read, own))
    run_on_all_ranks(lambda: _refuse_halves(start, read))
    checkpoint.load(tensors)
    return read


def _refuse_nothing(start: _Chosen, read: Collection[str], own: Collection[str]) -> None:
    if not read:
        raise ConfigError(
            f"{start.key}: nothing that was chosen of {start.checkpoint.path} has a place in this run: "
            f"{_some(start.here.values())}; this model has {_some(own)}"
        )


def _refuse_halves(start: _Chosen, read: Collection[str]) -> None:
    for weight, added in start.added.items():
        lost = [key for key in added if key in start.here and start.here[key] not in read]
        if lost and start.here.get(weight) in read:
            raise ConfigError(
                f"{start.key}: {lost[0]} adds to {weight}, and has no place in this run; let the pass include its "
                f"layer, or leave it out with {start.key}.exclude"
            )


def _tell(accounts: Sequence[Loaded], report: Callable[[str], None]) -> None:
    for one in accounts:
        for words, keys in (
            (f"loaded from {one.source}", one.loaded),
            ("left out by checkpoint.load", one.left_out),
            ("in the checkpoint, but not in this run", one.without_a_place),
        ):
            if keys:
                report(f"{words}: {_some(keys)}")
    if accounts and accounts[0].fresh:
        report(f"not loaded, with their first values: {_some(accounts[0].fresh)}")


def _choose(at: str, section: LoadSection, checkpoint: Checkpoint | ForeignWeights) -> _Chosen:
    keys = {*checkpoint.saved_tensors(), *_optimizer_facts(checkpoint)["values"]}
    for name, patterns in (("include", section.include), ("exclude", section.exclude)):
        _refuse_idle(f"{at}.{name}", patterns, keys, section)
    _refuse_idle(f"{at}.rename", [*section.rename], {_name(key) for key in keys}, section)
    included = {key for key in keys if _matches(key, section.include)}
    chosen = {key for key in included if not _matches(key, section.exclude)}
    if not chosen:
        raise ConfigError(f"{at}: exclude = {[*section.exclude]} leaves nothing of include = {[*section.include]}")
    here = {key: _renamed(key, section.rename) for key in chosen}
    if twice := [one for one, count in Counter(here.values()).items() if count > 1]:
        both = " and ".join(sorted(key for key in chosen if here[key] == twice[0]))
        raise ConfigError(f"{at}.rename: {both} would both be {twice[0]}; leave one out with exclude")
    return _Chosen(at, checkpoint, here, frozenset(keys - chosen))


def _refuse_idle(at: str, patterns: Sequence[str], found: Collection[str], section: LoadSection) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(one, pattern) for one in found):
            near = nearest(pattern, found)
            hint = f"did you mean '{near}'?" if near else f"it has {_some(found)}"
            raise ConfigError(f"{at}: {pattern!r} means nothing in {section.path}; {hint}")


def _renamed(key: str, rename: Mapping[str, str]) -> str:
    """The key in this run of what has ``key`` in a checkpoint: weights that were evaluated are the model's here."""
    name, is_weight = _name(key), key.startswith(_WEIGHTS)
    for there in longest_first(rename):
        found = re.fullmatch("(.*)".join(map(re.escape, there.split("*"))), name)
        if found:
            first, *rest = rename[there].split("*")
            new = first + "".join(part + text for part, text in zip(found.groups(), rest, strict=True))
            return f"model.{new}" if is_weight else f"optimizer.{new}.{key.rpartition('.')[2]}"
    return f"model.{name}" if is_weight else key


def _name(key: str) -> str:
    """The parameter or buffer that a key is about."""
    return key.partition(".")[2] if key.startswith(_WEIGHTS) else _parameter(key)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _with_added(job: Job, start: _Chosen, catalog: Catalog) -> _Chosen:
    """The weights alone, without what a pass has added to them, would be another model's."""
    if isinstance(start.checkpoint, ForeignWeights):
        return start
    passes = start.checkpoint.job().get("parallel", {}).get("passes", {})
    here = {use.qualified_name: use for use in adding_passes(job, catalog).values()}
    build, added = ComponentBuilder(catalog), dict[str, Sequence[str]]()
    for key, table in passes.items():
        keys = {"name": key, **table} if isinstance(table, Mapping) else {"name": key}
        name = keys["name"]
        adds = any(getattr(one.component, "adds_parameters", False) for one in catalog.providers("parallel_pass", name))
        if table is False or not adds:
            continue
        if name not in here:
            raise ConfigError(
                f"{start.key}: {start.checkpoint.path} was trained with the pass {key}, whose parameters this job has "
                "not; name it in parallel.passes too, or fold them into the weights with forge convert, and load that"
            )
        added |= _added(start, key, build(build.resolve("parallel_pass", keys)), build(here[name]))
    return attrs.evolve(start, added=added)


def _added(start: _Chosen, key: str, there: AddingPass, here: AddingPass) -> dict[str, Sequence[str]]:
    """What one pass adds. A layer that is not in ``own`` has no adapter here, which ``_refuse_halves`` sees to."""
    names = sorted({_name(key) for key in start.here})
    own = here.folded(names)
    found = there.folded(names)
    for weight in sorted(found.keys() & own.keys()):
        if found[weight].scale != own[weight].scale:
            raise ConfigError(
                f"{start.key}: {start.checkpoint.path} has the pass {key} with the scale {found[weight].scale}, and "
                f"this job with {own[weight].scale}; restore its keys, or leave out its parameters with "
                f"{start.key}.exclude"
            )
    return {
        f"{kind}{weight}": [f"{kind}{one}" for one in folded.reads if one != weight]
        for weight, folded in found.items()
        for kind in _WEIGHTS
    }


def _refuse_foreign_optimizer(job: Job, start: _Chosen) -> None:
    """State of another kind of optimizer, or only a part of what it keeps of a parameter, would fail in the first
    step."""
    state = {key for key in start.here if key.startswith("optimizer.")}
    if not state or isinstance(start.checkpoint, ForeignWeights):
        return
    path = start.checkpoint.path
    saved = start.checkpoint.job().get("optimizer", {}).get("name")
    if saved != job.optimizer.qualified_name:
        raise ConfigError(
            f"{start.key}: {path} has state of the optimizer {saved}, and this job has "
            f'{job.optimizer.qualified_name}; leave it out with exclude = ["optimizer.*"]'
        )
    for key in sorted(start.others):
        if key.startswith("optimizer.") and any(_parameter(one) == _parameter(key) for one in state):
            raise ConfigError(
                f"checkpoint.load: the patterns leave out {key}, but not all state of {_parameter(key)}; an optimizer "
                "needs all of it or none"
            )


def _optimizer_facts(checkpoint: Checkpoint | ForeignWeights) -> Mapping[str, Any]:
    return checkpoint.state().get("optimizer") or {"values": {}, "on_host": []}


def _parameter(key: str) -> str:
    return key.removeprefix("optimizer.").rpartition(".")[0]


def _some(keys: Collection[str]) -> str:
    more = ", …" if len(keys) > 3 else ""
    return f"{len(keys)} tensors ({', '.join(sorted(keys)[:3])}{more})"
