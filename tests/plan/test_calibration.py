"""A machine that has been measured: what is kept of it, what follows from it, and what is said if it is another one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import attrs
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_plan import measured_ranks, measuring
from forge_plugins_plan.calibration import Calibration, Collective, Grid, default_file, mismatches, read_calibration
from forge_plugins_plan.gpus import gpu_named
from forge_plugins_plan.work import ALL_GATHER, ALL_TO_ALL, ATTENTION, COLLECTIVES, MEMORY, PRODUCT, SEND, Work

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 2
max_seq_len = 32
vocab_size = 64
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""
TINY = measuring.Sizes(
    rows=(8, 16), widths=(8, 16), queries=(8, 16), heads=(8, 16), bytes_moved=(2**12, 2**14), bytes_sent=(64, 4096)
)
FORMS = ("plain", "math", "strided", "index")
ATTENTIONS = ("whole", "causal", "whole, backward", "causal, backward")


def flat(value, *axes):
    axes = axes or ((1.0, 1e12),)
    return Grid(axes, (float(value),) * (2 ** len(axes)))


@pytest.fixture
def made_up():
    """1000 FLOP/s in products, 100 in attention, 10 bytes/s in memory; collectives take 1 s up to 100 bytes."""
    cube = ((1.0, 1e6),) * 3
    return Calibration(
        device="cpu Abacus",
        torch=torch.__version__,
        date="2027-01-31",
        host="desk",
        ranks=2,
        threads=1,
        host_seconds=0.5,
        products={f"float32, {form}": flat(1000, *cube) for form in ("straight", "across")},
        attention={f"float32, {form}": flat(100, *cube[:2]) for form in ATTENTIONS},
        memory={f"float32, {form}": flat(10) for form in FORMS},
        collectives=tuple(
            Collective(kind=kind, ranks=2, ranks_of_node=2, seconds=Grid(((1.0, 100.0),), (1.0, 1.0)))
            for kind in COLLECTIVES
        ),
    )


@pytest.fixture
def forge(tmp_path, capfd, monkeypatch):
    """``forge plan`` of a small job in an empty folder; gives back its exit code, what it printed, and said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "job.toml").write_text(JOB)

    def run(*words):
        code = main(["plan", "job.toml", *words])
        return code, *capfd.readouterr()

    return run


def test_a_grid_is_exact_at_its_corners_and_for_powers_between_them_and_stops_at_its_edges():
    grid = Grid(((1, 10, 100), (2, 8)), tuple(3.0 * x**2 * y for x in (1, 10, 100) for y in (2, 8)))

    for x, y in ((1, 2), (10, 8), (100, 2), (5, 4), (31, 7.9)):
        assert grid.at(x, y) == pytest.approx(3 * x**2 * y)
    assert grid.at(1e6, 100) == pytest.approx(3 * 100**2 * 8)
    assert grid.at(0.1, 0.1) == pytest.approx(3 * 1 * 2)


def test_operations_take_what_their_like_took(made_up):
    work = Work(PRODUCT, dtype="float32", flops=5000, shape=(1, 4, 5, 6), form="straight")

    assert made_up.seconds(work) == pytest.approx(5)
    assert made_up.seconds(work._replace(kind=ATTENTION, shape=(4, 4, 8), form="causal, backward")) == pytest.approx(50)
    assert made_up.seconds(Work(MEMORY, dtype="float32", size=70, form="math")) == pytest.approx(7)
    assert made_up.seconds(Work(MEMORY, dtype="int64", size=70, form="index")) == pytest.approx(7)


def test_the_gradient_of_a_weight_is_looked_up_by_the_shape_of_the_forward(made_up):
    """Of a forward ``(m, k) (k, n)`` it is ``(n, m) (m, k)``."""
    axes = ((10.0, 1000.0), (20.0, 2000.0), (30.0, 3000.0))
    across = Grid(axes, (1.0, 1.0, 1.0, 1.0, 8.0, 1.0, 1.0, 1.0))  # 8 at m = 1000, n = 20, k = 30
    measured = attrs.evolve(made_up, products=made_up.products | {"float32, across": across})

    gradient = Work(PRODUCT, dtype="float32", flops=80, shape=(1, 20, 30, 1000), form="across")
    assert measured.seconds(gradient) == pytest.approx(10)


def test_a_collective_grows_with_its_bytes_beyond_those_that_were_measured_and_with_its_ranks(made_up):
    gather = Work(ALL_GATHER, size=50, ranks=2, ranks_of_node=2)

    assert made_up.seconds(gather) == pytest.approx(1)
    assert made_up.seconds(gather._replace(size=1000)) == pytest.approx(10)
    # of four ranks, each sends three quarters of it, and of two it was a half
    assert made_up.seconds(gather._replace(size=1000, ranks=4, ranks_of_node=4)) == pytest.approx(15)
    assert made_up.seconds(gather._replace(kind=SEND, size=1000)) == pytest.approx(20)


def test_a_network_that_was_not_measured_is_that_of_the_data_sheet(made_up):
    far = Work(ALL_TO_ALL, size=10**9, ranks=16, ranks_of_node=8)
    h100 = attrs.evolve(made_up, device="cuda NVIDIA H100 80GB HBM3")

    assert h100.seconds(far) == pytest.approx(30e-6 + 1e9 * 8 / 16 / (50e9 * 0.7))
    assert made_up.seconds(far) > 1e6, "as within the node, where nothing is known of the device"


