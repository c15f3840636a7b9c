"""The simulated effective training time against closed forms, and what ``forge plan --ettr`` says."""

import json
import math
import re

import attrs
import pytest

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_plan import lives, step_report
from forge_plugins_plan.clock import StuckError
from forge_plugins_plan.ettr import simulate
from forge_plugins_plan.failures import CAUSES, UNEXPECTED
from forge_plugins_plan.figures import Figures, figures_with
from forge_plugins_plan.lives import LOSSES
from forge_plugins_plan.long_job import (
    DAY,
    LongJob,
    best_interval,
    best_memory_interval,
    costs_of,
    seconds_between_failures,
)

JOB = LongJob(
    gpus=8192, checkpoint_bytes=4e12, copies=8.0, step_seconds=5.0, interval=1200.0, background=False, step_timeout=60.0
)
"""Saves of 7 s, read in 48 s."""
FIGURES = Figures(stops_per_day=0.0, wrong_seconds=600.0, spares=1e6)
NO_FAILURES = attrs.evolve(FIGURES, failures_per_1000_gpus_day=0.0)


def mean_detection(job, figures):
    """Seconds, over the causes."""
    seconds = {
        "ends": figures.death_seconds,
        "hangs": job.step_timeout + figures.hang_seconds,
        "is wrong": figures.wrong_seconds,
    }
    return sum(cause.count * seconds[cause.shows] for cause in CAUSES) / UNEXPECTED


def expected(job, figures):
    """Daly (2006), eq. 20, with a detection D beside the restart R: an interval of T seconds takes
    exp(R/M) (M + D) (exp((T + C)/M) - 1), where saves of C seconds are in the foreground."""
    costs, mtbf = costs_of(job, figures), seconds_between_failures(job, figures)
    cycle = job.interval + costs.blocked
    restart = costs.start + costs.read
    down = mtbf + mean_detection(job, figures)
    return job.interval / (math.exp(restart / mtbf) * down * math.expm1(cycle / mtbf))


def test_the_causes_are_the_419_of_the_paper():
    assert UNEXPECTED == 419
    assert sum(cause.count for cause in CAUSES if "GPU" in cause.name) + 6 == 268  # with silent data corruption


@pytest.mark.parametrize("per_day", [0.2, 0.4736, 3.0])
@pytest.mark.parametrize(("interval", "start"), [(300.0, 40.0), (1200.0, 40.0), (7200.0, 40.0), (1200.0, 2000.0)])
def test_it_is_that_of_the_closed_form(per_day, interval, start):
    job = attrs.evolve(JOB, interval=interval)
    figures = attrs.evolve(FIGURES, failures_per_1000_gpus_day=per_day, start_seconds=start)

    found = simulate(job, figures, days=400, lives=20)

    assert found.ratio == pytest.approx(expected(job, figures), abs=max(4 * found.deviation, 1e-4))
    assert found.deviation < 0.003
    assert found.ratio + sum(found.lost.values()) == pytest.approx(1)
    if start < 100:  # otherwise many come while it waits for those before
        assert found.interruptions == pytest.approx(per_day * 8.192, rel=0.1)


def test_without_failures_only_saves_cost_time():
    found = simulate(JOB, NO_FAILURES, days=100, lives=1)

    cost = costs_of(JOB, NO_FAILURES).blocked
    assert found.ratio == pytest.approx(1 - cost / (JOB.interval + cost), abs=1e-4)
    assert found.costs_most == "saves"
    assert found.lost["saves"] == pytest.approx(1 - found.ratio)
    assert simulate(attrs.evolve(JOB, interval=math.inf), NO_FAILURES, lives=1).ratio == 1


@pytest.mark.parametrize("background", [True, False])
def test_the_interval_of_young_and_daly_loses_least(background):
    figures = attrs.evolve(FIGURES, host_copy_gb=0.2)
    job = attrs.evolve(JOB, background=background)
    costs = costs_of(job, figures)
    best = best_interval(job, figures)

    assert best == pytest.approx(math.sqrt(2 * costs.of_save * seconds_between_failures(job, figures)))
    shorter, at_best, longer = (
        simulate(attrs.evolve(job, interval=factor * best), figures, days=200).ratio for factor in (0.4, 1, 2.5)
    )
    assert at_best > max(shorter, longer) + 0.003


