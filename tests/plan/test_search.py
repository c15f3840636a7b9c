"""``forge plan --search`` finds what is fastest on a machine where that is known."""

from __future__ import annotations

import json
import re

import attrs
import pytest

from forge_core.cli import main
from forge_plugins_plan import command, machine, search
from forge_plugins_plan.gpus import gpu_named

JOB = """
[model]
name = "transformer"
dim = 64
n_layers = 2
n_heads = 4
max_seq_len = 64
vocab_size = 256
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
seq_len = 64
batch_size = 2
precision = "bf16"
[optimizer]
name = "adamw"
lr = 1e-3
"""
THREE_HEADS = ("model.n_heads=3", "model.dim=48", "model.head_dim=16")


@pytest.fixture
def found(tmp_path, capfd):
    """The search of four ranks, two for each node, as data or as text."""
    (tmp_path / "job.toml").write_text(JOB)

    def run(*words, ranks="4", text=False):
        command = ["plan", str(tmp_path / "job.toml"), "--world-size", ranks, "--ranks-per-node", "2", "--gpu", "h100"]
        code = main([*command, "--search", *([] if text else ["--json"]), *words])
        out, said = capfd.readouterr()
        assert code == 0, said
        run.said = said
        return out if text else json.loads(out)["search"]

    return run


@pytest.fixture
def planned(tmp_path, capfd):
    """The plan of one layout, two ranks for each node, as data."""

    def run(*words, ranks="2"):
        command = ["plan", str(tmp_path / "job.toml"), "--world-size", ranks, "--ranks-per-node", "2", "--gpu", "h100"]
        code = main([*command, "--json", *words])
        out, said = capfd.readouterr()
        assert code == 0, said
        return json.loads(out)

    return run


def with_figures(monkeypatch, **changed):
    """No time but of what is changed: data sheets of an endless machine."""
    endless = machine.Figures(fp32_tflops=1e9, memory_tb=1e9, within_gb=1e9, between_gb=1e9)
    monkeypatch.setitem(machine.PUBLISHED, "h100", attrs.evolve(endless, **changed))
    monkeypatch.setattr(machine, "LATENCY_WITHIN", 0.0)
    monkeypatch.setattr(machine, "LATENCY_BETWEEN", 0.0)
    monkeypatch.setattr(machine, "HOST", 0.0)


@pytest.mark.nightly  # by day, the next one has the order in which layouts are simulated
def test_parameters_are_sharded_within_the_node_where_the_network_is_slow(found, monkeypatch):
    with_figures(monkeypatch, between_gb=1e-6)

    table = found()

    best = table["best"][0]["candidate"]["degrees"]
    assert best["dp_shard"] * best["cp"] * best["tp"] <= 2, best
    seconds = [one["seconds"] for one in table["best"]]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_the_layout_that_is_simulated_first_is_one_that_sends_little_over_slow_links(found, monkeypatch):
    with_figures(monkeypatch, between_gb=1e-6)
    monkeypatch.setattr(search, "SIMULATED", 1)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # for rich, a terminal

    (best,) = found()["best"]

    degrees = best["candidate"]["degrees"]
    assert degrees["dp_shard"] * degrees["cp"] * degrees["tp"] <= 2, degrees
    assert "a step of a rank is simulated" in found.said
    assert re.search(r"layouts looked at, \d of at most 1 simulated", found.said)


@pytest.mark.nightly
def test_a_pipeline_of_two_stages_takes_the_time_of_its_plan(found, planned, monkeypatch):
    """A machine on which products alone take time, and two ranks that can share out neither nine sequences nor three
    heads. Four microbatches are played, and five follow."""
    with_figures(monkeypatch)
    job = ("train.batch_size=1", "train.grad_accumulation=9", "parallel.pp=2", *THREE_HEADS)

    table = found(*job, ranks="2")

    pipelines = [one for one in table["best"] if one["candidate"]["degrees"]["pp"] == 2]
    assert pipelines
    for one in pipelines:
        bubble, seconds = one["parts"]["bubble"], one["seconds"]
        assert 0 < bubble < (seconds - bubble) / one["candidate"]["microbatches"]  # the other stage has no head
    time = planned(*job, *pipelines[0]["candidate"]["overrides"])["time"]
    assert pipelines[0]["parts"] == pytest.approx(time["parts"])


