"""From a TOML file to a ``Job``, and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import attrs

from forge_core.config.builder import ComponentBuilder, takes
from forge_core.config.converter import EXPECTED_STRING, structure
from forge_core.config.overrides import settings_in, with_overrides
from forge_core.config.problems import ConfigProblems, InvalidError, KeyPath, Problem, key_path, key_text
from forge_core.config.regular_file import read_regular_file
from forge_core.config.sections import Job, PhaseSection, PluginsSection, TrainSection, setting_of
from forge_core.config.shorthands import as_written
from forge_core.config.toml_file import Document, layered, read_document, table_at, with_file_texts
from forge_core.config.unstructure import plain
from forge_core.contracts.component_ref import ComponentRef
from forge_core.contracts.data_source import DataSourceConfig
from forge_core.contracts.phase_plan import DEFAULT as PHASE_PLAN
from forge_core.contracts.warm_start import DEFAULT as WARM_START
from forge_core.errors import ConfigError, nearest
from forge_core.passes.order import (
    add_required,
    adding_passes,
    conflict_problems,
    pass_problems,
    resolve_degrees,
    sort_passes,
)
from forge_core.registry.catalog import Catalog
from forge_core.registry.component import kind_words
from forge_core.registry.entry_points import canonical_distribution
from forge_core.registry.imports import why_undefined
from forge_core.registry.plugin_files import PROVIDER, with_files
from forge_core.registry.plugin_output import output_of

__all__ = ["SECTIONS", "ConfigProblems", "InvalidError", "Problem", "adding_passes", "base_model", "catalog_of"]
__all__ += ["check_device", "components", "data_phase", "deprecations", "disabled_plugins", "dump_job", "job_table"]
__all__ += ["key_path", "load_job", "notes", "placed", "plain", "read_document", "read_regular_file"]
__all__ += ["resolve_degrees", "settings_of", "sort_passes", "structure", "summary"]

SECTIONS = tuple(field.name for field in attrs.fields(Job))
"""The keys at the root of a configuration, besides ``extends``."""


def load_job(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    catalog: Callable[[Collection[str]], Catalog] | Catalog,
    world_size: int | None = None,
    options: Collection[str] = (),
) -> Job:
    """Read, merge, convert, complete and check a configuration.

    Args:
        path: a TOML file, possibly a ``job.toml``.
        overrides: settings of the command line, as typed.
        catalog: what is installed, or a function that finds it, given the distributions that the job disables.
        world_size: ranks of the run. ``None`` leaves out what depends on it: the accumulation that
            ``global_batch_size`` needs, and passes that ``dp_shard = -1`` may need.
        options: the options of the command that the overrides come from, for a hint if one is misspelt.

    Raises:
        ConfigError: with everything that is wrong. ``ConfigProblems`` if the files could be read.
    """
    document = _with_overrides(read_document(path), overrides, options)
    plugins = _plugins_section(document.table)
    installed = catalog(plugins.disable) if callable(catalog) else catalog
    problems = _plugin_problems(plugins, installed, disables=callable(catalog))
    try:
        installed = with_files(installed, plugins.texts)
    except ConfigError as error:
        raise ConfigProblems([_placed(Problem(("plugins", "files"), str(error)), document)], str(path)) from error
    try:
        job = structure(document.table, Job, installed)
    except InvalidError as error:
        problems += error.problems
        raise ConfigProblems([_placed(problem, document) for problem in problems], str(path)) from error
    job, found = _completed(job, path.stem, installed, world_size)
    problems += [*(problem.moved(lambda path: _written(path, job)) for problem in found)]
    problems = [_blamed_on_its_cause(problem, job, document, installed) for problem in problems]
    problems += _ineffective(job, document.table)
    if problems:
        raise ConfigProblems([_placed(problem, document) for problem in problems], str(path))
    return job


def catalog_of(job: Job, catalog: Callable[[Collection[str]], Catalog]) -> Catalog:
    """The plugins that a job sees: those of ``catalog`` that it does not disable, and its files.

    Raises:
        ConfigError: as ``load_job`` does for its files.
    """
    return with_files(catalog(job.plugins.disable), job.plugins.texts)


def placed(error: ConfigProblems, path: Path, overrides: Sequence[str]) -> ConfigProblems:
    """Problems of a configuration that a run has found, with the places of its values."""
    document = _with_overrides(read_document(path), overrides)
    return ConfigProblems([one if one.location else _placed(one, document) for one in error.problems], str(path))


def settings_of(section: str, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The settings of the command line that are about a section, and the others, both as typed."""
    ours: list[str] = []
    others: list[str] = []
    for words in settings_in(overrides, SECTIONS):
        key = words[0].removeprefix("--").partition("=")[0]
        (ours if key.partition(".")[0] == section else others).extend(words)
    return ours, others


