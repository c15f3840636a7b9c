"""``[[phases]]``: parts of a run that train otherwise, from the very update that they name."""

import re

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.config.problems import ConfigProblems
from forge_core.config.sections import PhaseSection, TrainSection
from forge_core.contracts.phase_plan import KnownParameters
from forge_core.errors import ConfigError
from forge_core.job import dump_job, load_job
from forge_core.registry.discovery import discover
from forge_plugins_optim.phases import Phases

SAVE_ALL = "checkpoint.interval=1"
FREEZE = 'phases=[{at=4, train=["blocks.1.*", "head.*", "norm.*"]}, {at=8}]'


def tensors(run, step):
    checkpoint = open_checkpoint(run / "checkpoints" / f"step_{step:08}")
    entries = checkpoint.saved_tensors()
    held = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    checkpoint.load(held)
    return held


def changed(run, before, after):
    """The tensors of the model that differ between two checkpoints."""
    old, new = tensors(run, before), tensors(run, after)
    return {key for key in new if key.startswith("model.") and not torch.equal(old[key], new[key])}


def rates(lines):
    return {line["step"]: line["lr"] for line in lines if "loss" in line}


@pytest.mark.parametrize(
    ("at", "first"),
    [("6", 6), ("0.5", 6), ('"640 tokens"', 6), ('"639 tokens"', 5)],
    ids=["step", "fraction", "tokens of five steps", "one token less"],
)
def test_a_phase_begins_with_the_very_update_that_it_names(shared_tiny, at, first):
    name = f"run.name=from-{first}-{len(at)}"
    plain = rates(shared_tiny.completed("run.name=plain", "scheduler.name=constant"))
    scaled = rates(shared_tiny.completed(name, "scheduler.name=constant", f"phases=[{{at={at}, lr_scale=0.25}}]"))

    for step, rate in scaled.items():
        assert rate == pytest.approx(plain[step] * (0.25 if step >= first else 1))


def test_frozen_parameters_stay_bit_for_bit_and_thaw_again(shared_tiny):
    shared_tiny.completed("run.name=frozen", SAVE_ALL, FREEZE)
    run = shared_tiny.path("frozen")

    assert "model.embed.weight" in changed(run, 2, 3)
    while_frozen = changed(run, 3, 7)
    assert while_frozen
    assert all(key.startswith(("model.blocks.1.", "model.head.", "model.norm.")) for key in while_frozen)
    assert {"model.embed.weight", "model.blocks.0.attention.q.weight"} <= changed(run, 7, 8)


def test_frozen_parameters_have_no_part_in_the_norm_of_the_gradient(shared_tiny):
    every = shared_tiny.completed("run.name=every", "train.steps=3")
    some = shared_tiny.completed("run.name=some", "train.steps=3", 'phases=[{at=1, train=["head.*"]}]')

    assert some[0]["loss"] == every[0]["loss"]
    assert some[0]["grad_norm"] < every[0]["grad_norm"]


@pytest.mark.parametrize("optimizer", ["adamw", "grouped"])
def test_factors_by_pattern_move_each_parameter_by_its_own_rate(shared_tiny, optimizer):
    """Adam's first update is as large as the rate, whatever the gradient."""
    table = {
        "adamw": 'optimizer={name="adamw", lr=1e-2, weight_decay=0}',
        "grouped": 'optimizer={name="grouped", groups=[{roles=["norm"], optimizer={name="adamw", lr=1e-2}}, '
        '{optimizer={name="adamw", lr=1e-2, weight_decay=0}}]}',
    }[optimizer]
    name, phases = f"run.name=by-{optimizer}", 'phases=[{at=1, lr_scale={"blocks.0.*"=0.5, "head.*"=0}}]'
    shared_tiny.completed(
        name, table, phases, "scheduler.name=constant", "train.steps=1", "checkpoint.powers_of_two_until=1"
    )
    run = shared_tiny.path(f"by-{optimizer}")
    old, new = tensors(run, 0), tensors(run, 1)

    def moved(key):
        return (new[key] - old[key]).abs().max().item()

    assert moved("model.head.weight") == 0
    assert moved("model.blocks.0.attention.q.weight") == pytest.approx(0.5e-2, rel=1e-2)
    assert moved("model.blocks.1.attention.q.weight") == pytest.approx(1e-2, rel=1e-2)