def test_what_is_written_is_read_again(made_up, tmp_path):
    made_up.write(tmp_path / "new" / "c.json")

    assert read_calibration(tmp_path / "new" / "c.json") == made_up


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: "{", "is not what forge plan --calibrate writes"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "its version is 7, and this forge reads 1"),
        (lambda text: text.replace('"threads"', '"thread"'), "is not what forge plan --calibrate writes"),
        (lambda text: "[]", "is not what forge plan --calibrate writes"),
    ],
)
def test_another_file_is_refused(made_up, tmp_path, change, sentence):
    file = tmp_path / "c.json"
    made_up.write(file)
    file.write_text(change(file.read_text()))

    with pytest.raises(ConfigError, match=sentence):
        read_calibration(file)


def test_another_gpu_torch_or_number_of_ranks_is_told_with_both(made_up):
    here = {"gpu": None, "device": "cpu Abacus", "torch_version": torch.__version__, "ranks": 2}
    h100 = attrs.evolve(made_up, device="cuda NVIDIA H100 80GB HBM3")

    assert not [*mismatches(made_up, **here)]
    assert [*mismatches(made_up, **here | {"gpu": gpu_named("h200")})] == [
        "the calibration is of cpu Abacus, and the plan is for h200"
    ]
    assert [*mismatches(made_up, **here | {"device": "cpu Slide rule", "torch_version": "2.11.0", "ranks": 1})] == [
        "the calibration is of cpu Abacus, and this machine has cpu Slide rule",
        f"the calibration is of torch {torch.__version__}, and this is torch 2.11.0",
        "the calibration is of 2 ranks that share a CPU, and the plan has 1 on a node",
    ]
    assert not [*mismatches(h100, **here)], "a laptop plans for another machine"
    assert not [*mismatches(h100, **here | {"gpu": gpu_named("h100")})]


def test_a_cpu_is_measured_and_then_planned_with(forge, monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "OF_CPU", TINY)

    code, out, said = forge("--world-size", "1", "--calibrate", "--out", "c.json")

    assert code == 0, said
    assert "torch sees no GPU here; measuring the CPU: " in said
    assert "written to c.json" in said
    measured = read_calibration(tmp_path / "c.json")
    assert measured.device == measuring.device_words(torch.device("cpu"))
    assert measured.torch == torch.__version__
    assert (measured.ranks, measured.threads) == (1, torch.get_num_threads())
    grids = [*measured.products.values(), *measured.attention.values(), *measured.memory.values()]
    assert len(grids) == 2 * (2 + len(ATTENTIONS) + len(FORMS))
    assert all(value > 0 for grid in grids for value in grid.values)
    assert re.search(r"^Time of a step, m?s", out, re.M)
    assert f"By measured on {measured.device.partition(' ')[2]}, 1 rank of" in out

    code, again, said = forge("--world-size", "1", "--calibration", "c.json", "--json")
    time = json.loads(again)["time"]
    assert sum(time["parts"].values()) == pytest.approx(time["seconds"])
    assert time["tokens_per_second"] == pytest.approx(2 * 32 / time["seconds"])


def test_what_was_measured_of_this_machine_is_found_again(forge, monkeypatch):
    monkeypatch.setattr(measuring, "OF_CPU", TINY)
    before = forge("--world-size", "1")

    measured = forge("--world-size", "1", "--calibrate")
    after = forge("--world-size", "1")

    assert "Time of a step" not in before[1]
    assert default_file(measuring.device_words(torch.device("cpu")), 1).is_file()
    assert "Time of a step" in after[1]
    assert after[1] == measured[1]


def test_several_ranks_are_measured_by_as_many_processes(forge, monkeypatch):
    """The command starts itself, once for each rank."""
    started = []
    monkeypatch.setattr(
        measured_ranks, "launch_command", lambda words, number, *_: started.append((words, number)) or 3
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    with pytest.raises(SystemExit, match="3"):
        forge("--world-size", "4", "--calibrate", "--out", "c.json")

    ((words, number),) = started
    assert number == 2, "no more than there are cores"
    assert words[0] == "plan"
    assert words[-2:] == ["--out", "c.json"]


def test_collectives_of_two_ranks_are_measured(run_ranks):
    for said in run_ranks(Path(__file__).with_name("measuring_rank.py"), 2):
        table, _, ranks = said.strip().rpartition(" ")
        collectives = json.loads(table)
        assert ranks == "2"
        assert [tuple(one[:3]) for one in collectives] == [(kind, 2, 2) for kind in COLLECTIVES]
        assert all(seconds > 0 for one in collectives for seconds in one[3])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--out", "c.json"], "--out has no effect without --calibrate"),
        (["--calibration", "none.json"], "none.json: there is no such file; forge plan --calibrate --out none.json"),
        (["--calibrate", "--calibration", "c.json"], "leave one out"),
        (["--search"], "--search needs the times of a machine"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(forge, words, sentence):
    code, _, said = forge("--world-size", "1", *words)

    assert code == 2
    assert sentence in said


def test_a_calibration_of_something_else_is_warned_of(forge, made_up, tmp_path):
    made_up.write(tmp_path / "c.json")

    code, out, said = forge("--world-size", "2", "--calibration", "c.json", "--gpu", "h100")

    assert code == 0
    assert "warning: the calibration is of cpu Abacus, and the plan is for h100" in said
    assert "By measured on Abacus" in out
