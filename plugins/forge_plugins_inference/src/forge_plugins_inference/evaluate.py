"""``forge eval``: measure a trained model."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.contracts.command import options_of
from forge_core.job import catalog_of
from forge_plugins_inference.evaluation_options import with_evaluation_options

if TYPE_CHECKING:
    from forge_plugins_weights.loading import Weights


@click.command("eval", context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--evaluation", "names", multiple=True, help="What to measure, by name; repeat for several.")
@click.option(
    "--weights",
    type=click.Choice(["training", "evaluation"]),
    help="The trained ones, or averages that are evaluated in their place; by default averages, if there are any.",
)
@json_option(Mapping[str, float], says="Print JSON: the values by name, and step, that of the checkpoint.")
@click.pass_obj
def evaluate(
    obj: Any,
    run: Path,
    overrides: tuple[str, ...],
    names: tuple[str, ...],
    weights: Weights | None,
    as_json: bool,
) -> None:
    """Evaluate RUN, a run's directory (its newest checkpoint) or a checkpoint's.

    Without --evaluation it measures what the job does: [eval] and [[evaluations]]. With it, the keys of the evaluation
    are options (--samples 100), by default as the job says, and settings of data (data.path=…) say what is
    evaluated, all of it. OVERRIDES are settings of the job. One process needs no layout; several take that of the run,
    or what parallel.… says.
    """
    settings = with_evaluation_options(overrides, names, obj.catalog(), options_of(evaluate))
    ranks = obj.ranks()

    from forge_core.checkpoint.contents import model_problem
    from forge_core.checkpoint.store import find_checkpoint
    from forge_core.config.describe import printable
    from forge_plugins_inference.evaluation_job import evaluation_job
    from forge_plugins_weights.loading import opened

    checkpoint = find_checkpoint(run, lambda line: print(printable(line), file=sys.stderr), model_problem)
    job = evaluation_job(checkpoint, names, settings, obj.catalog, ranks)
    chosen = [word for name in names for word in ("--evaluation", name)]
    chosen += ["--weights", weights] if weights else []
    obj.start_ranks(["eval", str(checkpoint.path), *settings, *chosen, *(["--json"] if as_json else [])])

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    with opened(checkpoint, job, catalog_of(job, obj.catalog), say, weights) as model:
        with redirect_stdout(sys.stderr):  # where a library prints, the values stay apart
            values = model.evaluate()
        if model.context.mesh.rank == 0:
            if as_json:
                print_json({"step": checkpoint.step, **values}, indent=None)
            else:
                print(_table(checkpoint.step, values))


def _table(step: int, values: dict[str, float]) -> str:
    width = max(map(len, values), default=0)
    return "\n".join([f"step {step}", *(f"  {name:<{width}}  {value:,.6g}" for name, value in values.items())])
