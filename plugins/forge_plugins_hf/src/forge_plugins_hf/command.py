"""``forge convert``: models of Hugging Face, in and out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_core.config.describe import printable
from forge_core.contracts.command import Invocation

if TYPE_CHECKING:
    from forge_plugins_weights.loading import Weights

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", "direction", required=True, type=click.Choice(["forge", "huggingface", "peft"]))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option(
    "--dtype",
    type=click.Choice([*_DTYPES]),
    help="By default fp32 for a checkpoint, which training needs, and that of the checkpoint otherwise.",
)
@click.option(
    "--weights",
    type=click.Choice(["training", "evaluation"]),
    help="Of a checkpoint: the trained ones, or averages; by default averages, if there are any.",
)
@click.option(
    "--architecture",
    help="For --to huggingface: such as MistralForCausalLM; by default the first that is equal to the model.",
)
@click.option(
    "--config-only",
    is_flag=True,
    help="For --to forge: write OUT/train.toml alone, a run that reads the weights from SOURCE itself.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="For --to huggingface: write these parameters alone, such as 'model.vision.connector.*', for "
    "[[checkpoint.load]].",
)
@click.option(
    "--leave-out",
    multiple=True,
    metavar="PATTERN",
    help="For --to forge: do without these tensors of SOURCE, such as 'vision_tower.*'.",
)
@click.pass_obj
def convert(
    obj: Invocation,
    source: Path,
    direction: str,
    out: Path,
    dtype: str | None,
    weights: Weights | None,
    architecture: str | None,
    config_only: bool,
    include: tuple[str, ...],
    leave_out: tuple[str, ...],
) -> None:
    """Convert SOURCE. For --to forge it is a folder as downloaded from Hugging Face (config.json, safetensors, and
    tokenizer.json) or a name there, such as Qwen/Qwen3-0.6B; otherwise a run's directory (its newest checkpoint) or a
    checkpoint's. --to huggingface folds adapters into the weights; --to peft writes the adapters alone.

    To forge, it writes OUT/checkpoint, which forge generate and forge eval take, and OUT/train.toml, a run that begins
    with these weights. No more than a few tensors are in memory at a time. No code of the model is run.
    """
    import torch

    from forge_core.checkpoint.contents import model_problem
    from forge_core.checkpoint.store import find_checkpoint
    from forge_core.errors import ConfigError
    from forge_core.run.process import keep_freed_memory
    from forge_plugins_hf.hub import folder_of
    from forge_plugins_hf.to_forge import to_forge
    from forge_plugins_hf.to_huggingface import to_huggingface
    from forge_plugins_hf.to_peft import to_peft
    from forge_plugins_hf.tokenizer import FILE

    def say(line: str) -> None:
        print(printable(line), file=sys.stderr)

    keep_freed_memory()  # each tensor takes the place of the one before
    chosen = getattr(torch, _DTYPES[dtype]) if dtype else None
    if include and direction != "huggingface":
        raise ConfigError(f"--include has no effect with --to {direction}")
    if leave_out and (direction != "forge" or config_only):
        idle = "--config-only: a run that reads SOURCE itself needs all of it" if config_only else f"--to {direction}"
        raise ConfigError(f"--leave-out has no effect with {idle}")
    if direction == "forge":
        _refuse_idle(weights, architecture, config_only=config_only, dtype=dtype)
        architecture, n_parameters = to_forge(
            folder_of(source),
            out,
            chosen or torch.float32,
            obj.catalog(()),
            say,
            config_only=config_only,
            leave_out=leave_out,
        )
        if config_only:
            click.echo(f"wrote {out / 'train.toml'}: {architecture}, {n_parameters:,} parameters; choose [data] in it")
            return
        click.echo(f"wrote {out / 'checkpoint'}: {architecture}, {n_parameters:,} parameters")
        has_words = (out / "checkpoint" / "tokenizer").exists()
        click.echo(
            (f"forge generate {out / 'checkpoint'}; " if has_words else "it has no tokenizer; ")
            + f"to train it further, choose [data] in {out / 'train.toml'}"
        )
        return
    if config_only:
        raise ConfigError(f"--config-only has no effect with --to {direction}")
    checkpoint = find_checkpoint(source, say, model_problem)
    if direction == "peft":
        if chosen:
            raise ConfigError("--dtype has no effect with --to peft: adapters are written as they are")
        n_layers = to_peft(checkpoint, out, weights, obj.catalog, architecture)
        click.echo(f"wrote {out}: adapters of {n_layers} layers, from {checkpoint.path}")
        return
    architecture = to_huggingface(checkpoint, out, chosen, weights, obj.catalog, say, architecture, include)
    wordless = "" if include or (out / FILE).exists() else ", without a tokenizer.json, as the run has none"
    click.echo(f"wrote {out}: {architecture}, from {checkpoint.path}{wordless}")


def _refuse_idle(weights: Weights | None, architecture: str | None, *, config_only: bool, dtype: str | None) -> None:
    """
    Raises:
        ConfigError: an option is given that does nothing with ``--to forge``.
    """
    from forge_core.errors import ConfigError

    if weights:
        raise ConfigError("--weights is about a checkpoint, and has no effect with --to forge")
    if architecture:
        raise ConfigError("--architecture has no effect with --to forge: config.json names the architecture")
    if config_only and dtype:
        raise ConfigError("--dtype is about what is written, and has no effect with --config-only")
    if dtype == "fp16":
        raise ConfigError("--dtype fp16: no checkpoint has parameters in fp16; with --to forge take fp32 or bf16")