@pytest.mark.nightly
def test_a_pipeline_of_four_stages_takes_almost_the_time_of_its_plan(found, planned, monkeypatch):
    """The search plays the first stage and the last, and takes those between to be as the faster of these."""
    with_figures(monkeypatch)
    job = ("train.batch_size=1", "train.grad_accumulation=17", "parallel.pp=4", "model.n_layers=4", *THREE_HEADS)

    table = found(*job)

    pipelines = [one for one in table["best"] if one["candidate"]["degrees"]["pp"] == 4]
    assert pipelines
    for one in pipelines:
        time = planned(*job, *one["candidate"]["overrides"], ranks="4")["time"]
        assert one["seconds"] == pytest.approx(time["seconds"], rel=0.05), one["candidate"]
        assert one["parts"]["bubble"] == pytest.approx(time["parts"]["bubble"], rel=0.3), one["candidate"]


@pytest.mark.nightly
def test_nothing_is_cut_where_all_links_are_slow_but_what_has_to_be(found, monkeypatch):
    """Gradients are summed over all ranks in any case; a pipeline sends hidden states alone."""
    with_figures(monkeypatch, between_gb=1e-6, within_gb=1e-6)

    table = found("train.grad_accumulation=8")

    assert table["best"][0]["candidate"]["degrees"]["tp"] == 1
    assert table["best"][0]["candidate"]["recomputed"] == "nothing"


@pytest.mark.nightly
def test_what_does_not_fit_is_left_out_and_told(found, monkeypatch):
    free = 0.0045
    small = attrs.evolve(gpu_named("h100"), memory_gib=1 + free)
    monkeypatch.setattr("forge_plugins_plan.gpus.gpu_named", lambda _: small)

    table = found("train.batch_size=8")

    assert table["best"]
    assert all(one["fits"] and one["peak_bytes"] * 1.03 <= free * 2**30 for one in table["best"])
    assert not any(one["fits"] for one in table["too_large"])
    assert table["over_memory"] + len(table["too_large"]) > 0


@pytest.mark.slow
def test_it_says_what_became_of_all_and_how_to_have_the_best(found, planned, monkeypatch, capfd):
    monkeypatch.setattr(search, "SIMULATED", 5)
    echo, told = command._echo, []
    monkeypatch.setattr(command, "_echo", lambda *given, **how: (told.append(given), echo(*given, **how)))
    text = found(ranks="2", text=True)
    echo(*told[0], as_json=True)
    table = json.loads(capfd.readouterr().out)["search"]

    left = ("batch_not_shared", "over_memory", "slower", "refused", "not_simulated", "simulated")
    assert table["considered"] == sum(table[name] for name in left)
    assert f"{table['considered']:,} considered" in text
    assert len(table["best"]) == 5
    assert text.count("slower: ") == 4
    assert [one["why_slower"] for one in table["best"][1:]] == re.findall(r"^ +(slower: .*)$", text, re.M)

    first = table["best"][0]
    plan = planned(*first["candidate"]["overrides"])
    assert plan["time"]["seconds"] == pytest.approx(first["seconds"])
    assert plan["time"]["mfu"] == pytest.approx(first["mfu"])
    assert plan["stages"][0]["peak_bytes"] == first["peak_bytes"]
    assert {**plan["mesh"], "ep": plan["ep"]} == first["candidate"]["degrees"]
    assert plan["tokens_per_step"] == 2 * 2 * 64


@pytest.mark.nightly
def test_a_search_refuses_by_the_rules_of_the_job(found):
    """Three heads are cut by none of the degrees that are tried."""
    table = found(*THREE_HEADS)

    assert {one["candidate"]["degrees"]["tp"] for one in table["best"]} == {1}


def test_a_job_whose_own_layout_cannot_be_is_searched_from_one_that_can(found, monkeypatch):
    monkeypatch.setattr(search, "SIMULATED", 1)

    (best,) = found(*THREE_HEADS, "parallel.tp=4", "train.batch_size=8", "train.global_batch_size=4")["best"]

    assert "3 heads cannot be shared out evenly to parallel.tp = 4" in found.said
    assert "the one that is planned has parallel.pp=1" in found.said
    assert "train.batch_size=1" in found.said
    assert {"parallel.tp=1", "train.batch_size=1"} <= {*best["candidate"]["overrides"]}


def test_a_job_that_no_layout_mends_is_refused_as_without_a_search(tmp_path, capfd):
    (tmp_path / "job.toml").write_text(JOB)
    command = ["plan", str(tmp_path / "job.toml"), "--world-size", "4", "--gpu", "h100", "train.stepps=3"]

    assert [main(command), main([*command, "--search"])] == [2, 2]

    plain, searching = capfd.readouterr().err.split("error: ")[1:]
    assert plain == searching
