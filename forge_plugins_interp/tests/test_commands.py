"""``forge sites`` and ``forge attention``; and a model that is compiled."""

from __future__ import annotations

import csv
import json

import pytest
import torch

import forge_plugins_interp as interp
from forge_core.cli import main


def test_a_compiled_model_runs_eagerly_while_it_is_observed(run):
    from torch._dynamo.utils import counters

    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with interp.open(run, ["parallel.passes.compile={}"]) as compiled, torch.no_grad():
        counters.clear()
        with compiled.observe("blocks.*.resid_post") as seen:
            compiled.model(tokens)
            compiled.model(tokens)
        assert len(seen.forwards["blocks.0.resid_post"]) == 2
        assert not counters["stats"]["unique_graphs"]


def test_forge_sites_lists_every_site_once(run, capsys):
    assert main(["sites", str(run), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert main(["sites", str(run)]) == 0
    shown = capsys.readouterr().out

    assert rows["blocks.1.attn_pattern"]["shape"] == "B × 4 × S × S"
    assert rows["blocks.1.attn_pattern"]["cut_by"] == {"cp": "position", "tp": "head"}
    assert "blocks.{0–1}.attn_pattern" in shown
    with interp.open(run) as session:
        assert list(rows) == list(session.sites.here)


def test_forge_sites_tells_of_modules_by_name(run, capsys):
    patterns = ["blocks.0.attention.o", "blocks.*.feed_forward.up.input", "blocks.1.attention.q_norm"]
    assert main(["sites", str(run), *patterns, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}

    assert rows["blocks.0.attention.o"]["shape"] == "B × S × 32"
    assert rows["blocks.0.attention.o"]["cut_by"] == {"cp": "position", "tp": "position"}
    assert rows["blocks.1.feed_forward.up.input"]["cut_by"] == {"cp": "position"}
    assert rows["blocks.1.attention.q_norm"]["dims"] == ["sample", "position", "dim_2", "dim_3"]
    assert rows["blocks.1.attention.q_norm"]["cut_by"] == {"cp": "position", "tp": "hidden"}


def test_forge_attention_writes_what_it_prints(run, capsys, tmp_path):
    out = tmp_path / "a.csv"
    assert (
        main(["attention", str(run), "--prompt", "line 5", "--layers", "1", "--heads", "0,2", "--out", str(out)]) == 0
    )
    shown = capsys.readouterr().out
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert "blocks.1.attn_pattern: the last token, '5', looks at" in shown
    assert len(rows) == 2 * 6 * 6
    last = [float(row["value"]) for row in rows if row["head"] == "2" and row["query"] == "5"]
    assert sum(last) == pytest.approx(1, abs=1e-5)
    with interp.open(run) as session, torch.no_grad(), session.observe("blocks.1.attn_pattern") as seen:
        session.model(torch.tensor([session.tokenizer.encode("line 5").tolist()]))
    assert torch.allclose(torch.tensor(last), seen["blocks.1.attn_pattern"][0, 2, -1], atol=1e-6)


def test_forge_attention_draws(run, tmp_path):
    out = tmp_path / "a.png"
    assert main(["attention", str(run), "--prompt", "line", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--layers", "1;2"], "--layers 1;2: must be numbers with commas"),
        (["--prompt", "a", "--heads", "4"], "--heads 4: blocks.0.attn_pattern has the heads 0 to 3"),
        (["--prompt", ""], "--prompt: it has no token"),
        (["--prompt", "a", "--out", "a.pdf"], "--out a.pdf: must end with .csv or .png"),
        (["--prompt", "a", "--out", "nowhere/a.csv"], "--out nowhere/a.csv: the folder nowhere is not there"),
        (["--prompt", "a", "--layers", "9"], "site 'blocks.9.attn_pattern'"),
    ],
)
def test_bad_input_of_forge_attention_is_a_sentence(run, capsys, arguments, message):
    assert main(["attention", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_results_that_cannot_be_written_are_a_sentence(run, tmp_path, capsys):
    (tmp_path / "a.csv").mkdir()

    assert main(["attention", str(run), "--prompt", "a", "--out", str(tmp_path / "a.png")]) == 2

    assert f"--out: cannot write {tmp_path / 'a.csv'}: Is a directory" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there_is_a_sentence(tmp_path, capsys):
    assert main(["sites", str(tmp_path / "nowhere")]) == 2
    assert f"there is no directory {tmp_path / 'nowhere'}" in capsys.readouterr().err
