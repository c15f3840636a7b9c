"""A step that would do harm is left out on all ranks, and nothing else changes: whole runs, in one launch."""

import json
import os

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint
from parity_matrix.launch import Launcher, Work

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DATA = [
    "model.n_layers=2",
    'data={name="numbered"}',
    "train.steps=8",
    "eval.interval=0",
    "checkpoint.interval=0",
    "scheduler.decay_steps=20",
]
TWO = [*DATA, "train.batch_size=2"]
PIPELINE = [*DATA, "train.batch_size=1", "train.grad_accumulation=4", "parallel.pp=2"]
FIRST_MIDDLE_LAST = "steps=[1, 4, 8]"
PLAIN = ['optimizer={name="plain_adamw", lr=3e-3}']
GROUPED = (  # each leaves a step out on the device
    'optimizer={name="grouped", groups=[{roles=["matrix"], patterns=["blocks.0.*", "blocks.1.*"], optimizer='
    '{name="muon", lr=1e-2}}, {roles=["matrix"], patterns=["blocks.2.*"], optimizer={name="adafactor", lr=3e-3}}, '
    '{roles=["matrix"], patterns=["blocks.3.*"], optimizer={name="adamw_8bit", lr=3e-3, min_elements=0}}, '
    '{roles=["norm", "bias"], optimizer={name="lion", lr=1e-3}}, {roles=["head"], optimizer={name="sgd", lr=1e-2, '
    'decoupled_weight_decay=false, nesterov=true}}, {optimizer={name="adamw", lr=3e-3}}]}'
)
EMA = '{name="ema", decay=0.5, warm_up=true}'
SCHEDULE_FREE = "optimizer={name='schedule_free_adamw', lr=3e-3}"
SPIKES = ["anomalies.spike_factor=5", "anomalies.spike_window=3"]
RARELY = "metrics.interval=100"


def poison(what, *keys, more=""):
    return f'callbacks=[{{name="poison", what="{what}", {", ".join(keys)}}}{more and ", " + more}]'


def leave_out(steps=FIRST_MIDDLE_LAST, more=""):
    return f'callbacks=[{{name="leave_out", {steps}}}{more and ", " + more}]'


def marked(first, stop, more=EMA):
    poisoned = poison("loss", "nan=true", "marked=true", more=more)
    return [f'data={{name="numbered", marked=[{first}, {stop}]}}', poisoned]


BACK = ["train.steps=10", "checkpoint.interval=3", "anomalies.roll_back_after=2"]
EVALUATED = ["eval.interval=1", "eval.batches=1"]
"""After each step, right before the run goes back: what FSDP has gathered for it is not what is trained on."""
WITHOUT = ['data={name="numbered", without=[16, 24]}', f"callbacks=[{EMA}]"]
SEARCHED = [*DATA, "train.steps=10", "checkpoint.interval=3", "anomalies.roll_back_after=1", "train.precision=bf16"]
POISONED = {  # name: the reference that leaves out the same steps, the number of ranks, settings
    "gradient-nan": ("one", 1, [*DATA, poison("gradient", "nan=true", FIRST_MIDDLE_LAST)]),
    "loss-inf": ("one", 1, [*DATA, poison("loss", "inf=true", FIRST_MIDDLE_LAST), RARELY]),
    "host": ("host-reference", 1, [*DATA, *PLAIN, poison("gradient", "inf=true", FIRST_MIDDLE_LAST)]),
    "grouped": (
        "grouped-reference",
        1,
        [*DATA, "model.n_layers=4", GROUPED, poison("gradient", "nan=true", FIRST_MIDDLE_LAST)],
    ),
    "schedule-free": (
        "schedule-free-reference",
        1,
        [*DATA, SCHEDULE_FREE, poison("gradient", "nan=true", FIRST_MIDDLE_LAST)],
    ),
    "ema": ("ema-reference", 1, [*DATA, poison("gradient", "nan=true", FIRST_MIDDLE_LAST, more=EMA)]),
    "ema-host": (
        "ema-host-reference",
        1,
        [*DATA, *PLAIN, poison("gradient", "nan=true", FIRST_MIDDLE_LAST, more=EMA)],
    ),
    "spike": ("spike-reference", 1, [*DATA, *SPIKES, poison("gradient", "value=1e4", "steps=[6]")]),
    "gradient-inf-of-one": ("two", 2, [*TWO, poison("gradient", "inf=true", "rank=1", FIRST_MIDDLE_LAST)]),
    "loss-nan-of-one": ("two", 2, [*TWO, poison("loss", "nan=true", "rank=1", FIRST_MIDDLE_LAST), RARELY]),
    "stage": ("stages", 2, [*PIPELINE, poison("gradient", "nan=true", "rank=0", FIRST_MIDDLE_LAST)]),
}
BY_NIGHT = {"loss-inf", "ema-host", "gradient-inf-of-one"}
"""What others show in two: an infinite value (``host``), a loss (``loss-nan-of-one``), averages (``ema``)."""
REFERENCES = {
    "one": (1, [*DATA, leave_out()]),
    "host-reference": (1, [*DATA, *PLAIN, leave_out()]),
    "grouped-reference": (1, [*DATA, "model.n_layers=4", GROUPED, leave_out()]),
    "schedule-free-reference": (1, [*DATA, SCHEDULE_FREE, leave_out()]),
    "ema-reference": (1, [*DATA, leave_out(more=EMA)]),
    "ema-host-reference": (1, [*DATA, *PLAIN, leave_out(more=EMA)]),
    "spike-reference": (1, [*DATA, *SPIKES, leave_out("steps=[6]")]),
    "two": (2, [*TWO, leave_out()]),
    "stages": (2, [*PIPELINE, leave_out()]),
}


