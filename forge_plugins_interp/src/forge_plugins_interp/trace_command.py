"""``forge trace``: what a few steps compute, and where two runs part."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.errors import ConfigError, ExitCode, and_more
from forge_plugins_interp.out_option import look_at_out, save_results, writing
from forge_plugins_interp.site_pattern import listed

if TYPE_CHECKING:
    from forge_plugins_interp.trace_comparison import Compared


@attrs.frozen(kw_only=True)
class Traced:
    """A thing of a step that both traces have."""

    step: int
    kind: str
    """``site``, ``site_gradient``, ``gradient`` or ``update``."""
    name: str
    difference: float
    """Relative; null if one of the two has not computed it."""


@attrs.frozen(kw_only=True)
class Untraced:
    """Things that one of two traces has alone."""

    folder: Path
    """The one that has them."""
    kind: str
    names: Sequence[str]


@attrs.frozen(kw_only=True)
class Traces:
    """How two traces differ."""

    tolerance: float
    parts: Traced | None
    """The first thing that differs by more; null if none does."""
    compared: Sequence[Traced]
    """In the order in which a step computes them."""
    only: Sequence[Untraced]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--steps", metavar="FIRST..LAST", help="The steps to trace; by default 1..3, with --huggingface 1.")
@click.option("--sites", "patterns", default="", help="Names with commas, or patterns; by default all of modules.")
@click.option("--compare", nargs=2, type=click.Path(path_type=Path), help="Compare two traces, in place of a run.")
@click.option(
    "--tolerance", type=click.FloatRange(min=0), help="With --compare: relative difference; 0.001 by default."
)
@click.option("--out", type=click.Path(path_type=Path), help="The trace's folder; with --compare, a .csv or .png.")
@click.option("--nproc", default="1", metavar="N|auto", help="Processes on this machine; auto is one a GPU.")
@click.option(
    "--huggingface",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Trace a model of transformers on the batches of CONFIG, in place of a run.",
)
@json_option(Traces, says="With --compare: print JSON.")
@click.pass_obj
def trace(
    obj: Any,
    config: Path | None,
    overrides: tuple[str, ...],
    steps: str | None,
    patterns: str,
    compare: tuple[Path, Path] | None,
    tolerance: float | None,
    out: Path | None,
    nproc: str,
    huggingface: Path | None,
    as_json: bool,
) -> None:
    """Train CONFIG for a few steps, and write a fingerprint of each site, gradient and update to OUT.

    The layout is that of the job: the same CONFIG on one process and in another layout, or on another machine, gives
    traces that can be compared. forge trace --compare A B names the first thing that differs, and exits with 1.

    --huggingface FOLDER writes what a model of transformers computes in one step: values at the sites that it shares
    with ours, and gradients of the loss by them. It runs on one process in fp32, with the weights of FOLDER. Gradients
    of parameters and updates are not traced.
    """
    if compare is not None:
        given = {"--huggingface": huggingface, "--steps": steps, "--sites": patterns or None}
        given["--nproc"] = nproc if nproc != "1" else None
        _refuse_beside_compare(config, given)
        _compare(*compare, 1e-3 if tolerance is None else tolerance, out, as_json=as_json)
        return
    if as_json:
        raise ConfigError("--json: has no effect without --compare; the trace is in OUT")
    if tolerance is not None:
        raise ConfigError(f"--tolerance {tolerance:g}: has no effect without --compare; leave it out")
    if config is None:
        raise ConfigError("CONFIG is missing: the job to trace; or give --compare A B")
    if out is None:
        raise ConfigError("--out is missing: the folder of the trace")
    if huggingface is not None:
        _trace_huggingface(obj, config, overrides, huggingface, steps or "1", listed(patterns), out, nproc)
        return
    keys = {"out": str(out), **_steps(steps or "1..3"), "sites": listed(patterns)}
    job = _job_with_trace(obj, config, overrides, nproc, keys)
    _refuse_files(out)
    file = out / "job.toml"
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(job, encoding="utf-8")
    words = ["run", str(file), *([] if nproc == "1" else ["--nproc", nproc])]
    code = subprocess.run([sys.executable, "-P", "-m", "forge_core", *words]).returncode
    if code == ExitCode.INVALID:
        shutil.rmtree(out)  # it was empty or new, and there is nothing of use in it
    if code not in (ExitCode.COMPLETED, ExitCode.STOPPED):
        click.get_current_context().exit(code)
    print(f"wrote {out}")


def _refuse_beside_compare(config: Path | None, given: Mapping[str, object]) -> None:
    for option, value in {"": config, **given}.items():
        if value is not None:
            raise ConfigError(f"{f'{option} {value}'.strip()}: has no effect with --compare; leave it out")


def _refuse_files(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is a file or has files in it; give a folder that is empty or new")


def _trace_huggingface(
    obj: Any,
    config: Path,
    overrides: Sequence[str],
    folder: Path,
    steps: str,
    patterns: Sequence[str],
    out: Path,
    nproc: str,
) -> None:
    if nproc != "1":
        raise ConfigError(f"--nproc {nproc}: --huggingface runs on one process; leave it out")
    span = _steps(steps)
    if span["first"] != span["last"]:
        raise ConfigError(f"--steps {steps}: --huggingface traces one step, as it updates nothing; give one")

    from forge_core.job import catalog_of, load_job
    from forge_plugins_interp.huggingface_trace import trace_huggingface

    job = load_job(config, overrides, catalog=obj.catalog, world_size=1)
    _refuse_files(out)
    catalog = catalog_of(job, obj.catalog)
    found = trace_huggingface(job, catalog, folder, step=span["first"], patterns=patterns, out=out)
    print(f"{found.architecture}: {found.n_sites} sites at step {span['first']}, loss {found.loss:.6f}")
    print(f"wrote {out}")


def _steps(text: str) -> dict[str, int]:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None:
        raise ConfigError(f"--steps {text}: must be a step or two, such as 1..3")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last:
        raise ConfigError(f"--steps {text}: must count from 1, and not end before it begins")
    return {"first": first, "last": last}


def _job_with_trace(obj: Any, config: Path, overrides: Sequence[str], nproc: str, keys: dict[str, Any]) -> str:
    """The job as a file, with the callback, in a folder of its own, without trackers and checkpoints on the way."""
    import tomllib

    import tomli_w

    from forge_core.job import dump_job, load_job

    ranks = int(nproc) if nproc.isdecimal() else None
    job = load_job(config, overrides, catalog=obj.catalog, world_size=ranks)
    if keys["last"] > job.train.steps:
        raise ConfigError(f"--steps: {keys['last']} is after the last step, train.steps = {job.train.steps}")
    table = tomllib.loads(dump_job(job))
    table["callbacks"] = [*table.get("callbacks", []), {"name": "trace", **keys, "stop": True}]
    table["run"] = {**table["run"], "dir": str(Path(keys["out"]) / "runs"), "name": "traced"}
    kept = {key: value for key, value in table.get("checkpoint", {}).items() if key == "load"}
    table["checkpoint"] = {**kept, "interval": 0, "resume": _resume(job.checkpoint.resume)}
    table.pop("trackers", None)
    return tomli_w.dumps(table)


def _resume(given: str) -> str:
    """A path is where to begin; any other is about the run's own directory, which a trace has not."""
    return given if Path(given).exists() else "never"


