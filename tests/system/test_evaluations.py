"""``[[evaluations]]``: what is measured of a model during its run, alike in every layout."""

from types import SimpleNamespace

import attrs
import pytest

from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.config.problems import ConfigProblems
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import PluginError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_core.train.evaluation import NamedEvaluation, build_evaluations
from parity_matrix.cells import CELLS, TRAININGS
from parity_matrix.launch import Launcher, Work
from parity_matrix.selection import by_day_or_night, selected_cells

HELD_OUT = '{name="perplexity", interval=2}'
SHORT = '{name="perplexity", label="short", samples=7, data={name="text_files", path="short", pattern="*.txt"}}'
ACCURACY = '{name="accuracy", samples=5, interval=4}'
EVALUATIONS = [f'evaluations=[{HELD_OUT}, {SHORT}, {ACCURACY}, {{name="logits_loss"}}]']
EVALUATIONS += ["train.steps=4", "eval.interval=4"]
LAYOUTS = ("fsdp2", "tp2", "tp2-whole-positions", "cp2", "cp2-ring", "pp2-1f1b", "pp2-dualpipe-v", "tp2-fsdp2")
SPARSE = ("moe-ep2", "moe-cp2-packed")
BY_NIGHT = {"fsdp2", "tp2", "tp2-whole-positions", "cp2-ring", "pp2-dualpipe-v", "tp2-fsdp2", "moe-cp2-packed"}
WRONG = {
    "a tensor": "returned a Tensor as 'loss', not a number; read a tensor with .item()",
    "nan": "returned NaN as 'loss'",
    "a list": "returned a list; it must return numbers by name",
}


def _work(cell):
    return Work(cell, CELLS[cell].ranks, [*TRAININGS[CELLS[cell].training], *CELLS[cell].layout, *EVALUATIONS])


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    return Launcher(tmp_path_factory.mktemp("evaluations"))


@pytest.fixture(scope="module")
def said(request, launcher):
    """The runs of all selected tests, in one launch; the words of rank 0."""
    cells = selected_cells(request)
    trainings = {"plain", *(CELLS[cell].training for cell in (*LAYOUTS, *SPARSE) if cell in cells)}
    plain = [Work(name, 1, [*TRAININGS[name], *EVALUATIONS]) for name in sorted(trainings)]
    wrong = [
        Work(
            f"wrong-{given.replace(' ', '-')}",
            1,
            [f'evaluations=[{{name="logits_loss", gives="{given}"}}]'],
            refused=True,
        )
        for given in WRONG
    ]
    return launcher.launch([*plain, *(_work(cell) for cell in (*LAYOUTS, *SPARSE) if cell in cells), *wrong])


def evaluated(launcher, name):
    return [line for line in launcher.metrics(name) if "loss" not in line]


def test_each_is_logged_at_its_own_steps(launcher, said):
    lines = {line["step"]: line.keys() - {"step", "time"} for line in evaluated(launcher, "plain")}

    held_out = {f"eval/perplexity/{name}" for name in ("loss", "perplexity", "tokens")}
    assert lines.keys() == {2, 4}
    assert held_out <= lines[2]
    assert "eval/short/loss" not in lines[2]
    assert {"eval/loss", "eval/short/loss", "eval/accuracy/accuracy", "eval/logits_loss/loss"} <= lines[4]


def test_the_perplexity_of_the_held_out_data_is_that_of_eval(launcher, said):
    last = evaluated(launcher, "plain")[-1]

    for name in ("loss", "perplexity", "tokens"):
        assert last[f"eval/perplexity/{name}"] == last[f"eval/{name}"]
    assert last["eval/short/loss"] != last["eval/loss"]


@pytest.mark.parametrize("cell", by_day_or_night([*LAYOUTS, *SPARSE], BY_NIGHT))
def test_every_layout_measures_what_one_process_does(launcher, said, cell):
    expected, found = evaluated(launcher, CELLS[cell].training), evaluated(launcher, cell)

    assert [line["step"] for line in found] == [2, 4]
    for line, of_one in zip(found, expected, strict=True):
        for key in (key for key in of_one if key.startswith("eval/")):
            # one process may take another of two all but equally likely tokens
            assert line[key] == pytest.approx(of_one[key], rel=1e-2 if "accuracy" in key else 1e-5), key