def by_day_or_night(names):
    """For ``parametrize``."""
    return [pytest.param(name, marks=pytest.mark.nightly if name in BY_NIGHT else []) for name in names]


@pytest.fixture(scope="module")
def launcher(request, tmp_path_factory, saboteur_site):
    items = [item for item in request.session.items if item.path == request.path]
    is_night = any(item.get_closest_marker("nightly") for item in items)
    poisoned = {name: one for name, one in POISONED.items() if is_night or name not in BY_NIGHT}
    references = {name: REFERENCES[name] for name, _, _ in poisoned.values()}
    launcher = Launcher(tmp_path_factory.mktemp("anomalies"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(saboteur_site), prepend=os.pathsep)
        launcher.launch(
            [
                *(Work(name, ranks, settings) for name, (ranks, settings) in references.items()),
                *(Work(name, ranks, settings) for name, (_, ranks, settings) in poisoned.items()),
                Work("spike-halved", 1, [*POISONED["spike"][2], "train.steps=5"]),
                Work("spike-halved", 1, POISONED["spike"][2]),
                Work("back", 1, [*DATA, *BACK, *marked(16, 24)]),
                Work("back", 1, [*DATA, *BACK, *marked(16, 24), "train.steps=13"]),
                Work("back-halved", 1, [*DATA, *BACK, *marked(16, 24), "train.steps=5"]),
                Work("back-halved", 1, [*DATA, *BACK, *marked(16, 24), "train.steps=13"]),
                Work("back-reference", 1, [*DATA, *BACK, *WITHOUT, "train.steps=13"]),
                Work("back-of-two", 2, [*TWO, *BACK, *EVALUATED, *marked(18, 24), "metrics.interval=4"]),
                Work("back-of-two-reference", 2, [*TWO, *BACK, *EVALUATED, *WITHOUT]),
                Work("back-searched", 1, [*SEARCHED, *marked(16, 20, more="")]),
                Work("back-searched-reference", 1, [*SEARCHED, 'data={name="numbered", without=[16, 20]}']),
            ],
            timeout=800,
        )
    return launcher


def events(launcher, name, kind):
    lines = (launcher.run_dir(name) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert [key for key in tensors if not torch.equal(tensors[key], expected[key])] == []


@pytest.mark.parametrize("name", by_day_or_night(POISONED))
def test_the_run_ends_with_the_weights_of_one_that_leaves_the_step_out(launcher, name):
    assert_equal(launcher.saved(name), launcher.saved(POISONED[name][0]))


@pytest.mark.parametrize("name", by_day_or_night(["ema", "ema-host", "ema-reference"]))
def test_an_average_counts_the_updates_that_were_done(launcher, name):
    (updates,) = (tensor for key, tensor in launcher.saved(name).items() if key.endswith(".ema.updates"))
    assert updates.item() == 8 - 3


@pytest.mark.parametrize("name", by_day_or_night(sorted(POISONED.keys() - {"spike"})))
def test_every_step_is_told_of_once(launcher, name):
    assert [event["step"] for event in events(launcher, name, "skipped")] == [1, 4, 8]
    assert launcher.metrics(name)[-1]["skipped"] == 3


def test_an_event_names_ranks_tensors_and_samples(launcher):
    _, event, _ = events(launcher, "loss-nan-of-one", "skipped")

    assert event["reason"] == "not finite"
    assert event["samples"] == [[14, 15]], "those of the second rank"
    assert [(found["rank"], found["loss"], found["n_gradients"]) for found in event["found"]] == [(1, True, 0)]

    _, event, _ = events(launcher, "gradient-nan", "skipped")

    assert event["samples"] == [[12, 15]]
    (found,) = event["found"]
    assert not found["loss"]
    assert "embed.weight" in found["gradients"]
    assert not any(name.startswith("blocks.1.") for name in found["gradients"]), "it is after the poisoned one"

    _, event, _ = events(launcher, "stage", "skipped")
    assert [found["rank"] for found in event["found"]] == [0], "the other stage has finite gradients"


def test_a_spike_is_judged_by_the_steps_before_it_also_after_a_resume(launcher):
    assert [(e["step"], e["reason"]) for e in events(launcher, "spike", "skipped")] == [(6, "spike")]
    assert_equal(launcher.saved("spike-halved"), launcher.saved("spike"))


@pytest.mark.parametrize("name", ["back", "back-of-two"])
def test_too_many_in_a_row_take_the_run_back_and_their_samples_out(launcher, name):
    reference = {line["step"]: line for line in launcher.metrics(f"{name}-reference") if "loss" in line}

    assert [(e["step"], e["reason"]) for e in events(launcher, name, "skipped")] == [
        (5, "not finite"),
        (6, "not finite"),
    ]
    (event,) = events(launcher, name, "rolled_back")
    assert (event["to_step"], event["attempt"], event["samples"]) == (3, 1, [[16, 23]])
    assert_equal(launcher.saved(name), launcher.saved(f"{name}-reference"))
    lines = [line for line in launcher.metrics(name) if "loss" in line]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "one history"
    for line in lines:
        keys = ("loss", "grad_norm", "lr", "tokens", "skipped")
        assert [line[key] for key in keys] == [reference[line["step"]][key] for key in keys]


def test_a_run_that_goes_back_right_after_the_search_computes_with_what_it_has_read(launcher):
    """The search ends with a forward, after which FSDP keeps the copies in bf16 that it has made."""
    (event,) = events(launcher, "back-searched", "rolled_back")

    assert (event["step"], event["to_step"], event["samples"]) == (6, 3, [[16, 19]])
    assert_equal(launcher.saved("back-searched"), launcher.saved("back-searched-reference"))


def test_a_row_of_which_a_part_was_saved_takes_the_run_back_to_before_it(launcher):
    (event,) = events(launcher, "back-halved", "rolled_back")

    assert (event["step"], event["to_step"]) == (6, 3)
    assert [event["step"] for event in events(launcher, "back-halved", "resumed")] == [5]
    assert_equal(launcher.saved("back-halved"), launcher.saved("back"))


def test_the_samples_stay_out_in_later_checkpoints(launcher):
    checkpoints = launcher.run_dir("back") / "checkpoints"

    states = {step: open_checkpoint(checkpoints / f"step_{step:08d}").state() for step in (3, 6, 13)}

    assert {step: state["left_out"] for step, state in states.items()} == {3: [], 6: [[16, 24]], 13: [[16, 24]]}
    assert states[13]["position"] == 52
