"""``forge data``: prepare text for training, and look into prepared data."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.config import EncodingErrors
from forge_plugins_data.documents import DEFAULT_PATTERNS
from forge_plugins_data.prepare import UNIT_SIZE, prepare
from forge_plugins_data.progress import Progress
from forge_plugins_data.token_format import INDEX, map_shard, read_header
from forge_plugins_data.verification import damage_of

if TYPE_CHECKING:
    from forge_core.contracts.command import Invocation


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
@click.option(
    "--encoding-errors",
    type=click.Choice(["strict", "replace", "skip"]),
    default="strict",
    show_default=True,
    help="Text that is not UTF-8: refuse it, put U+FFFD, or leave the document out.",
)
@click.option("--binary", is_flag=True, help="Take text files as they are, with NUL bytes or whatever else they hold.")
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
    try:
        header = prepare(
            inputs,
            output,
            tokenizer=train_bpe if train_bpe is not None else _build_tokenizer(tokenizer or "bytes", invocation),
            text_field=text_field,
            patterns=patterns or DEFAULT_PATTERNS,
            encoding_errors=encoding_errors,
            binary=binary,
            workers=workers or _cores(),
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


@data.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read all of it, and compare checksums and the largest id.")
def inspect_command(path: Path, verify: bool) -> None:
    """Show what is in PATH: a prepared folder, its index, or the JSON beside one .bin file."""
    description = path / INDEX if path.is_dir() else path
    header = read_header(description.with_suffix(".json") if description.suffix == ".bin" else description)
    click.echo(f"tokens      {header.tokens:,} of {header.dtype} in {len(header.shards)} file(s)")
    click.echo(f"vocabulary  {header.vocab_size:,}, documents end with {header.end_of_document}")
    click.echo(f"tokenizer   {dict(header.tokenizer) if header.tokenizer else 'unknown'}")
    for shard in header.shards:
        ids = map_shard(description.parent, header, shard)
        if verify and shard.sha256 and (problem := damage_of(description.parent / shard.file, shard.sha256)):
            raise ConfigError(problem)
        if verify and shard.max_id not in (None, int(ids.max(initial=0))):
            raise ConfigError(
                f"{description.parent / shard.file} has the id {ids.max()}, beyond the {shard.max_id} of its JSON"
            )
        documents = "?" if shard.documents is None else f"{shard.documents:,}"
        click.echo(f"{shard.file}  {shard.tokens:,} tokens, {documents} documents{', verified' * verify}")


def _cores() -> int:
    """Those that this process may use, where the system tells (Linux)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
