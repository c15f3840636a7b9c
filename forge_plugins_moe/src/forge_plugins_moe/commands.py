"""``forge moe``: what is done to sparse models outside of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forge_core.errors import ConfigError

if TYPE_CHECKING:
    from forge_core.contracts.command import Invocation
    from forge_plugins_moe.upcycle import UpcycledState


@click.group()
def moe() -> None:
    """Work with mixtures of experts outside of runs."""


@moe.command(context_settings={"ignore_unknown_options": True})
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write to.")
@click.option("--experts", required=True, type=click.IntRange(min=1), metavar="N", help="Experts of each sparse layer.")
@click.option("--top-k", type=click.IntRange(min=1), metavar="K", help="Experts a token; by default the router's 2.")
@click.option(
    "--granularity",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="G",
    help="Cut each copy of a dense layer into G experts. N and K are then multiples of G.",
)
@click.option(
    "--scale",
    type=click.Choice(["down_only", "cbrt"]),
    default="down_only",
    show_default=True,
    help="With G: scale the last matrix of an expert, or all three by the cube root, which is not exact.",
)
@click.option(
    "--drop",
    type=click.FloatRange(min=0, max=1),
    default=0.0,
    show_default=True,
    metavar="R",
    help="Let a fraction R of each expert's hidden features start anew, so that experts differ.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of routers, and of --drop."
)
@click.pass_obj
def upcycle(
    obj: Invocation,
    source: Path,
    overrides: tuple[str, ...],
    out: Path,
    experts: int,
    top_k: int | None,
    granularity: int,
    scale: str,
    drop: float,
    seed: int,
) -> None:
    """Make a sparse model of the dense one in SOURCE, a run's directory (its newest checkpoint) or a checkpoint's.

    Each expert begins as a copy of its layer's dense one, so that the sparse model computes at first what the dense one
    does. One layer is in memory at a time. `forge run OUT/train.toml` trains the result.

    OVERRIDES are settings of the sparse job: model.feed_forward.first_dense=1, model.feed_forward.router.name=…
    """
    from forge_core.checkpoint.compatibility import value_text
    from forge_core.checkpoint.store import find_checkpoint
    from forge_plugins_moe.upcycle import Upcycling
    from forge_plugins_moe.upcycle_checkpoint import CHECKPOINT, CONFIG, upcycle_checkpoint

    if top_k is not None:
        key = "model.feed_forward.router.top_k"
        if twice := next((one for one in overrides if one.removeprefix("--").partition("=")[0] == key), None):
            raise ConfigError(f"{twice}: --top-k {top_k} says how many; leave one out")
        overrides = (f"{key}={top_k}", *overrides)
    try:
        how = Upcycling(granularity=granularity, scale=scale, drop=drop, seed=seed)  # type: ignore[arg-type]  # a choice
    except ValueError as error:
        raise ConfigError(str(error)) from error
    checkpoint = find_checkpoint(source, lambda line: print(line, file=sys.stderr))
    upcycled, changed = upcycle_checkpoint(
        checkpoint, out, how, n_experts=experts, overrides=overrides, catalog=obj.catalog
    )
    click.echo(f"wrote {out / CHECKPOINT}: {len(upcycled.layers)} layers of {experts} experts, from {checkpoint.path}")
    if any(key.startswith("evaluation.") for key in checkpoint.saved_tensors()):
        click.echo("note: it is made of the trained weights; forge eval of the dense run takes its averages")
    settings = [f"{one.key}: {value_text(one.old)} -> {value_text(one.new)}" for one in changed]
    if upcycled.preserves:
        but_for = f", but for what these change: {'; '.join(settings)}" if settings else ""
        click.echo(f"it computes what the dense model does{but_for}")
    else:
        click.echo("; ".join([_what_differs(upcycled), *settings]))
    click.echo(f"train it with: forge run {out / CONFIG}")


@moe.command("heat-map")
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
def heat_map(run_dir: Path) -> None:
    """Draw what each expert had to do in RUN, the directory of a run with the callback "experts", finished or not."""
    from forge_plugins_moe.heat_map import draw

    click.echo(f"wrote {draw(run_dir)}")


def _what_differs(upcycled: UpcycledState) -> str:
    from forge_plugins_moe.upcycle import PRESERVED

    reasons = []
    if upcycled.how.drop:
        reasons.append(f"{upcycled.how.drop:.0%} of each expert's features start anew")
    if upcycled.how.scale == "cbrt":
        reasons.append('scale = "cbrt" is not exact')
    spread = max(layer.spread for layer in upcycled.layers.values())
    if spread > PRESERVED:
        reasons.append(f"the weights of a token's experts differ by up to {spread:.0%} from their mean")
    return f"it does not compute what the dense model does: {'; '.join(reasons) or 'experts may drop tokens'}"
