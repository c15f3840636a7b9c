"""``smoothed`` against the moving average of the lines of ``metrics.jsonl``."""

import json
import math
from typing import ClassVar

import attrs
import pytest

from forge_core.checkpoint.store import open_checkpoint
from forge_core.cli import main
from forge_core.contracts.callback import OneRank, StepContext
from forge_plugins_monitor.config import SmoothedConfig
from forge_plugins_monitor.smoothed import Smoothed
from forge_testing.callback import CallbackConformance, SmallRun

JOB = """
[run]
name = "noisy"
device = "cpu"
[model]
name = "transformer"
dim = 16
n_layers = 1
n_heads = 2
max_seq_len = 8
[data]
name = "synthetic"
vocab_size = 32
[train]
steps = 12
seq_len = 8
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[scheduler]
name = "constant"
[metrics]
interval = 2
[checkpoint]
interval = 6
[[callbacks]]
name = "smoothed"
alpha = 0.25
metrics = ["loss", "step_seconds"]
"""


class TestSmoothed(CallbackConformance):
    component = "forge-plugins-monitor:smoothed"
    config: ClassVar = {"metrics": ["loss", "grad_norm"]}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)

    def go(*settings):
        assert main(["run", "job.toml", *settings]) == 0
        return lines_of(tmp_path)

    return go


def lines_of(folder):
    return [json.loads(line) for line in (folder / "runs/noisy/metrics.jsonl").read_text().splitlines()]


def averages(values, alpha):
    """Of the values before each one, in float64 and by the formula of the docs."""
    found, mean = [], None
    for value in values:
        found.append(mean)
        mean = value if mean is None else alpha * value + (1 - alpha) * mean
    return found


def test_lines_have_the_moving_averages_of_the_lines_before(run):
    lines = run()

    assert [line["step"] for line in lines] == [1, 2, 4, 6, 8, 10, 12]
    for name in ("loss", "step_seconds"):
        assert [line.get(f"smoothed/{name}") for line in lines] == [
            mean and pytest.approx(mean, rel=1e-6) for mean in averages([line[name] for line in lines], 0.25)
        ]


def test_a_resumed_run_goes_on_bit_for_bit(run, tmp_path):
    whole = run()
    (tmp_path / "runs/noisy").rename(tmp_path / "whole")

    run("train.steps=6")
    state = open_checkpoint(tmp_path / "runs/noisy/checkpoints/step_00000006").state()
    resumed = run()

    (saved,) = state["callbacks"].values()
    assert saved["state"]["means"]["loss"] == averages_as_kept([line["loss"] for line in whole[:4]], 0.25)
    assert [line["smoothed/loss"] for line in resumed[1:]] == [line["smoothed/loss"] for line in whole[1:]]


def averages_as_kept(values, alpha):
    mean = values[0]
    for value in values[1:]:
        mean += alpha * (value - mean)
    return mean


class Lines:
    """Steps that are all logged, one step late, as a run does."""

    def __init__(self, folder, pp=1, **config):
        self.callback = Smoothed(SmoothedConfig(**config))
        self.said = []
        mesh = OneRank()
        mesh.degrees = {"pp": pp}
        small = SmallRun(self.callback, folder, 1)
        self.run = attrs.evolve(small.run, mesh=mesh, log=self.said.append, report=self._report)
        self.step = 0

    def _report(self, values):
        self.reported = {name: value.item() for name, value in values.items()}

    def next(self, **metrics):
        """What the step reports, of which these are the values."""
        self.step += 1
        self.callback.step_end(self.run, StepContext(self.step, 0, {}, logged=True))
        self.callback.step_logged(self.run, self.step, metrics)
        return self.reported


def test_the_first_value_is_where_it_begins_and_alpha_is_the_weight_of_the_newest(tmp_path):
    lines = Lines(tmp_path, metrics=("loss",), alpha=0.5)

    assert [lines.next(loss=loss) for loss in (8.0, 4.0, 2.0, 0.0)] == [
        {},
        {"smoothed/loss": 8.0},
        {"smoothed/loss": 6.0},
        {"smoothed/loss": 4.0},
    ]


def test_a_step_that_is_not_logged_reports_nothing(tmp_path):
    lines = Lines(tmp_path, metrics=("loss",))
    lines.next(loss=1.0)
    lines.reported = None

    lines.callback.step_end(lines.run, StepContext(2, 0, {}, logged=False))

    assert lines.reported is None


def test_values_that_are_not_finite_are_left_out(tmp_path):
    lines = Lines(tmp_path, metrics=("loss",), alpha=0.5)
    for loss in (math.nan, 8.0, math.inf, math.nan, 4.0):
        lines.next(loss=loss)

    assert lines.next(loss=0.0) == {"smoothed/loss": 6.0}


def test_after_a_rollback_it_is_as_at_the_checkpoint(tmp_path):
    lines = Lines(tmp_path, metrics=("loss", "mfu"), alpha=0.5)
    lines.next(loss=8.0)
    saved = json.loads(json.dumps(lines.callback.state()))
    lines.next(loss=100.0, mfu=0.5)

    lines.callback.load_state(saved, 1)

    assert lines.next(loss=4.0) == {"smoothed/loss": 8.0}
    assert lines.next(loss=0.0) == {"smoothed/loss": 6.0}


def test_a_resumed_run_that_names_fewer_metrics_reports_these_alone(tmp_path):
    before = Lines(tmp_path, metrics=("loss", "mfu"))
    before.next(loss=8.0, mfu=0.5)
    lines = Lines(tmp_path, metrics=("loss",))

    lines.callback.load_state(before.callback.state(), 1)

    assert lines.next(loss=4.0) == {"smoothed/loss": 8.0}


def test_a_name_that_is_not_there_is_said_once_and_smoothed_from_where_it_comes(tmp_path):
    lines = Lines(tmp_path, metrics=("loss", "tokens_per_secnd", "auxiliary/balance"))

    lines.next(loss=1.0, tokens_per_second=9.0)
    lines.next(loss=1.0, tokens_per_second=9.0, **{"auxiliary/balance": 3.0})

    assert lines.next(loss=1.0) == {"smoothed/loss": 1.0, "smoothed/auxiliary/balance": 3.0}
    said = "smoothed: the line of step 1 has no {!r}, which is smoothed once there is one"
    hint = "; did you mean 'tokens_per_second'?"
    assert lines.said == [said.format("tokens_per_secnd") + hint, said.format("auxiliary/balance")]


def test_with_a_pipeline_every_name_is_there_from_the_first_line_on(tmp_path):
    lines = Lines(tmp_path, pp=2, metrics=("loss", "mfu"))

    first, second = lines.next(loss=2.0), lines.next(loss=4.0)

    assert [*first] == ["smoothed/loss", "smoothed/mfu"]
    assert math.isnan(first["smoothed/loss"])
    assert second["smoothed/loss"] == 2.0
    assert math.isnan(second["smoothed/mfu"])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("alpha", "0.0", "must be greater than 0"),
        ("alpha", "1.5", "must be at most 1"),
        ("metrics", "[]", "must not be empty"),
        ("metrics", '["loss", "eval/loss"]', "'eval/loss' is of evaluations"),
        ("metrics", '["loss", "mfu", "loss"]', "'loss' is named twice"),
    ],
)
def test_what_smooths_nothing_is_refused(tmp_path, capsys, key, value, words):
    (tmp_path / "job.toml").write_text(JOB.partition("alpha")[0] + f"{key} = {value}")

    assert main(["validate", str(tmp_path / "job.toml")]) == 2

    assert f"callbacks[0].{key}: {words}" in capsys.readouterr().err
