"""``forge plan RUN`` plans the job of a run, and shows what the run has taken beside it."""

import json
import math

import pytest

from forge_core.cli import main
from forge_plugins_plan.run_figures import run_figures

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 1
n_heads = 2
vocab_size = 100
max_seq_len = 16
[data]
name = "token_files"
path = "not-there.npy"
[train]
steps = 10
seq_len = 16
batch_size = 2
[optimizer]
name = "adamw"
lr = 1e-3
"""


@pytest.fixture
def run(tmp_path):
    """A directory as a run of two ranks on GPUs leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "job.toml").write_text(JOB)
    (folder / "environment.json").write_text(json.dumps({"world_size": 2}))
    values = [(9.0, 0.5), (0.4, 0.25), (0.1, 0.75), (0.3, 0.5)]
    lines = [{"step": number, "step_seconds": s, "memory_gib": gib} for number, (s, gib) in enumerate(values, 1)]
    lines.insert(2, {"step": 2, "eval/loss": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text('{"event": "started", "step": 0}\n{"event": "saved", "step": 4}\n')
    return folder


def test_median_and_peak_of_a_run_stand_beside_its_plan(run, capfd):
    assert main(["plan", str(run), "--gpu", "h200", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)

    assert plan["run"] == {
        "path": str(run),
        "ranks": 2,
        "lines": 3,  # the first is not counted
        "step_seconds": 0.3,
        "peak_bytes": 0.75 * 2**30,
    }
    assert (math.prod(plan["mesh"].values()), plan["tokens_per_step"]) == (2, 64)

    assert main(["plan", str(run), "--gpu", "h200"]) == 0
    *_, title, time, peak, far = capfd.readouterr().out.splitlines()

    assert title.split()[-3:] == ["planned", "run", "ratio"]
    seconds, peak_gib = plan["time"]["seconds"], plan["stages"][0]["peak_bytes"] / 2**30
    assert time.split()[-3:] == [f"{seconds:.3f}", "0.300", f"{0.3 / seconds:.2f}"]
    assert peak.split()[-3:] == [f"{peak_gib:.3f}", "0.750", f"{0.75 / peak_gib:.2f}"]
    assert far == "  More than 10% off: time of a step and peak of rank 0"


def test_an_earlier_start_counts_nothing(run):
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "resumed", "step": 2}\n')

    found = run_figures(run)

    assert (found.lines, found.step_seconds, found.peak_bytes) == (1, 0.3, 0.5 * 2**30)


def test_a_line_that_the_run_is_writing_is_left_out(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "step_sec')

    assert run_figures(run).lines == 3


@pytest.mark.parametrize(
    ("slower", "larger", "far"),
    [(1.05, 0.95, ""), (1.2, 1.0, "time of a step"), (1.0, 0.8, "peak of rank 0")],
)
def test_more_than_a_tenth_above_or_below_the_plan_is_named(run, capfd, slower, larger, far):
    assert main(["plan", str(run), "--gpu", "h200", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    seconds, gib = plan["time"]["seconds"] * slower, plan["stages"][0]["peak_bytes"] / 2**30 * larger
    lines = [{"step": step, "step_seconds": seconds, "memory_gib": gib} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert main(["plan", str(run), "--gpu", "h200"]) == 0

    last = capfd.readouterr().out.splitlines()[-1]
    assert last == f"  More than 10% off: {far}" if far else last.startswith("  peak of rank 0, GiB")


def test_without_the_figures_of_a_machine_the_way_to_them_is_told(run, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-calibration"))

    assert main(["plan", str(run)]) == 0

    *_, time, _, _, how = capfd.readouterr().out.splitlines()
    assert time.split()[-3:] == ["–", "0.300", "–"]
    assert "--calibrate" in how


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["parallel.tp=2"], "parallel.tp=2: the run in RUN is planned as it was trained; to plan another one give RUN"),
        (["--world-size", "4"], "--world-size 4: the run in RUN is planned as it was trained"),
    ],
)
def test_a_run_is_not_planned_as_another_one(run, capfd, arguments, sentence):
    assert main(["plan", str(run), *arguments]) == 2

    said = " ".join(capfd.readouterr().err.split())
    assert sentence.replace("RUN", str(run)) in said


def test_a_file_needs_a_number_of_ranks(run, capfd):
    assert main(["plan", str(run / "job.toml")]) == 2

    assert "--world-size N is needed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("environment.json", None, "environment.json"),
        ("environment.json", "{}", "KeyError: 'world_size'"),
        ("environment.json", "[2]", "TypeError"),
        ("events.jsonl", None, "events.jsonl"),
        ("events.jsonl", "", "IndexError"),
        ("metrics.jsonl", "{\n", "JSONDecodeError"),
        ("metrics.jsonl", "1\n", "TypeError"),
        ("metrics.jsonl", '{"step": 1, "step_seconds": 2.0}\n', "has logged fewer than two steps"),
    ],
)
def test_a_directory_without_a_runs_figures_is_refused(run, capfd, file, content, sentence):
    (run / file).unlink()
    if content is not None:
        (run / file).write_text(content)

    assert main(["plan", str(run)]) == 2

    said = capfd.readouterr().err
    assert str(run) in said
    assert sentence in said


def test_the_vocabulary_of_data_that_do_not_say_it_is_that_of_the_run_s_checkpoint(run, capfd):
    """It was asked for by --vocab-size. The tensors, which are not here, are not looked at."""
    (run / "job.toml").write_text(JOB.replace("vocab_size = 100\n", ""))
    for step, state in ((3, {"vocab_size": 77}), (4, None)):
        (folder := run / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps(state))

    assert main(["plan", str(run), "--json"]) == 0

    assert json.loads(capfd.readouterr().out)["vocab_size"] == 77