def disabled_plugins(path: Path, overrides: Sequence[str], options: Collection[str]) -> tuple[str, ...]:
    """The distributions that a configuration disables, before anything else of it is looked at."""
    return _plugins_section(_with_overrides(read_document(path), overrides, options).table).disable


def _with_overrides(document: Document, overrides: Sequence[str], options: Collection[str] = ()) -> Document:
    """With settings of the command line, where names of files are relative to the working directory."""
    return with_file_texts(with_overrides(document, overrides, sections=SECTIONS, options=options), Path())


def job_table(job: Job) -> dict[str, Any]:
    """The job as plain TOML data, with qualified names of components. What is ``None`` is left out."""
    table: dict[str, Any] = plain(job)
    if job.train.global_batch_size is not None:
        table["train"].pop("grad_accumulation", None)  # it follows, for any number of ranks
    for *way, key in _without_effect(job):
        table_at(table, way).pop(key, None)
    return table


def dump_job(job: Job) -> str:
    """The job as TOML. Loaded again, it is an equal job, and gives the same text."""
    import tomli_w  # reading a configuration does not need it

    table = job_table(job)
    if not job.plugins.texts:
        return tomli_w.dumps(table)
    del table["plugins"]["files"]
    texts = [f"{tomli_w.dumps({name: ''})[:-3]}{_text_of_lines(text)}\n" for name, text in job.plugins.texts.items()]
    return "\n".join([tomli_w.dumps(table), "[plugins.files]", *texts])


def _text_of_lines(text: str) -> str:
    """A text as TOML, its lines as they are, for people to read before they trust it."""
    import tomli_w

    if "'''" in text or re.search(r"[^\t\n -~\u00a0-\U0010ffff]", text):
        return tomli_w.dumps({"t": text}, multiline_strings=True)[4:].rstrip("\n")
    return f"'''\n{text}'''"


def base_model(job: Job, resolve: Callable[[str, Mapping[str, Any]], ComponentRef]) -> ComponentRef:
    """The model whose rates a job has, by ``parametrization.base``; by default the model itself.

    Args:
        resolve: ``Builder.resolve``.

    Raises:
        ConfigProblems: there is no such model.
    """
    if (base := getattr(getattr(job.parametrization, "config", None), "base", None)) is None:
        return job.model
    return resolve("model", layered(Document(plain(job.model), {}), Document(base, {})).table)


def components(chooser: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, ComponentRef]]:
    """Every component that a job chooses, at any depth, and the key path of its table.

    Args:
        chooser: the job, or a part of it.
        path: of this part.
    """
    if isinstance(chooser, ComponentRef):
        yield path, chooser
        chooser = chooser.config
    inside: Iterable[tuple[Any, Any]] = ()
    if attrs.has(type(chooser)):
        inside = ((one.alias, getattr(chooser, one.name)) for one in attrs.fields(type(chooser)) if one.init)
    elif isinstance(chooser, Mapping):
        inside = chooser.items()
    elif isinstance(chooser, (list, tuple)):
        inside = enumerate(chooser)
    for key, item in inside:
        yield from components(item, (*path, key))


def deprecations(job: Job, catalog: Catalog) -> list[str]:
    """A line for each deprecated component that the job chooses."""
    lines = []
    for path, use in components(job):
        if sentence := catalog.find(use.kind, use.qualified_name).deprecation:
            lines.append(f"{key_text(_written(path, job))}: {sentence}")
    return lines


def notes(job: Job, catalog: Catalog) -> list[str]:
    """A line for each thing that is allowed and that one should know: deprecated components, and what the configs of
    components say of themselves in ``notes(job)``."""
    lines = deprecations(job, catalog)
    for one in catalog.plugins:
        if one.distribution.startswith(PROVIDER) and one.heavy:
            words = f"{one.distribution.removeprefix(PROVIDER)} imports {', '.join(one.heavy)}"
            lines.append(f"plugins.files: {words}, which took {one.import_seconds:.1f} s")
    for path, use in components(job):
        if callable(getattr(use.config, "notes", None)):
            with output_of(use.provider):
                said = [*use.config.notes(job)]
            lines += [f"{key_text(_written((*path, *key_path(key)), job))}: {sentence}" for key, sentence in said]
    return lines