def _compare(a: Path, b: Path, tolerance: float, out: Path | None, *, as_json: bool) -> None:
    look_at_out(out)

    from forge_plugins_interp.figures.parting import parting_figure
    from forge_plugins_interp.trace_comparison import compare_traces, first_parting

    every = compare_traces(a, b)
    compared = [one for one in every if one.only is None]
    if not compared:
        raise ConfigError(f"{a} and {b} have nothing in common but steps")
    only = dict.fromkeys((one.only, one.kind) for one in every if one.only)
    parting = first_parting(compared, tolerance)
    told = Traces(
        tolerance=tolerance,
        parts=None if parting is None else _traced(parting),
        compared=[_traced(one) for one in compared],
        only=[
            Untraced(
                folder=folder,
                kind=kind,
                names=[*dict.fromkeys(one.name for one in every if (one.only, one.kind) == (folder, kind))],
            )
            for folder, kind in only
            if folder is not None
        ],
    )
    if as_json:
        print_json(told)
    else:
        _print(told, compared, parting)
    rows = [{"order": order, **attrs.asdict(one)} for order, one in enumerate(told.compared)]
    save_results(out, rows, lambda: parting_figure(compared, tolerance), as_json=as_json)
    click.get_current_context().exit(0 if parting is None else 1)


def _traced(one: Compared) -> Traced:
    return Traced(step=one.step, kind=one.kind, name=one.name, difference=one.difference)


def _print(told: Traces, compared: Sequence[Compared], parting: Compared | None) -> None:
    for one in told.only:
        names = f"{', '.join(one.names[:5])}{and_more(len(one.names), 5)}"
        print(f"only {one.folder} has {len(one.names)} of kind {one.kind}: {names}")
    for kind in dict.fromkeys(one.kind for one in compared):
        of_kind = [one for one in compared if one.kind == kind]
        worst = max(of_kind, key=lambda one: one.difference)
        print(
            f"compared {len(of_kind)} of kind {kind}; the largest difference is {worst.difference:.2e}, "
            f"{worst.words()}, step {worst.step}"
        )
    if parting is None:
        print(f"{len(compared)} things of {len({one.step for one in compared})} steps agree to {told.tolerance:g}")
    else:
        print(f"they part at step {parting.step}: {parting.words()} differs by {parting.difference:.2e}")