def test_the_best_interval_is_no_less_than_a_step_or_a_write():
    figures = attrs.evolve(FIGURES, host_copy_gb=1e9)
    assert (
        best_interval(attrs.evolve(JOB, background=True), figures)
        == costs_of(attrs.evolve(JOB, background=True), figures).written
    )
    slow = attrs.evolve(JOB, background=True, step_seconds=30.0)
    assert best_interval(slow, figures) == 30


def test_a_checkpoint_in_the_background_counts_when_it_is_written():
    job = attrs.evolve(JOB, background=True, interval=100.0)
    quick, slow = FIGURES, attrs.evolve(FIGURES, storage_gb_per_gpu=FIGURES.storage_gb_per_gpu / 10)
    lost = [simulate(job, figures, days=400).lost["lost steps"] for figures in (quick, slow)]

    mtbf = seconds_between_failures(job, FIGURES)
    written = [costs_of(job, figures).written for figures in (quick, slow)]
    assert lost[1] - lost[0] == pytest.approx((written[1] - written[0]) / mtbf, rel=0.1)


def test_saves_that_come_before_the_last_is_written_wait():
    job = attrs.evolve(JOB, background=True, interval=2.0)
    costs = costs_of(job, NO_FAILURES)

    found = simulate(job, NO_FAILURES, lives=1)

    assert costs.written > 2 * job.interval
    assert found.ratio == pytest.approx(job.interval / (costs.written + costs.blocked), rel=1e-3)


def test_a_job_without_checkpoints_keeps_what_its_last_start_has_done():
    found = simulate(attrs.evolve(JOB, interval=math.inf), FIGURES)

    assert found.ratio < 0.02
    assert found.costs_most == "lost steps"


def test_spare_nodes_are_there_until_they_are_used_up():
    figures = [attrs.evolve(FIGURES, spares=spares, replenish_of_requeue=40.0) for spares in (0.0, 1.0, 1e6)]
    none, one, many = (simulate(JOB, given).lost["waiting for nodes"] for given in figures)

    taken = sum(cause.count for cause in CAUSES if cause.takes_node) / UNEXPECTED
    a_second = 1 / seconds_between_failures(JOB, FIGURES)
    assert none == pytest.approx(costs_of(JOB, FIGURES).wait * taken * a_second, rel=0.1)
    away = costs_of(JOB, figures[1]).spare_away * taken * a_second  # Erlang: of one spare, this much is away
    assert one == pytest.approx(none * away / (1 + away), rel=0.15)
    assert many == 0


def test_planned_stops_lose_no_steps():
    figures = attrs.evolve(NO_FAILURES, stops_per_day=4.0)

    found = simulate(JOB, figures)

    costs = costs_of(JOB, figures)
    assert found.lost["restart"] == pytest.approx(4 / DAY * (costs.start + costs.read), rel=0.1)
    assert found.lost["lost steps"] == found.lost["detection"] == 0


def test_a_lost_file_system_costs_a_fetch_from_the_mirror_or_everything():
    figures = attrs.evolve(NO_FAILURES, lost_file_systems_per_day=0.5, mirror_gb_per_gpu=0.001)
    without = simulate(JOB, figures)
    mirrored = simulate(attrs.evolve(JOB, has_mirror=True), figures)

    costs = costs_of(JOB, figures)
    assert without.ratio < 0.1
    assert mirrored.ratio > 0.98
    assert mirrored.lost["restart"] == pytest.approx(0.5 / DAY * (costs.fetched + costs.start + costs.read), rel=0.1)
    again = JOB.interval / 2 + costs.blocked + costs.copied
    assert mirrored.lost["lost steps"] == pytest.approx(0.5 / DAY * again, rel=0.15)


def test_replicas_go_on_without_the_one_that_is_lost():
    job = attrs.evolve(JOB, step_timeout=600.0)
    figures = attrs.evolve(FIGURES, replicas=4.0, wrong_seconds=0.0, failures_per_1000_gpus_day=0.2)
    found = simulate(job, figures, days=400)

    costs, a_second = costs_of(job, figures), 1 / seconds_between_failures(job, figures)
    hangs = sum(cause.count for cause in CAUSES if cause.shows == "hangs") / UNEXPECTED
    stall = (1 - hangs) * figures.replica_death_seconds + hangs * figures.replica_hang_seconds
    away = hangs * (job.step_timeout + 2 - figures.replica_hang_seconds) + costs.start + costs.read
    assert found.lost["detection"] == pytest.approx(a_second * stall, rel=0.1)
    assert found.lost["fewer replicas"] == pytest.approx(a_second * away / 4, rel=0.1)
    assert found.ratio > simulate(job, attrs.evolve(figures, replicas=1.0), days=400).ratio