def summary(job: Job, world_size: int | None) -> str:
    """The training in half a line."""
    train = job.train
    chosen = f"{job.model.name} on {job.data.name}, {job.optimizer.name} with {job.scheduler.name}"
    if world_size is None:
        size = f"{train.batch_size} × {train.seq_len} tokens per microbatch and data-parallel rank"
    else:
        degrees = resolve_degrees(job.parallel, world_size)
        batch = train.batch_size * (train.grad_accumulation or 1) * degrees["dp_replicate"] * degrees["dp_shard"]
        size = f"{batch} × {train.seq_len} tokens on {world_size} rank{'s' * (world_size > 1)}"
    return f"{chosen}; {train.steps} step{'s' * (train.steps > 1)} of {size}"


def _written(path: KeyPath, job: Job) -> KeyPath:
    """The way to what the user wrote, from the root of a file."""
    for at, use in reversed([*components(job)]):  # the innermost first, as the ways of others lead through it
        if use.written and path[: len(at)] == at:
            path = (*at, *as_written(path[len(at) :], use.written))
    return path


def _plugins_section(table: Mapping[str, Any]) -> PluginsSection:
    """Needed before anything else can be converted; what is wrong with it is reported with the rest."""
    try:
        return structure(table.get("plugins", {}), PluginsSection, Catalog([]))
    except InvalidError:
        return PluginsSection()


def _plugin_problems(plugins: PluginsSection, catalog: Catalog, *, disables: bool) -> list[Problem]:
    """Args:
    disables: whether the job decides what is imported. A checkpoint's does not, and may come from a machine that has
        other plugins.
    """
    problems = []
    installed = [plugin.distribution for plugin in catalog.plugins]
    for index, name in enumerate(plugins.disable if disables else ()):
        if (wanted := canonical_distribution(name)) not in installed:
            near = nearest(wanted, installed) or next((one for one in installed if wanted in one), None)
            hint = f"did you mean '{near}'?" if near else f"installed: {', '.join(installed) or 'none'}"
            sentence = f"no plugin of that name is installed; {hint}"
            problems.append(Problem(("plugins", "disable", index), sentence, allowed={"enum": installed}))
    for index, requirement in enumerate(plugins.require):
        from forge_core.config.requirement import unmet  # few jobs require anything

        if why := unmet(requirement):
            problems.append(Problem(("plugins", "require", index), why))
    return problems


def _completed(job: Job, name: str, catalog: Catalog, world_size: int | None) -> tuple[Job, list[Problem]]:
    """Fill in what follows from the rest, and check what one section says against the others."""
    job = job if job.run.name is not None else attrs.evolve(job, run=attrs.evolve(job.run, name=name))
    problems: list[Problem] = []
    degrees = None
    try:
        degrees = resolve_degrees(job.parallel, world_size) if world_size is not None else None
    except ConfigProblems as error:
        problems += error.problems
        world_size = None  # what does not depend on it is checked all the same
    train, found = _with_batches(job.train, degrees)
    job, found_in_passes = _with_passes(attrs.evolve(job, train=train), catalog, world_size)
    on_ranks = job  # with the number that ``dp_shard = -1`` stands for
    if degrees is not None:
        on_ranks = attrs.evolve(job, parallel=attrs.evolve(job.parallel, dp_shard=degrees["dp_shard"]))
    problems += [*found, *found_in_passes, *_section_problems(on_ranks), *_data_phase_problems(job)]
    problems += [*_base_problems(job, catalog), *_missing_problems(job, catalog)]
    for path, use in components(job):
        problems += _component_problems(path, use, on_ranks, catalog)
        problems += _factory_problems(path, use, catalog)
    return job, problems


def _with_passes(job: Job, catalog: Catalog, world_size: int | None) -> tuple[Job, list[Problem]]:
    """With the passes that it asks for without naming them, and what is wrong with all of them."""
    try:
        job, problems = add_required(job, catalog, world_size, ComponentBuilder(catalog).resolve)
    except ConfigProblems as error:
        problems = [*error.problems]
    # passes that could not be added would be missed once more
    check = conflict_problems if problems else pass_problems
    return job, [*problems, *check(job, catalog, world_size)]


