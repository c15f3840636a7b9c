"""The chart has the schedule's values; the picture is one; problems are sentences."""

import sys
from pathlib import Path

import pytest

from forge_core.cli import main
from forge_plugins_optim.terminal_chart import terminal_chart

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 1
n_heads = 4
[data]
name = "text_files"
path = "corpus"
[train]
steps = 100
seq_len = 16
batch_size = 4
[optimizer]
name = "adamw"
lr = 0.01
[scheduler]
name = "linear"
min_ratio = 0.0
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    return file


def test_a_chart_has_its_values_in_eighths_of_a_line() -> None:
    assert list(terminal_chart([0.0, 1.0, 2.0, 1.5], 2, first=1, last=4)) == [
        "2 ┤  █▄",
        "0 ┤ ███",
        "  └────",
        "   1  4",
    ]


def test_a_curve_of_zeros_is_an_empty_chart() -> None:
    assert next(iter(terminal_chart([0.0, 0.0], 2, first=1, last=2))) == "1 ┤"


def test_the_schedule_is_drawn_with_its_ends(job, capsys) -> None:
    assert main(["plot-schedule", str(job), "--width", "10", "--height", "5", "scheduler.warmup_fraction=0.5"]) == 0

    lines = capsys.readouterr().out.splitlines()
    heights = [sum(line[3:].ljust(10)[column] != " " for line in lines[1:6]) for column in range(10)]
    assert heights == sorted(heights[:5]) + sorted(heights[5:], reverse=True)
    assert (heights[0], heights[4], heights[9]) == (1, 5, 0)
    assert lines[7].split() == ["1", "100"]
    assert lines[8] == "first update: 0.02, learning rate 0.0002"
    assert lines[9] == "last update: 0, learning rate 0"


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ([], 64),
        (["--world-size", "8"], 512),
        (["--world-size", "8", "parallel.tp=2"], 256),
        (["train.global_batch_size=12"], 192),
        (["parallel.dp_replicate=2"], 128),
    ],
)
def test_a_warm_up_in_tokens_is_that_of_so_many_ranks(job, capsys, settings, tokens) -> None:
    warm_up = f"scheduler.warmup_tokens={10 * tokens}"

    assert main(["plot-schedule", str(job), warm_up, *settings]) == 0

    printed = capsys.readouterr().out
    assert "first update: 0.1," in printed
    assert f"tokens: {tokens} a step" in printed


def test_a_picture_is_written(job, tmp_path) -> None:
    out = tmp_path / "schedule.png"

    assert main(["plot-schedule", str(job), "--out", str(out), "train.steps=5000"]) == 0

    from matplotlib.image import imread

    assert imread(out).shape[:2] == (600, 1200)


def test_a_picture_without_matplotlib_says_what_to_install(job, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert main(["plot-schedule", str(job), "--out", str(tmp_path / "x.png")]) == 2

    assert "pip install 'forge-plugins-optim[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"), [("x.word", "format 'word' is not supported"), ("none/x.png", "cannot be written: No such file")]
)
def test_a_picture_that_cannot_be_written_is_a_sentence(job, tmp_path, capsys, name, said) -> None:
    assert main(["plot-schedule", str(job), "--out", str(tmp_path / name)]) == 2

    assert said in capsys.readouterr().err


def test_a_wrong_schedule_is_refused_as_in_a_run(job, capsys) -> None:
    assert main(["plot-schedule", str(job), "scheduler.warmup_tokens=1e9"]) == 2

    assert "scheduler.warmup_tokens must be below train.steps = 100" in capsys.readouterr().err
