"""``[checkpoint]``: what contradicts itself or would do nothing is refused with what to do."""

from __future__ import annotations

import attrs
import pytest

from forge_core.errors import ConfigError
from forge_core.job import job_table, load_job
from forge_core.registry.catalog import Catalog

TAKEN = ("warm_start", "phase_plan")
"""Kinds of which sections take a component that they do not name."""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["powers_of_two_from=4"], "checkpoint.powers_of_two_from: has no effect without powers_of_two_until"),
        (["powers_of_two_from=8", "powers_of_two_until=4"], "8 is after powers_of_two_until = 4"),
        (["powers_of_two_from=11", "powers_of_two_until=12"], "11 is after the last step, train.steps = 10"),
        (["keep_every=4"], "checkpoint.keep_every: has no effect without keep_last"),
        (["keep_last=1", "keep_best=2"], "checkpoint.keep_best: nothing is evaluated"),
        (["keep_best=2", "best_is=highest"], "checkpoint.keep_best: has no effect without keep_last"),
        (["best_metric=eval/perplexity"], "checkpoint.best_metric: has no effect without keep_best"),
        (["keep_last=0"], "checkpoint.keep_last"),
        (["interval=-1"], "checkpoint.interval"),
        (['load.path="x"', "resume=x"], "checkpoint.load: has no effect: checkpoint.resume = 'x' starts from a whole"),
        (['load.path="x"', "load.include=[]"], "checkpoint.load.include"),
        (["load={}"], "checkpoint.load.path: is required"),
        (["mirror_keep_last=2"], "checkpoint.mirror_keep_last: has no effect without mirror"),
    ],
)
def test_what_would_do_nothing_is_refused(complaint, settings, said):
    assert said in complaint(*[f"checkpoint.{setting}" for setting in settings])


@pytest.mark.parametrize(
    ("interval", "evaluated", "said"),
    [
        (10, 4, "checkpoint.interval = 10 must be a multiple of eval.interval = 4"),
        (0, 5, "the last checkpoint is the only one"),
    ],
)
def test_the_best_are_told_by_evaluations_at_the_same_steps(complaint, interval, evaluated, said):
    keep = ["checkpoint.keep_last=1", "checkpoint.keep_best=2"]

    assert said in complaint(*keep, f"checkpoint.interval={interval}", f"eval.interval={evaluated}")


def test_a_mirror_without_its_package_is_refused_with_what_to_install(complaint):
    said = complaint("checkpoint.mirror=/far")

    assert "checkpoint.mirror: checkpoint mirror 'fsspec' is in forge-plugins-mirror, which is not installed" in said
    assert "pip install forge-plugins-mirror" in said


@pytest.mark.parametrize(
    ("setting", "why", "package"),
    [
        ("checkpoint.load.path=x", "checkpoint.load: warm start 'tensors'", "forge-plugins-weights"),
        ("phases=[{at=2}]", "phases: phase plan 'phases'", "forge-plugins-optim"),
    ],
)
def test_a_section_whose_component_is_not_installed_is_refused_with_what_to_install(
    write, catalog, setting, why, package
):
    plugins = [
        attrs.evolve(plugin, components=tuple(one for one in plugin.components if one[0] not in TAKEN))
        for plugin in catalog.plugins
        if plugin.distribution != package
    ]

    with pytest.raises(ConfigError) as caught:
        load_job(write(), [setting], catalog=Catalog(plugins))

    assert f"{why} is in {package}, which is not installed: pip install {package}" in str(caught.value)


def test_a_section_that_uses_everything_is_valid_and_comes_back_from_its_table(load):
    keys = "interval=10 minutes=5 powers_of_two_from=2 powers_of_two_until=8 keep_last=2 keep_every=4 keep_best=1"
    settings = [f"checkpoint.{key}" for key in keys.split()]

    load_keys = ['checkpoint.load.path="runs/x"', 'checkpoint.load.exclude=["model.head.*"]']
    job = load(*settings, "eval.interval=5", *load_keys)

    table = job_table(job)["checkpoint"]
    assert table["load"] == {"path": "runs/x", "include": ["model.*"], "exclude": ["model.head.*"], "rename": {}}
    assert table["best_metric"] == "eval/loss"
    assert "best_metric" not in job_table(load())["checkpoint"]