def check_device(job: Job, catalog: Catalog) -> None:
    """Ask again what is wrong with passes and components in this job, once ``run.device`` is not ``auto`` any more.

    Raises:
        ConfigProblems: what they answer.
    """
    problems = [problem for path, use in components(job) for problem in _component_problems(path, use, job, catalog)]
    problems += conflict_problems(job, catalog)
    if problems:
        raise ConfigProblems(problems, str(job.run.name))


def _ineffective(job: Job, table: Mapping[str, Any]) -> list[Problem]:
    """Keys that are given and would do nothing. An interval of 0 that is written down is meant to switch off."""
    problems = []
    evaluation = table.get("eval", {})
    if isinstance(evaluation, Mapping) and evaluation and "interval" not in evaluation:
        problems.append(Problem(("eval",), "has no interval, so that nothing would be evaluated; set eval.interval"))
    for (*way, key), sentence in _without_effect(job).items():
        if key in table_at(table, way):
            problems.append(Problem((*way, key), sentence))
    return problems


def _without_effect(job: Job) -> dict[KeyPath, str]:
    """Keys that do nothing in this job, with any value, and why. They may not be given, nor are they written."""
    keys: dict[KeyPath, str] = {}
    data = job.data.config
    if isinstance(data, DataSourceConfig) and data.has_own_order:
        keys["data", "shuffle"] = f"has no effect: '{job.data.name}' says itself what stands where; remove it"
    elif isinstance(data, DataSourceConfig) and not data.shuffle:
        keys["train", "data_seed"] = "has no effect while data.shuffle = false; remove it"
    if isinstance(data, DataSourceConfig) and data.workers == 0:
        keys["data", "prefetch"] = "has no effect while data.workers = 0, as nothing is read ahead; remove it"
    if job.anomalies.spike_factor == 0:
        keys["anomalies", "spike_window"] = "has no effect while anomalies.spike_factor = 0; remove it"
    if not job.checkpoint.keep_best:
        keys["checkpoint", "best_metric"] = keys["checkpoint", "best_is"] = "has no effect without keep_best"
    for path, use in components(job):
        if use.kind != "data_source" or path == ("data",):
            continue
        why = "the source around it decides on order and reading ahead"
        if path == ("eval", "data"):
            why = "an evaluation reads its data in order and not ahead"
        for field in attrs.fields(DataSourceConfig):
            keys[*path, str(field.alias)] = f"has no effect: {why}; remove it"
    return keys


def _with_batches(train: TrainSection, degrees: Mapping[str, int] | None) -> tuple[TrainSection, list[Problem]]:
    """``grad_accumulation``, from ``global_batch_size`` if that is given. It is not filled in: a run that goes on on
    another number of ranks has to know whether it was asked for."""
    accumulation, total = train.grad_accumulation, train.global_batch_size
    if total is None:
        return attrs.evolve(train, grad_accumulation=accumulation or 1), []
    if degrees is None:
        wrong = f"must be a multiple of batch_size = {train.batch_size}, for any number of ranks, got {total}"
        return train, [Problem(("train", "global_batch_size"), wrong)] if total % train.batch_size else []
    ranks = prod(degrees[axis] for axis in ("dp_replicate", "dp_shard"))
    microbatch = train.batch_size * ranks
    factors, sizes = "batch_size × data-parallel ranks", f"{train.batch_size} × {ranks}"
    problem = None
    if total % microbatch:
        problem = f"must be a multiple of {factors} = {sizes} = {microbatch}, got {total}"
    elif accumulation is None:
        accumulation = total // microbatch
    elif total != microbatch * accumulation:
        problem = (
            f"{total} is not {factors} × grad_accumulation = {sizes} × {accumulation} = {microbatch * accumulation}; "
            f"leave out one of the two, or set grad_accumulation = {total // microbatch}"
        )
    if problem:
        return train, [Problem(("train", "global_batch_size"), problem)]
    return attrs.evolve(train, grad_accumulation=accumulation), []


def _section_problems(job: Job) -> Iterator[Problem]:
    """The core's own problems with the job."""
    said = {"": job.check(), **{name: getattr(job, name).check(job) for name in ("run", "checkpoint", "metrics")}}
    return (Problem(key_path(f"{name}.{key}"), sentence) for name, found in said.items() for key, sentence in found)


