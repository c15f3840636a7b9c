"""``forge data``: prepare text for training, and look into prepared data."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.config.describe import printable
from forge_core.contracts.command import options_of
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.config import EncodingErrors
from forge_plugins_data.documents import DEFAULT_PATTERNS
from forge_plugins_data.file_selection import is_folder, select_files
from forge_plugins_data.job_facts import InspectedJob, StepFacts
from forge_plugins_data.prepare import UNIT_SIZE, prepare
from forge_plugins_data.progress import Progress
from forge_plugins_data.run_events import steps_without_update
from forge_plugins_data.token_format import INDEX, Shard, map_shard, read_header
from forge_plugins_data.tokenising import cores
from forge_plugins_data.verification import damage_of

if TYPE_CHECKING:
    from forge_core.config.sections import Job
    from forge_core.contracts.command import Invocation


@attrs.frozen(kw_only=True)
class Prepared:
    """A prepared folder, or one file of it."""

    tokens: int
    dtype: str
    vocab_size: int
    end_of_document: int | None
    """The id that ends a document."""
    tokenizer: Mapping[str, Any] | None
    """Its table; null if it is not known."""
    verified: bool
    """Whether all of it was read and is as the JSON says."""
    files: Sequence[Shard]


@click.group()
def data() -> None:
    """Prepare text for training, and look into prepared data."""


@data.command("prepare")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--output", "-o", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option(
    "--tokenizer",
    metavar="NAME|FILE|TABLE",
    help="A tokenizer.json, the name of a tokenizer such as bytes (the default), or an inline TOML table: "
    '\'{name = "tokenizer_file", path = "t.json", end_of_document = "</s>"}\'.',
)
@click.option(
    "--train-bpe", metavar="VOCAB", type=click.IntRange(min=1), help="Train a BPE tokenizer on the input first."
)
@click.option(
    "--text-field", default="text", show_default=True, help="Key or column of JSONL and Parquet with the text."
)
@click.option("--pattern", "patterns", multiple=True, help="Which files to take from folders. May be repeated.")
@click.option("--exclude", multiple=True, help="A glob for files to leave out, within folders. May be repeated.")
@click.option(
    "--encoding-errors",
    type=click.Choice(["strict", "replace", "skip"]),
    default="strict",
    show_default=True,
    help="Text that is not UTF-8: refuse it, put U+FFFD, or leave the document out.",
)
@click.option("--binary", is_flag=True, help="Take text files as they are, with NUL bytes or anything else in them.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes; by default as many as there are cores.")
@click.option(
    "--unit-mib",
    type=click.IntRange(min=1),
    default=UNIT_SIZE // 2**20,
    show_default=True,
    help="MiB of input that become one file; what is lost at most by an interruption, for each process.",
)
@click.pass_obj
def prepare_command(
    invocation: Invocation,
    inputs: tuple[str, ...],
    output: Path,
    tokenizer: str | None,
    train_bpe: int | None,
    text_field: str,
    patterns: tuple[str, ...],
    exclude: tuple[str, ...],
    encoding_errors: EncodingErrors,
    binary: bool,
    workers: int | None,
    unit_mib: int,
) -> None:
    """Tokenise text into files that are read without any cost: data = {name = "token_files", path = OUTPUT}.

    INPUT are folders, files and globs: text (one document a file), .jsonl (also .gz, .zst) and .parquet. An interrupted
    preparation is continued by the same command.
    """
    if tokenizer is not None and train_bpe is not None:
        raise click.UsageError("give --tokenizer or --train-bpe, not both")
    if patterns and not any(map(is_folder, inputs)) and select_files(inputs, ()):
        raise ConfigError(
            f"--pattern {patterns[0]} has no effect: no input is a folder, of which to take files; remove it"
        )
    try:
        header = prepare(
            inputs,
            output,
            tokenizer=train_bpe if train_bpe is not None else _build_tokenizer(tokenizer or "bytes", invocation),
            text_field=text_field,
            patterns=patterns or DEFAULT_PATTERNS,
            exclude=exclude,
            encoding_errors=encoding_errors,
            binary=binary,
            workers=workers or cores(),
            unit_size=unit_mib * 2**20,
            progress=Progress(),
        )
    except KeyboardInterrupt:
        click.echo("interrupted; the same command again continues", err=True)
        raise
    skipped = sum(shard.skipped or 0 for shard in header.shards)
    click.echo(
        f"{output}: {header.tokens:,} tokens of {header.dtype} in {len(header.shards)} file(s), "
        f"{sum(shard.documents or 0 for shard in header.shards):,} documents, vocabulary {header.vocab_size:,}"
        + (f"; {skipped:,} documents skipped (empty or not UTF-8)" if skipped else "")
    )


@data.command("inspect", context_settings={"ignore_unknown_options": True})
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--verify", is_flag=True, help="Read all of it, and compare checksums and the largest id.")
@click.option("--step", type=click.IntRange(min=1), help="Of a job: the step whose batch is shown, by default 1.")
@click.option("--show", type=click.IntRange(min=0), help="Of a job: so many samples of it as text, by default 3.")
@click.option("--world-size", type=click.IntRange(min=1), help="Of a job: its ranks, by default 1.")
@json_option(Prepared | InspectedJob)
@click.pass_obj
def inspect_command(
    invocation: Invocation,
    path: Path,
    overrides: tuple[str, ...],
    verify: bool,
    step: int | None,
    show: int | None,
    world_size: int | None,
    as_json: bool,
) -> None:
    """Show what is in PATH: a prepared folder, its index, the JSON beside one .bin file, or the data of a job's
    configuration, with OVERRIDES, and the batch of one of its steps."""
    if path.suffix == ".toml":
        if verify:
            raise ConfigError("--verify is for prepared data; in a job, data.verify says when files are compared")
        from forge_plugins_data.inspection import job_on

        job = job_on(world_size or 1, path, overrides, invocation.catalog, options_of(inspect_command))
        _show_job(invocation, job, step or 1, 3 if show is None else show, as_json)
        return
    of_jobs = {"--step": step, "--show": show, "--world-size": world_size}
    for name in [*overrides, *(name for name, value in of_jobs.items() if value is not None)]:
        raise ConfigError(f"{name}: {path} is no configuration of a job, such as c.toml")
    prepared = _prepared(path, verify)
    if as_json:
        print_json(prepared)
    else:
        _show_prepared(prepared)


def _show_job(invocation: Invocation, job: Job, step: int, show: int, as_json: bool) -> None:
    from forge_core.job import catalog_of
    from forge_plugins_data.inspection import in_one_line, opened, spans

    with opened(job, catalog_of(job, invocation.catalog)) as data:
        facts, (found, batch) = data.facts(), data.step(step)
        texts, learned = data.texts(batch, show), data.learned(batch, show)
    entries = {name: list(array.shape) for name, array in batch.items()}
    if as_json:
        shown = attrs.evolve(found, texts=texts, learned=learned or None)
        print_json(InspectedJob(**attrs.asdict(facts, recurse=False), entries=entries, batch=shown))
        return
    if facts.samples is not None:
        sizes = f"{facts.samples:,} samples of {facts.seq_len:,} tokens, {facts.tokens:,} in all"
        sizes += _documents(facts.documents)
        epochs = f", {facts.epochs:.2f} epochs in all"
    else:
        sizes, epochs = f"samples of {facts.seq_len:,} tokens in an order of its own", ""
    click.echo(f"{facts.source}: {sizes}; {facts.samples_per_step:,} samples a step{epochs}")
    for part in facts.parts or ():
        epochs = "" if part.epochs is None else f", {part.epochs:.2f} epochs"
        own = "in an order of its own" if part.samples is None else f"{part.samples:,} samples, {part.tokens:,} tokens"
        click.echo(f"  {part.name}: {own}{_documents(part.documents)}; {part.read:,} samples are read{epochs}")
    if facts.lines is not None:
        click.echo(f"{facts.lines:,} lines, of which {facts.cut:,} are cut and {facts.skipped:,} skipped")
    click.echo(f"vocabulary {facts.vocab_size:,}, tokenizer {facts.tokenizer or 'unknown'}")
    click.echo("entries " + ", ".join(f"{name} {tuple(shape)}" for name, shape in entries.items()))
    click.echo(f"step {step}: samples {spans(found.numbers)} of the stream{_made_of(found)}")
    for text, answers in zip(texts, learned or [[]] * len(texts), strict=True):
        click.echo(f"  {in_one_line(text)}")
        for answer in answers:
            click.echo(f"    learned: {in_one_line(answer)}")


def _documents(number: int | None) -> str:
    return "" if number is None else f", of {number:,} document{'s' * (number != 1)}"


def _which(found: StepFacts) -> str:
    """The samples by what they are of: ``3, 17 of library, 5 of tests``."""
    streams = None if found.streams is None else [f"stream {stream}" for stream in found.streams]
    of_each = streams or found.sample_sources or ["the source"] * len(found.samples)
    samples: dict[str, list[str]] = {}
    for sample, origin in zip(found.samples, of_each, strict=True):
        samples.setdefault(origin, []).append(str(sample))
    return ", ".join(f"{', '.join(numbers)} of {origin}" for origin, numbers in samples.items())


def _made_of(found: StepFacts) -> str:
    said = [f"{found.targets:,} targets"]
    if found.documents is not None:
        said.append(f"{found.documents:,} documents or parts of them")
    said += [f"{count} of {name}" for name, count in (found.sources or {}).items()]
    return "; " + ", ".join(said)


@data.command("seen")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--steps", required=True, metavar="A..B", help="Steps, both included; A alone is one.")
@click.option("--show", type=click.IntRange(min=0), default=0, show_default=True, help="So many samples as text.")
@json_option(StepFacts, lines=True, says="Print JSON, an object for each step on a line.")
@click.pass_obj
def seen_command(invocation: Invocation, run: Path, steps: str, show: int, as_json: bool) -> None:
    """Show which samples RUN has trained on in some of its steps, from its newest checkpoint and its data.

    Numbers are places in the run's stream, as its log has them; behind them stand those in the source, or in each
    source of a mixture. It says of which steps the update was left out; what a rollback has left out is listed at the
    end.
    """
    from forge_core.checkpoint.store import find_checkpoint
    from forge_core.job import catalog_of, load_job
    from forge_plugins_data.inspection import in_one_line, opened, spans

    first, last = _range_of(steps)
    checkpoint = find_checkpoint(run, lambda line: click.echo(printable(line), err=True))
    if last > checkpoint.step:
        raise ConfigError(f"--steps {steps}: {checkpoint.path} has been trained for {checkpoint.step} steps")
    job = load_job(checkpoint.path / "job.toml", catalog=invocation.catalog)
    state = checkpoint.state()
    if state["position"] != checkpoint.step * (job.train.global_batch_size or 0):
        raise ConfigError(
            f"{run}: its steps have not all had as many samples ({state['position']:,} in {checkpoint.step:,} steps); "
            "which ones a step has had cannot be told"
        )
    left_out = [(int(start), int(stop)) for start, stop in state.get("left_out", ())]
    without_update = steps_without_update(checkpoint.path.absolute().parents[1] / "events.jsonl")
    with opened(job, catalog_of(job, invocation.catalog), left_out) as data:
        if data.source.fingerprint != (made_of := state["data_fingerprint"]):
            raise ConfigError(f"data: they are not those of the run any more (fingerprint {made_of})")
        for step in range(first, last + 1):
            found, batch = data.step(step)
            found = attrs.evolve(found, update_left_out=None if without_update is None else step in without_update)
            texts = data.texts(batch, show)
            if as_json:
                print_json(attrs.evolve(found, texts=texts if show else None), indent=None)
                continue
            click.echo(f"step {step}: samples {spans(found.numbers)}: {_which(found)}{_made_of(found)}")
            if found.update_left_out:
                click.echo("  its update was left out: nothing was learned from these samples")
            for text in texts:
                click.echo(f"  {in_one_line(text)}")
    for start, stop in () if as_json else left_out:
        click.echo(f"left out by a rollback: samples {start} to {stop - 1}")


def _range_of(steps: str) -> tuple[int, int]:
    first, dots, last = steps.partition("..")
    try:
        found = int(first), int(last if dots else first)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise ConfigError(f"--steps {steps}: expected two steps from 1 on, as in 100..110")
    return found


def _prepared(path: Path, verify: bool) -> Prepared:
    """
    Raises:
        ConfigError: it is not there, or not what its JSON says.
    """
    description = path / INDEX if path.is_dir() else path
    header = read_header(description.with_suffix(".json") if description.suffix == ".bin" else description)
    for shard in header.shards:
        ids = map_shard(description.parent, header, shard)
        if verify and shard.sha256 and (problem := damage_of(description.parent / shard.file, shard.sha256)):
            raise ConfigError(problem)
        if verify and shard.max_id not in (None, int(ids.max(initial=0))):
            raise ConfigError(
                f"{description.parent / shard.file} has the id {ids.max()}, beyond the {shard.max_id} of its JSON"
            )
    return Prepared(
        tokens=header.tokens,
        dtype=header.dtype,
        vocab_size=header.vocab_size,
        end_of_document=header.end_of_document,
        tokenizer=header.tokenizer,
        verified=verify,
        files=header.shards,
    )


def _show_prepared(found: Prepared) -> None:
    click.echo(f"tokens      {found.tokens:,} of {found.dtype} in {len(found.files)} file(s)")
    click.echo(f"vocabulary  {found.vocab_size:,}, documents end with {found.end_of_document}")
    click.echo(f"tokenizer   {dict(found.tokenizer) if found.tokenizer else 'unknown'}")
    for shard in found.files:
        documents = "?" if shard.documents is None else f"{shard.documents:,}"
        click.echo(f"{shard.file}  {shard.tokens:,} tokens, {documents} documents{', verified' * found.verified}")


def _build_tokenizer(asked: str, invocation: Invocation) -> Tokenizer:
    from forge_core.config.builder import ComponentBuilder

    build = ComponentBuilder(invocation.catalog())
    if asked.lstrip().startswith("{"):
        try:
            use = build.resolve("tokenizer", tomllib.loads(f"table = {asked}")["table"])
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"--tokenizer {asked}: not an inline TOML table ({error})") from error
    elif Path(asked).suffix == ".json" or Path(asked).is_file():
        use = build.resolve("tokenizer", {"name": "forge-plugins-data:tokenizer_file", "path": asked})
    else:
        use = build.resolve("tokenizer", asked)
    tokenizer: Tokenizer = build(use, base=Path())
    return tokenizer
