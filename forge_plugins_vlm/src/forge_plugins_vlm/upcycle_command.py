"""``forge vlm upcycle``: weights for each modality, from a run that has one for both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_core.errors import ConfigError

if TYPE_CHECKING:
    from forge_core.contracts.command import Invocation


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("source", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option(
    "--to",
    "fusion",
    required=True,
    type=click.Choice(["moma", "mixture_of_transformers"]),
    help="The fusion of the new model.",
)
@click.option(
    "--experts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Experts of each modality in a layer of moma; 4 by default. With 1, a layer as before for each modality.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of what RUN does not have."
)
@click.pass_obj
def upcycle(
    obj: Invocation,
    source: Path,
    overrides: tuple[str, ...],
    out: Path,
    fusion: str,
    experts: int | None,
    seed: int,
) -> None:
    """Make a model with weights for each modality of the one in RUN, a run's directory (its newest checkpoint) or a
    checkpoint's. It is a run on text, one with joint_decoder, or one of moma with a single expert for each modality.

    Image weights begin as copies of those of text. `forge run OUT/train.toml` trains the result.

    OVERRIDES are settings of the new job: model.encoder.name=…, data.path=…
    """
    from forge_core.checkpoint.store import find_checkpoint
    from forge_plugins_moe.upcycle_checkpoint import CHECKPOINT, CONFIG
    from forge_plugins_vlm.upcycle import upcycle_to_modalities

    if experts is not None and fusion != "moma":
        raise ConfigError(f"--experts {experts}: {fusion} has no experts; leave it out, or choose --to moma")
    checkpoint = find_checkpoint(source, lambda line: print(line, file=sys.stderr))
    upcycled = upcycle_to_modalities(
        checkpoint,
        out,
        fusion,
        n_experts=(experts or 4) if fusion == "moma" else 1,
        overrides=overrides,
        seed=seed,
        catalog=obj.catalog,
    )
    click.echo(f"wrote {out / CHECKPOINT}, from {checkpoint.path}: {upcycled.words}")
    if any(key.startswith("evaluation.") for key in checkpoint.saved_tensors()):
        click.echo("note: it is made of the trained weights; forge eval of the run takes its averages")
    click.echo(f"train it with: forge run {out / CONFIG}")