def test_the_longest_pattern_counts_also_after_the_job_has_been_written(tiny, tmp_path):
    """A job that is written, for the ranks of --nproc too, has its tables in another order."""
    known = KnownParameters(dict.fromkeys(("blocks.0.q", "blocks.1.q", "head.w"), 1))
    phases = 'phases=[{at=1, lr_scale={"blocks.*"=0.1, "blocks.0.*"=0.5, "*"=2.0}}]'
    job = load_job(tiny.config, [phases], catalog=discover(), world_size=1)
    written = tmp_path / "written.toml"
    written.write_text(dump_job(job))

    for one in (job, load_job(written, catalog=discover(), world_size=1)):
        assert Phases(job=one, parameters={}, known=known).at(1).scales == {
            "blocks.0.q": 0.5,
            "blocks.1.q": 0.1,
            "head.w": 2.0,
        }


ADAPTED = KnownParameters(
    dict.fromkeys(("embed.w", "blocks.0.q.w", "blocks.0.q.adapter.up", "blocks.1.q.w", "blocks.1.q.adapter.up"), 1),
    frozenset({"embed.w", "blocks.0.q.w", "blocks.1.q.w"}),
    {"decoder": frozenset({"embed.w", "blocks.0.q.w", "blocks.0.q.adapter.up"}), "table": frozenset({"embed.w"})},
)
"""A model with adapters."""


@pytest.mark.parametrize(
    "phase", ['train=["@decoder"], lr_scale={"blocks.0.*"=0.5, "*"=2}', "lr_scale=0.5", 'train=["*.adapter.*"]']
)
def test_patterns_that_mean_frozen_parameters_among_others_train_the_others(tiny, phase):
    job = load_job(tiny.config, [f"phases=[{{at=1, {phase}}}]"], catalog=discover(), world_size=1)

    assert Phases(job=job, parameters={}, known=ADAPTED).at(1).frozen >= ADAPTED.fixed


@pytest.mark.parametrize("key", ["train", "lr_scale"])
@pytest.mark.parametrize("pattern", ["embed.*", "blocks.1.q.w", "@table"])
def test_a_pattern_that_means_nothing_but_what_is_frozen_in_every_phase_is_refused(tiny, key, pattern):
    """It would be frozen on, without a word, beside what another pattern means."""
    value = f'["*.adapter.*", "{pattern}"]' if key == "train" else f'{{"{pattern}"=10, "*"=1}}'
    job = load_job(tiny.config, [f"phases=[{{at=1}}, {{at=3, {key}={value}}}]"], catalog=discover(), world_size=1)

    with pytest.raises(ConfigError, match=re.escape(f"phases[1].{key}: {pattern!r} means parameters alone that")):
        Phases(job=job, parameters={}, known=ADAPTED)


@pytest.mark.parametrize(
    ("fraction", "steps", "first"),
    [(0.29, 100, 30), (0.7, 10, 8), (0.55, 10, 6), (0.8, 7, 6), (0.8, 13, 11), (0.8, 12, 10), (0.8, 1, 1)],
)
def test_a_fraction_of_the_run_is_not_rounded_away(fraction, steps, first):
    assert PhaseSection(at=fraction).first_step(TrainSection(steps=steps, seq_len=8)) == first


def test_a_run_resumed_within_a_phase_goes_on_as_it_would_have(shared_tiny, training_values):
    once = [FREEZE.replace(", {at=8}", ""), "scheduler.decay_steps=8"]
    straight = shared_tiny.completed("run.name=straight", *once)
    shared_tiny.completed("run.name=resumed", *once, "train.steps=5")
    again = shared_tiny.completed("run.name=resumed", *once)

    assert training_values(again) == training_values(straight)


