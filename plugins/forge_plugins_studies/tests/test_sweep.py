"""``forge sweep``: a grid of runs on this machine."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import fork_server
from forge_core.cli import main
from forge_plugins_studies import results
from forge_plugins_studies.gpus import gpus_for, visible_gpus
from forge_plugins_studies.processes import Task, _last_line, run_tasks, state_of
from forge_plugins_studies.results import _mean_and_spread, last_values
from forge_testing.json_output import json_of

SWEEP = ["--sweep", "optimizer.lr=1e-2,1e-3"]


def last_line(run):
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def wait_for_a_step(run, sweep):
    """From then on, the run hears signals."""
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and sweep.poll() is None:
        time.sleep(0.05)


def last_event(run):
    return json.loads((run / "events.jsonl").read_text().splitlines()[-1])


@pytest.mark.usefixtures("forked_runs")
def test_each_combination_is_a_run_and_the_same_command_leaves_them_as_they_are(study, capfd):
    grid = ["sweep", str(study), *SWEEP, "--sweep", "train.seed=1,2", "--parallel", "2", "checkpoint.interval=2"]
    runs = study.parent / "runs"

    assert main(grid) == 0
    said = capfd.readouterr().out
    losses = {run.name: last_line(run)["eval/loss"] for run in runs.glob("tiny-lr-*")}
    assert len(set(losses.values())) == 4
    each, means = said.split("mean ± standard deviation over train.seed:\n")
    rows = [line.split() for line in each.splitlines() if line.startswith(("1e-2", "1e-3"))]
    assert [row[:4] for row in rows] == [[lr, seed, "completed", "4"] for lr in ("1e-2", "1e-3") for seed in ("1", "2")]
    best = min(losses, key=losses.get)
    assert [f"tiny-lr-{row[0]}-seed-{row[1]}" for row in rows if row[-2:-1] == ["*"]] == [best]
    for lr, line in zip(("1e-2", "1e-3"), means.splitlines()[1:], strict=False):
        mean, spread = map(float, line.split()[-3::2])
        one, other = (losses[f"tiny-lr-{lr}-seed-{seed}"] for seed in "12")
        assert line.split()[:2] == [lr, "2"]
        assert mean == pytest.approx((one + other) / 2, abs=1e-4)
        assert spread == pytest.approx(abs(one - other) / 2**0.5, abs=1e-4)
    assert "4 runs" in said
    assert all(name in (runs / "tiny-sweep" / "report.html").read_text() for name in losses)

    told = json_of(*grid)
    assert [one["settings"] for one in told[:2]] == [{"optimizer.lr": "1e-2", "train.seed": n} for n in ("1", "2")]
    assert {one["name"]: one["eval_loss"] for one in told} == losses
    assert {(one["state"], one["step"]) for one in told} == {("completed", 4)}

    kept = [*runs.glob("tiny-lr-*/metrics.jsonl"), *runs.glob("tiny-sweep/*.log")]  # no run is started to find its end
    before = {file: file.read_bytes() for file in kept}
    assert main(grid) == 0
    assert len(before) == 8
    assert {file: file.read_bytes() for file in before} == before

    run = runs / "tiny-lr-1e-2-seed-2"
    (run / "checkpoints" / "step_00000004" / "__0_0.distcp").write_bytes(b"cut off")
    assert main(grid) == 0
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert last_line(run)["eval/loss"] == losses[run.name]
    assert {file.parent for file in before if file.read_bytes() != before[file]} == {run, runs / "tiny-sweep"}

    capfd.readouterr()
    assert main([*grid, "optimizer.weight_decay=0.5"]) == 2
    sentence = "has been started with optimizer.weight_decay = 0.1, and would now have 0.5; choose another run.name"
    assert sentence in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_a_signal_saves_the_run_that_is_on_and_the_same_command_goes_on(study):
    """The runs of the first command are no forks: a process of its own starts them."""
    command = [sys.executable, "-m", "forge_core", "sweep", str(study), *SWEEP, "train.steps=100000", "eval.interval=0"]
    runs = study.parent / "runs"
    sweep = fork_server.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    metrics = runs / "tiny-lr-1e-2" / "metrics.jsonl"
    wait_for_a_step(metrics.parent, sweep)
    sweep.send_signal(signal.SIGINT)
    said, _ = sweep.communicate(timeout=120)

    assert sweep.returncode == 3
    assert "tiny-lr-1e-2: stopped" in said
    assert "not started" in said
    stopped_at = last_line(metrics.parent)["step"]
    checkpoints = metrics.parent / "checkpoints"
    assert (checkpoints / f"step_{stopped_at:08}").exists()

    assert main(["sweep", str(study), *SWEEP, f"train.steps={stopped_at + 2}", "eval.interval=0"]) == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps[-1] == stopped_at + 2
    assert steps == sorted(set(steps))


@pytest.mark.usefixtures("forked_runs")
def test_a_run_that_fails_is_told_and_the_others_are_run(study, capfd):
    assert (
        main(["sweep", str(study), "--sweep", "optimizer.lr=1e30,1e-2", "anomalies.give_up_after=1", "train.steps=20"])
        == 4
    )
    said = capfd.readouterr().out
    assert "tiny-lr-1e30: failed (4)" in said
    assert "not finite" in said
    assert "tiny-lr-1e-2: completed" in said


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone can be asked for that")
@pytest.mark.slow
def test_a_run_stops_when_its_sweep_is_killed(study):
    command = [sys.executable, "-m", "forge_core", "sweep", str(study), *SWEEP, "train.steps=5000", "eval.interval=0"]
    run = study.parent / "runs" / "tiny-lr-1e-2"
    sweep = fork_server.Popen(command, stdout=subprocess.DEVNULL)
    wait_for_a_step(run, sweep)
    sweep.kill()
    sweep.wait()
    deadline = time.monotonic() + 120
    while (ended := last_event(run))["event"] not in ("preempted", "completed") and time.monotonic() < deadline:
        time.sleep(0.05)

    assert (ended["event"], ended["reason"]) == ("preempted", "SIGTERM")
    assert (run / "checkpoints" / f"step_{ended['step']:08}").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Missing option '--sweep'"),
        (["--sweep", "optimizer.lr"], "expected key=value,value as in --sweep optimizer.lr=1e-3,3e-4"),
        (["--sweep", "optimizer.lr=1e-3,-1"], "optimizer.lr=-1: optimizer.lr: must be greater than 0"),
        (["--sweep", "optimizer.beta=1,2"], "did you mean 'betas'?"),
        ([*SWEEP, "--sweep", "optimizer.lr=1"], "optimizer.lr is swept twice; give all its values in one"),
        ([*SWEEP, "--optimizer.lr=1"], "optimizer.lr=1: optimizer.lr is swept, and each run has a value of its own"),
        (
            [*SWEEP, "optimizer.lr=1"],
            "optimizer.lr is swept, and each run has a value of its own; leave one of the",
        ),
        ([*SWEEP, "--paralel=2"], "did you mean '--parallel'?"),
        (["--sweep", "optimizer.lr = 1e-3", "optimizer.lr=1"], "optimizer.lr=1: optimizer.lr is swept, and each run"),
        ([*SWEEP, "optimizer.lr = 1"], "optimizer.lr = 1: optimizer.lr is swept, and each run"),
        ([*SWEEP, f"run.name={'n' * 193}"], "nnn…, with 201 bytes, and at most 200 can be the name of its directory"),
        (["--sweep", "run.name=a,b"], "run.name is made for each run of the sweep; set it for all of them"),
        ([*SWEEP, "--parallel", "0"], "0 is not in the range x>=1"),
        ([*SWEEP, "--nproc", "2", "parallel.tp=4"], "parallel"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(study, capsys, words, sentence):
    assert main(["sweep", str(study), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (study.parent / "runs").exists()


def test_a_dry_run_lists_the_runs_and_writes_nothing(study, capsys):
    assert main(["sweep", str(study), *SWEEP, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tiny-lr-1e-2: optimizer.lr=1e-2",
        "tiny-lr-1e-3: optimizer.lr=1e-3",
    ]
    assert not (study.parent / "runs").exists()


def test_side_by_side_each_has_gpus_of_its_own(study, monkeypatch, capsys):
    assert [gpus_for(place, 2, ["0", "1", "2", "3"]) for place in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert gpus_for(1, 2, []) == {}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert visible_gpus({}) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}) == ["3", "5"]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["sweep", str(study), *SWEEP, "--parallel", "8", "--dry-run"]) == 0  # there are two runs
    assert main(["sweep", str(study), *SWEEP, "--parallel", "2", "--nproc", "2"]) == 2
    assert "--parallel 2: that takes 4 GPUs, 2 a run, and there are 2" in capsys.readouterr().err
    assert not (study.parent / "runs").exists()


@pytest.mark.usefixtures("forked_runs")
def test_no_more_run_side_by_side_than_was_asked_for(tmp_path):
    tasks = [Task(name=str(i), arguments=["--version"], log=tmp_path / f"{i}.log") for i in range(4)]
    running, most, places = set(), 0, []

    def tell(task, ended):
        nonlocal most
        (running.discard if ended else running.add)(task.name)
        most = max(most, len(running))

    ended = run_tasks(tasks, 2, lambda place: places.append(place) or {}, tell)

    assert most == 2
    assert set(places) == {0, 1}
    assert {one.code for one in ended.values()} == {0}
    assert all("0.1" in task.log.read_text() for task in tasks)


@pytest.mark.usefixtures("forked_runs")
def test_each_place_has_its_own_environment(tmp_path):
    tasks = [Task(name=str(i), arguments=["plugins"], log=tmp_path / f"{i}.log") for i in range(2)]
    disabled = ["forge-plugins-plan", "forge-plugins-mirror"]

    run_tasks(tasks, 2, lambda place: {"FORGE_DISABLE_PLUGINS": disabled[place]}, lambda task, ended: None)

    for i, name in enumerate(disabled):
        lines = (tmp_path / f"{i}.log").read_text().splitlines()
        assert [one.partition(" ")[0] for one in lines if "disabled" in one] == [name]


def test_codes_are_states():
    codes = {
        0: "completed",
        3: "stopped",
        4: "failed (4)",
        120: "failed (120)",
        -9: "killed by SIGKILL",
        -35: "killed by signal 35",
    }
    assert {code: state_of(code) for code in codes} == codes


def test_a_run_that_is_stopped_before_it_listens_is_stopped_and_no_other_is_started(tmp_path):
    # "doctor" runs for seconds, and leaves SIGTERM to the kernel
    tasks = [Task(name=str(i), arguments=["doctor"], log=tmp_path / f"{i}.log") for i in range(2)]

    ended = run_tasks(tasks, 1, lambda place: {}, lambda task, ended: ended or os.kill(os.getpid(), signal.SIGINT))

    assert {name: one.code for name, one in ended.items()} == {"0": 3}


@pytest.mark.usefixtures("forked_runs")
def test_the_last_line_is_that_of_this_attempt(tmp_path):
    task = Task(name="a", arguments=["no-such-command"], log=tmp_path / "a.log")
    task.log.write_text("done: 10 steps\n")
    ended = run_tasks([task], 1, lambda place: {}, lambda task, ended: None)["a"]

    assert ended.code == 2
    assert "no-such-command" in ended.output
    assert task.log.read_text().startswith("done: 10 steps\n")


def test_the_error_of_a_run_is_told_though_another_start_of_it_prints_more(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("error: of an earlier attempt\nstep 1\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("error: another process is training there\nsaved step_00000003\n")

    assert _last_line(log, start) == "error: another process is training there"


def test_a_seed_without_a_loss_has_no_part_in_a_mean():
    assert _mean_and_spread([1.0, None, 2.0]) == "none in 1 of 3"
    assert _mean_and_spread([1.0]) == "1.0000"
    assert _mean_and_spread([1.0, 2.0, 3.0]) == "2.0000 ± 1.0000"


def test_odd_lines_of_metrics_cost_nothing_else(tmp_path):
    lines = ['{"step": 1, "loss": 2.0}', '{"step": 2, "loss": NaN}', "[1]", '{"event": "x"}', '{"step": 3, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))

    assert last_values(tmp_path) == {"step": 2, "loss": None}


def test_the_last_values_of_a_long_run_are_found_without_parsing_all_its_lines(tmp_path, monkeypatch):
    lines = [{"step": 1, "eval/loss": 5.0}, *({"step": step, "loss": 1 / step} for step in range(1, 1001))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 1001, "lo')
    parsed = []
    monkeypatch.setattr(results.json, "loads", lambda line, loads=json.loads: parsed.append(line) or loads(line))

    assert last_values(tmp_path) == {"step": 1000, "loss": 0.001, "eval/loss": 5.0}
    assert len(parsed) < 20