@pytest.mark.parametrize("cell", by_day_or_night(["plain", *LAYOUTS, *SPARSE], BY_NIGHT))
def test_the_loss_of_predicted_logits_is_the_loss(launcher, said, cell):
    last = evaluated(launcher, cell)[-1]

    assert last["eval/logits_loss/loss"] == pytest.approx(last["eval/loss"], rel=1e-5)
    assert last["eval/logits_loss/targets"] == last["eval/tokens"]


def test_what_is_no_number_is_named(launcher, said):
    for sentence in WRONG.values():
        assert sentence in said


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (f"{HELD_OUT}, {HELD_OUT}", "evaluations[1].label: another entry is logged as eval/perplexity already"),
        ('{name="perplexty"}', "Did you mean 'perplexity'?"),
        ('{name="perplexity", label="a/b"}', "evaluations[0].label"),
        ('{name="perplexity", interval=-1}', "evaluations[0].interval"),
        ('{name="accuracy", top=0}', "evaluations[0].top"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tiny, entry, sentence):
    with pytest.raises(ConfigProblems) as refused:
        load_job(tiny.config, [f"evaluations=[{entry}]"], catalog=discover(), world_size=1)

    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("metric", "interval", "sentence"),
    [
        (
            "eval/acuracy/accuracy",
            5,
            "not measured in this job; choose one of eval/loss, eval/perplexity, eval/loss/<value>, eval/held/<value>",
        ),
        ("eval/held", 5, "checkpoint.best_metric: 'eval/held' is not measured in this job"),
        ("eval/held/", 5, "checkpoint.best_metric: 'eval/held/' is not measured in this job"),
        ("eval/losss", 5, "checkpoint.best_metric: 'eval/losss' is not measured in this job"),
        ("eval/held/accuracy", 0, "nothing is evaluated to tell which are the best; set evaluations[0].interval"),
        ("eval/held/accuracy", 4, "checkpoint.interval = 10 must be a multiple of evaluations[0].interval = 4"),
        ("eval/loss/web", 5, "nothing is evaluated to tell which are the best; set eval.interval"),
    ],
)
def test_a_value_by_which_no_checkpoint_can_be_judged_is_refused(tiny, metric, interval, sentence):
    keep = f"checkpoint={{interval=10, keep_last=1, keep_best=2, best_metric='{metric}'}}"
    evaluations = f"evaluations=[{{name='accuracy', label='held', interval={interval}}}]"

    with pytest.raises(ConfigProblems) as refused:
        load_job(tiny.config, [keep, evaluations, "eval.interval=0"], catalog=discover(), world_size=1)

    assert sentence in str(refused.value)


def test_data_that_are_not_there_are_named_before_anything_is_built(tiny, capsys):
    entry = 'evaluations=[{name="perplexity", data={name="text_files", path="nowhere"}}]'

    assert main(["run", str(tiny.config), entry]) == 2
    assert "evaluations[0].data: " in capsys.readouterr().err
    assert not tiny.path().exists()


def test_a_config_without_the_keys_of_evaluations_is_a_bug_of_its_plugin():
    @attrs.frozen
    class Config:
        top: int = 1

    use = ComponentRef(kind="evaluation", name="odd", provider="acme", factory="acme:Odd", config=Config())

    with pytest.raises(PluginError, match=r"its config .*Config must extend EvaluationConfig\. This is a bug in acme"):
        build_evaluations(SimpleNamespace(evaluations=[use]), ComponentBuilder(discover()), None, None)


@pytest.mark.parametrize("value", [True, "1", None])
def test_a_value_that_is_true_or_text_is_no_number(value):
    returned = SimpleNamespace(run=lambda context: {"exact": value})

    with pytest.raises(PluginError, match=f"the evaluation returned a {type(value).__name__} as 'exact', not a number"):
        NamedEvaluation(returned, 1, "own", "the evaluation").run(None)