def test_a_replica_that_is_hit_while_it_starts_begins_again():
    """Each is there for exp(-r a) of the time: r failures of it a second, a seconds until it is back."""
    instantly = attrs.evolve(FIGURES, replica_death_seconds=0.0, replica_hang_seconds=0.0, host_copy_gb=1e9)
    figures = attrs.evolve(
        instantly, replicas=4.0, wrong_seconds=0.0, failures_per_1000_gpus_day=12.0, hang_seconds=0.0
    )
    figures = attrs.evolve(figures, start_seconds=1800.0, death_seconds=0.0)
    job = attrs.evolve(JOB, background=True, step_timeout=0.0, interval=60.0)

    found = simulate(job, figures, days=30)

    costs = costs_of(job, figures)
    one_is_lost = 1 - sum(cause.count for cause in CAUSES if cause.shows == "is wrong") / UNEXPECTED
    rate = one_is_lost / seconds_between_failures(job, figures) / 4
    there = math.exp(-rate * (costs.start + costs.read))
    assert 0.4 < there < 0.7
    assert found.ratio / (found.ratio + found.lost["fewer replicas"]) == pytest.approx(there, rel=0.04)


@pytest.mark.parametrize(
    ("gpus", "hot", "requeue"), [(2048, 46, 454), (4096, 51, 545), (8192, 54, 635), (16_384, 65, 768)]
)
def test_starts_take_what_was_published_or_a_little_more(gpus, hot, requeue):
    """ByteRobust, Table 7."""
    costs = costs_of(attrs.evolve(JOB, gpus=gpus), Figures())

    assert 0.99 * hot < costs.start < 1.35 * hot
    assert costs.start + costs.wait == pytest.approx(requeue, rel=0.05)


def test_saves_take_what_was_measured_or_published():
    of_two_ranks = LongJob(gpus=2, checkpoint_bytes=315e6, step_seconds=1.0, interval=60.0)
    assert costs_of(of_two_ranks, Figures()).blocked == pytest.approx(0.042, rel=0.01)
    assert costs_of(attrs.evolve(of_two_ranks, copies=2.0), Figures()).blocked == pytest.approx(0.084, rel=0.01)
    of_a_cluster = attrs.evolve(of_two_ranks, gpus=24_576, checkpoint_bytes=2e12, copies=3.0)
    assert costs_of(of_a_cluster, Figures()).written == pytest.approx(1)
    assert costs_of(of_a_cluster, Figures()).read == pytest.approx(3)


def test_the_same_seed_gives_the_same_lives():
    assert simulate(JOB, FIGURES, lives=3) == simulate(JOB, FIGURES, lives=3)
    assert simulate(JOB, FIGURES, lives=3) != simulate(JOB, FIGURES, lives=3, seed=1)


def test_figures_that_the_packages_set_are_theirs():
    pytest.importorskip("forge_plugins_torchft")
    from forge_plugins_monitor.peers.pulses import SILENCE
    from forge_plugins_torchft.config import TorchftConfig
    from forge_plugins_torchft.replicas import replicas

    figures = Figures()
    (heartbeat,) = [one.default for one in replicas.params if "--heartbeat-timeout" in one.opts]
    assert figures.death_seconds == SILENCE
    assert figures.replica_death_seconds == heartbeat
    assert figures.replica_hang_seconds == attrs.fields(TorchftConfig).timeout.default