def data_phase(use: ComponentRef, phase: PhaseSection) -> Any:
    """The data of a phase, typed by the config class of the data source.

    Raises:
        InvalidError: it is not what the class says, or the source has no phases.
    """
    if (cls := getattr(type(use.config), "Phase", None)) is None:
        raise InvalidError.because(f"the data source {use.name} has no phases; leave data out")
    return structure(phase.data, cls, Catalog([]))


def _base_problems(job: Job, catalog: Catalog) -> Iterator[Problem]:
    """The base model of a parametrization cannot be, or a model lacks numbers that parametrizations need."""
    if job.parametrization is None:
        return
    from forge_core.contracts.parametrization import MODEL_KEYS  # few jobs have one; its classes take 4 ms to make

    for key in MODEL_KEYS:
        if not hasattr(job.model.config, key):
            sentence = f"needs a model with {', '.join(MODEL_KEYS)}, and '{job.model.name}' has no {key}"
            yield Problem(("parametrization",), sentence)
            return
    try:
        base_model(job, ComponentBuilder(catalog).resolve)
    except ConfigProblems as error:
        yield from (attrs.evolve(one, path=("parametrization", "base", *one.path[1:])) for one in error.problems)


def _missing_problems(job: Job, catalog: Catalog) -> Iterator[Problem]:
    """Components that a section takes without naming them, and that are not installed."""
    for path, kind, name, is_taken in (
        (("checkpoint", "load"), "warm_start", WARM_START, job.checkpoint.loads),
        (("phases",), "phase_plan", PHASE_PLAN, job.phases),
    ):
        if is_taken:
            try:
                catalog.lookup(kind, name)
            except ConfigError as error:
                yield Problem(path, str(error))


def _data_phase_problems(job: Job) -> Iterator[Problem]:
    for index, phase in enumerate(job.phases):
        if phase.data:
            try:
                data_phase(job.data, phase)
            except InvalidError as error:
                yield from (attrs.evolve(one, path=("phases", index, "data", *one.path)) for one in error.problems)


def _component_problems(path: KeyPath, use: ComponentRef, job: Job, catalog: Catalog) -> list[Problem]:
    """The component's own problems with the job."""
    check = getattr(use.config, "check", None)
    if not callable(check):  # there is none, or it is a key
        return []
    more = {"catalog": catalog} if takes(check, "catalog") else {}
    try:
        with output_of(use.provider):
            return [Problem((*path, *key_path(key)), sentence) for key, sentence in check(job, **more)]
    except ConfigError as error:
        return [Problem(path, str(error))]
    except Exception as error:  # noqa: BLE001  # a plugin's mistake is that plugin's, and the rest is still reported
        words = f"the check of {kind_words(use.kind)} '{use.qualified_name}' fails ({type(error).__name__}: {error})"
        return [Problem(path, f"{words}. This is a bug in {use.provider}.")]


def _factory_problems(path: KeyPath, use: ComponentRef, catalog: Catalog) -> list[Problem]:
    """Its factory is not where its description says. It is not imported, as that may take seconds."""
    why = why_undefined(use.factory)
    if not why:
        return []
    sentence = f"the factory of {catalog.words_for(use)}, '{use.factory}': {why} This is a bug in {use.provider}."
    return [Problem(path, sentence)]


def _placed(problem: Problem, document: Document) -> Problem:
    """The problem with the place of its value, and the remedy that only the command line needs."""
    path = problem.path if problem.at is None else problem.at
    location = document.locate(path)
    sentence = problem.sentence
    if location.is_override and path in document.locations and sentence.startswith(EXPECTED_STRING):
        setting = re.fullmatch(r"([^=\s]+)[=\s](.*)", location.source, re.DOTALL)
        sentence += f" (for the text, write {setting[1]}='\"{setting[2]}\"')" if setting else ""
    return attrs.evolve(problem, sentence=sentence, location=location)


def _blamed_on_its_cause(problem: Problem, job: Job, document: Document, catalog: Catalog) -> Problem:
    """A pass that the job does not name is there for a degree, or for a precision, that it names."""
    path = problem.path if problem.at is None else problem.at
    use = job.parallel.passes.get(str(path[2])) if path[:2] == ("parallel", "passes") and len(path) > 2 else None
    if use is None or path[:3] in document.locations:
        return problem
    served = ComponentBuilder(catalog).description_of(use).serves
    written = next((cause for cause in map(setting_of, served) if cause in document.locations), None)
    return problem if written is None else attrs.evolve(problem, at=written)