def test_phases_to_come_may_change_and_no_others(shared_tiny, capsys):
    shared_tiny.completed("run.name=changed", FREEZE, "train.steps=8")

    def resume(phases):
        return main(["run", str(shared_tiny.config), "run.name=changed", "train.steps=9", phases])

    assert resume('phases=[{at=4, train=["head.*"]}, {at=8}]') == 2
    assert "phases: " in (said := capsys.readouterr().err)
    assert "Change only phases to come" in said
    assert resume(FREEZE.replace("at=8", "at=7")) == 2
    assert resume(FREEZE[:-1] + ", {at=9, lr_scale=0.5}]") == 0


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        ("{at=4}, {at=4}", "phases[1].at: begins at step 4, not after step 4 of the phase before it"),
        ("{at=0.9}, {at=5}", "phases[1].at: begins at step 5, not after step 10"),
        ("{at=11}", "phases[0].at: 11 begins at step 11, after the last one, train.steps = 10"),
        ("{at=0}", "must be at least 1, the first step"),
        ("{at=1.5}", "must be above 0 and below 1 as a fraction of train.steps"),
        ('{at="2e9"}', 'or "2e9 tokens"'),
        ('{at="1e400 tokens"}', 'or "2e9 tokens"'),
        ("{at=2, lr_scale=-1}", "phases[0].lr_scale: must be at least 0"),
        ('{at=2, lr_scale={"head.*"=-0.5}}', "must be at least 0 and at most 1000000, got -0.5"),
        ("{at=2, lr_scale=1e300}", "phases[0].lr_scale: must be at least 0 and at most 1000000, got 1e+300"),
        ("{at=2, train=[]}", "phases[0].train"),
        ("{lr_scale=2}", "phases[0].at: is required"),
        ("{at=2, data={weights={a=1}}}", "phases[0].data: the data source text_files has no phases; leave data out"),
    ],
)
def test_phases_that_mean_nothing_are_refused(tiny, phases, sentence):
    with pytest.raises(ConfigProblems) as refused:
        load_job(tiny.config, [f"phases=[{phases}]"], catalog=discover(), world_size=1)

    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        (
            '{at=2, train=["bloks.*"]}',
            "phases[0].train: 'bloks.*' means no parameter of this model; did you mean 'blocks.*'",
        ),
        ('{at=2, lr_scale={"x.*"=1}}', "phases[0].lr_scale: 'x.*' means no parameter of this model"),
        ('{at="1e9 tokens"}', "after the last one, train.steps = 10"),
    ],
)
def test_what_only_the_model_knows_is_refused_before_anything_is_written(tiny, capsys, phases, sentence):
    assert main(["run", str(tiny.config), f"phases=[{phases}]"]) == 2
    assert sentence in capsys.readouterr().err
    assert not tiny.path().exists()


SOURCE = '{{name="{0}", weight=1, source={{name="text_files", path="{1}", pattern="{2}"}}}}'


def mixed(tiny):
    text = tiny.folder / "text"
    return (
        f'data={{name="mixture", sources=[{SOURCE.format("a", text, "1*.txt")}, {SOURCE.format("b", text, "2.txt")}]}}'
    )


def test_the_weights_of_a_mixture_change_with_the_very_step(shared_tiny):
    phases = "phases=[{at=6, data={weights={b=0}}}]"
    lines = shared_tiny.completed("run.name=mixed", mixed(shared_tiny), phases)

    of_b = [line["tokens/b"] for line in lines]
    assert of_b[4] == 5 * 4 * 32 / 2
    assert of_b[4:] == [of_b[4]] * 6
    assert [line["step"] for line in lines if "loss/b" in line] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("at", [2, 6])
def test_another_global_batch_is_refused_where_phases_have_data(shared_tiny, capsys, at):
    """Where weights change is computed as if all steps had had the same. It would move, and samples come twice."""
    job = [f"run.name=larger-{at}", mixed(shared_tiny), f"phases=[{{at={at}, data={{weights={{b=0}}}}}}]"]
    shared_tiny.completed(*job, "train.steps=6")

    assert main(["run", str(shared_tiny.config), *job, "train.global_batch_size=8"]) == 2

    said = capsys.readouterr().err
    assert "train.global_batch_size: the data of phases begin at samples counted by it" in said
    assert "was trained with 4, got 8" in said


def test_the_loss_is_the_mean_weighed_by_loss_weights(shared_tiny):
    """By a and by b alike many targets, of which those of b count three times."""
    weighed = mixed(shared_tiny).replace('name="b", weight=1', 'name="b", weight=1, loss_weight=3')
    lines = shared_tiny.completed("run.name=weighed", weighed, "train.steps=4", "eval.interval=0")
    plain = shared_tiny.completed("run.name=unweighed", mixed(shared_tiny), "train.steps=4", "eval.interval=0")

    for line in lines:
        assert line["loss"] == pytest.approx((line["loss/a"] + 3 * line["loss/b"]) / 4, rel=1e-5)
    assert [lines[0][f"loss/{name}"] for name in "ab"] == [plain[0][f"loss/{name}"] for name in "ab"]
    assert lines[0]["grad_norm"] != plain[0]["grad_norm"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("{weights={c=1}}", "phases[0].data.weights names 'c', and there is no such source"),
        ("{weights={a=0, b=0}}", "phases[0].data.weights are all 0"),
        ("{weights={a=-1}}", "phases[0].data.weights gives 'a' the weight -1, below 0"),
        ('{weights={a="x"}}', "phases[0].data.weights.a: expected a number"),
        ("{weight={a=1}}", "did you mean 'weights'?"),
    ],
)
def test_weights_that_mean_nothing_are_refused(tiny, data, sentence):
    with pytest.raises(ConfigProblems) as refused:
        load_job(tiny.config, [mixed(tiny), f"phases=[{{at=2, data={data}}}]"], catalog=discover(), world_size=1)

    assert sentence in str(refused.value)
