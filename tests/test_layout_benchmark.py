"""The benchmark of layouts measures each, and says of one that cannot be why."""

import re
import sys
from pathlib import Path

import pytest

import fork_server

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "layouts.py"

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 2
max_seq_len = 64
[data]
name = "text_files"
path = "."
tokenizer = "bytes"
[train]
steps = 2
seq_len = 64
batch_size = 4
[optimizer]
name = "adamw"
lr = 1e-3
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text("Each layout reads the same text. " * 200)
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace('"."', f'"{tmp_path}"').replace("tokenizer", 'pattern = "*.txt"\ntokenizer'))
    return path


def rows_of(config, *arguments):
    command = [sys.executable, str(SCRIPT), str(config), *arguments]
    done = fork_server.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[4:]]


@pytest.mark.nightly
def test_numbers_of_ranks_and_layouts_have_a_row_each_with_its_plan(config):
    layouts = ["--ranks", "1", "2", "--layout", "parallel.dp_shard=-1", "--layout", "parallel.tp=2"]

    rows = rows_of(config, *layouts, "--warmup", "1", "--steps", "3", "--plan", "--gpu h200 --vocab-size 257")

    assert [row[:2] for row in rows] == [
        [str(ranks), layout] for ranks in (1, 2) for layout in ("parallel.dp_shard=-1", "parallel.tp=2")
    ]
    whole, refused, *on_two = rows
    assert "multiple of 2" in refused[2]
    assert refused[3:] == [""] * 6
    assert whole[3] == "100.0%"
    for row, tokens in zip([whole, *on_two], (256, 512, 256), strict=True):
        speed, (median, least, most) = float(row[2].replace(",", "")), map(float, re.findall(r"[\d.]+", row[6]))
        assert least <= median <= most
        assert speed == pytest.approx(tokens / median, rel=0.15)
        assert float(row[3][:-1]) == pytest.approx(
            100 * speed / int(row[0]) / float(whole[2].replace(",", "")), abs=0.2
        )
        assert float(row[7]) >= 0
        assert float(row[8]) > 1  # a CPU beside an H200


def test_a_layout_that_cannot_be_says_why_in_its_row(config):
    rows = rows_of(config, "--layout", "parallel.tp=2")

    assert rows == [["1", "parallel.tp=2", rows[0][2], *[""] * 6]]
    assert re.match(r"parallel\.tp=2: .* start such a number of processes or change a degree$", rows[0][2])