@pytest.mark.parametrize(
    ("assumed", "sentence"),
    [
        ("sapres=4", "Did you mean spares?"),
        ("spares", "must be NAME=NUMBER"),
        ("spares=1.5", "must be a whole number from 0"),
        ("replicas=0", "must be a whole number from 1"),
        ("storage_gb_per_gpu=0", "must be a number above 0"),
        ("slower_while_written=1", "must be a number from 0 and below 1"),
        ("death_seconds=-1", "must be a number from 0"),
        ("death_seconds=inf", "must be a number from 0"),
        ("death_seconds=soon", "must be a number from 0"),
    ],
)
def test_what_a_figure_cannot_be_is_said(assumed, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        figures_with([assumed])


TOML = """
[model]
name = "transformer"
dim = 64
n_layers = 2
n_heads = 4
max_seq_len = 64
vocab_size = 500
[data]
name = "text_files"
path = "not-there"
[train]
steps = 10
seq_len = 64
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""


@pytest.fixture
def plan(tmp_path, capfd):
    file = tmp_path / "job.toml"
    file.write_text(TOML)

    def run(*arguments):
        code = main(["plan", str(file), *arguments])
        return code, *capfd.readouterr()

    return run


def test_a_planned_job_is_told_its_effective_training_time(plan):
    asked = ("--world-size", "1024", "--ettr", "--step-seconds", "2", "checkpoint.interval=3600")
    code, out, said = plan(*asked, "parallel.dp_replicate=2", "run.step_timeout=300", "--assume", "death_seconds=9")

    assert code == 0, said
    assert re.search(r"^Effective training time on 1,024 GPUs: 9\d\.\d% of 20 simulated lives of 90 days$", out, re.M)
    assert re.search(r"^  a failure every 2\.06 d; ", out, re.M)
    assert re.search(r"^  checkpoints of [\d.]+ GB, one every 2 h; best is one every 2 s$", out, re.M)
    assert re.search(r"^Most would help: a checkpoint every 2 s \(checkpoint\.interval = 1\): 99\.\d%$", out, re.M)
    assert re.search(r"^  then .*4 spare nodes: 9\d\.\d%$", out, re.M)
    assert re.search(r"^  death_seconds +9 s +given by --assume$", out, re.M)
    assert re.search(r"^  wrong_seconds +4289 s +published: ByteRobust", out, re.M)
    assert not re.search(r" $", out, re.M)


def test_the_same_as_data(plan):
    asked = ("--world-size", "8", "--json", "--ettr", "--gpu", "h100", "checkpoint.interval=0")
    code, out, said = plan(*asked, "checkpoint.minutes=10", "checkpoint.mirror=elsewhere", "--assume", "replicas=2")

    assert code == 0, said
    planned = json.loads(out)
    told = planned["ettr"]
    assert told["job"]["gpus"] == 16
    assert told["job"]["interval"] == 600
    assert told["job"]["has_mirror"]
    assert told["job"]["copies"] == 2
    assert told["job"]["step_timeout"] == 600
    assert told["job"]["checkpoint_bytes"] == pytest.approx(12 * planned["parameters"], rel=0.05)
    assert told["job"]["step_seconds"] == planned["time"]["seconds"] > 0
    assert told["found"]["ratio"] + sum(told["found"]["lost"].values()) == pytest.approx(1)
    assert list(told["found"]["lost"]) == list(LOSSES)
    assert told["figures"]["replicas"] == {"value": 2, "unit": "", "source": "given by --assume"}

    code, out, _ = plan(*asked)
    assert code == 0
    assert json.loads(out)["ettr"]["job"]["interval"] is None
    code, out, _ = plan(*asked, "checkpoint.minutes=30", "--assume", "failures_per_1000_gpus_day=500")
    assert code == 0
    assert "checkpoint.minutes = 0" in json.loads(out)["ettr"]["helps"][0]["what"]


def test_a_job_that_nothing_interrupts_needs_no_checkpoints(plan):
    never = ("--assume", "failures_per_1000_gpus_day=0", "--assume", "stops_per_day=0")
    code, out, said = plan("--world-size", "8", "--ettr", "--step-seconds", "2", *never)

    assert code == 0, said
    assert "  no failures; with planned stops 0 interruptions a day\n" in out
    assert "best is none\n" in out
    code, out, _ = plan("--world-size", "8", "--ettr", "--step-seconds", "2", *never, "--json")
    assert json.loads(out)["ettr"]["best_interval"] is None


def test_a_step_whose_time_cannot_be_planned_has_to_be_given(plan, monkeypatch):
    def stuck(*_, **__):
        raise StuckError("the stages of the pipeline wait for each other")

    monkeypatch.setattr(step_report, "step_time", stuck)

    code, _, said = plan("--world-size", "8", "--ettr", "--gpu", "h100")
    assert code == 2
    assert "--ettr needs the time of a step, which cannot be planned: give --step-seconds S" in said
    assert plan("--world-size", "8", "--ettr", "--gpu", "h100", "--step-seconds", "2")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ettr", "--step-seconds", "1"], "--world-size N is needed"),
        (["--world-size", "8", "--ettr"], "--ettr needs the time of a step: give --step-seconds S, or --gpu NAME"),
        (["--world-size", "8", "--step-seconds", "1"], "--step-seconds has no effect without --ettr"),
        (["--world-size", "8", "--step-seconds", "0"], "--step-seconds has no effect without --ettr"),
        (["--world-size", "8", "--assume", "spares=4"], "--assume has no effect without --ettr"),
        (
            ["--world-size", "8", "--ettr", "--step-seconds", "0"],
            "--step-seconds 0: must be a number of seconds above 0",
        ),
        (["--world-size", "8", "--ettr", "--step-seconds", "1", "--assume", "spare=4"], "Did you mean spares?"),
        (
            ["--world-size", "2", "--ettr", "--step-seconds", "1", "parallel.passes.fsdp.cpu_offload=true"],
            "a step of rank 0 cannot be simulated",
        ),
    ],
)
def test_what_cannot_be_told_is_said(plan, arguments, sentence):
    code, _, said = plan(*arguments)

    assert code == 2
    assert sentence in said


def only(monkeypatch, *shows):
    """Causes of these kinds alone, as often as all of them."""
    causes = [cause for cause in CAUSES if cause.shows in shows]
    monkeypatch.setattr(lives, "CAUSES", causes)
    monkeypatch.setattr(lives, "UNEXPECTED", sum(cause.count for cause in causes))
    return causes


@pytest.mark.parametrize("interval", [60.0, 600.0])
def test_with_checkpoints_in_memory_alone_it_is_that_of_the_closed_form(monkeypatch, interval):
    """As ``expected``, with what memory takes in place of the disk."""
    (detection,) = {FIGURES.death_seconds for cause in only(monkeypatch, "ends")}
    job = attrs.evolve(JOB, interval=math.inf, memory_interval=interval, background=True)
    figures = attrs.evolve(FIGURES, failures_per_1000_gpus_day=3.0, memory_write_gb=1e9, host_copy_gb=0.5)
    costs, mtbf = costs_of(job, figures), seconds_between_failures(job, figures)
    assert costs.memory_blocked == pytest.approx(job.checkpoint_bytes / job.gpus / 0.5e9)
    assert costs.memory_read == pytest.approx(
        job.checkpoint_bytes / job.gpus * (8 / (figures.memory_read_gb * 1e9) + 7 / (figures.memory_send_gb * 1e9))
    )

    found = simulate(job, figures, days=400, lives=20)

    restart = costs.start + costs.memory_read
    cycle = interval + costs.memory_blocked
    ratio = interval / (math.exp(restart / mtbf) * (mtbf + detection) * math.expm1(cycle / mtbf))
    assert found.ratio == pytest.approx(ratio, abs=max(4 * found.deviation, 1e-4))
    assert sum(found.lost.values()) + found.ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("shows", "spares", "helps"), [("ends", 1e6, True), ("ends", 0.0, False), ("is wrong", 1e6, False)]
)
def test_memory_helps_where_the_job_goes_on_from_it(monkeypatch, shows, spares, helps):
    """Not where it may hold wrong numbers, nor where the job goes back into the queue for another node."""
    causes = only(monkeypatch, shows)
    if not spares:
        monkeypatch.setattr(lives, "CAUSES", [attrs.evolve(cause, takes_node=True) for cause in causes])
    figures = attrs.evolve(FIGURES, spares=spares, host_copy_gb=1e9)
    without = simulate(JOB, figures, days=90, lives=10)
    with_memory = simulate(attrs.evolve(JOB, memory_interval=30.0), figures, days=90, lives=10)

    assert (with_memory.lost["lost steps"] < 0.5 * without.lost["lost steps"]) == helps
    assert (with_memory.lost["restart"] < without.lost["restart"]) == helps


def test_the_best_interval_in_memory_is_shorter_as_each_tensor_is_copied_once():
    figures = Figures()
    assert best_memory_interval(JOB, figures) == pytest.approx(
        best_interval(attrs.evolve(JOB, background=True), figures) / math.sqrt(8)
    )
