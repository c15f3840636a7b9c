"""``forge lens`` and ``forge patch``."""

from __future__ import annotations

import csv
import json
import sys

import pytest

import fork_server
from forge_core.cli import main

PATCH = ["patch", "--clean", "ab", "--corrupt", "ac"]


def test_forge_lens_prints_and_draws(run, capsys, tmp_path):
    out = tmp_path / "lens.png"
    assert main(["lens", str(run), "--prompt", "line 5", "--top", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert "blocks.1.resid_post" in shown
    assert len(rows) == 2 * 6 * 2
    assert out.read_bytes().startswith(b"\x89PNG")


def test_forge_lens_attributes(run, capsys, tmp_path):
    out = tmp_path / "parts.png"
    assert (
        main(["lens", str(run), "--prompt", "line 5", "--attribute", "e", "--minus", "x", "--heads", "--out", str(out)])
        == 0
    )

    assert "blocks.1.head.3" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")


def test_forge_patch_prints_and_draws(run, capsys, tmp_path):
    out = tmp_path / "patch.png"
    arguments = ["patch", str(run), "--clean", "line 5", "--corrupt", "lime 5", "--answers", "a,b"]
    assert main([*arguments, "--sites", "blocks.*.z", "--by", "position,head", "--out", str(out)]) == 0

    assert "logit_diff of 'a', 'b', by patching" in capsys.readouterr().out
    assert out.read_bytes().startswith(b"\x89PNG")
    with out.with_suffix(".csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 2 * 6 * 4


def test_forge_patch_of_paths_prints_and_draws(run, capsys, tmp_path):
    out = tmp_path / "paths.png"
    arguments = ["patch", str(run), "--clean", "line 5", "--corrupt", "lime 5", "--answers", "a,b", "--out", str(out)]
    paths = ["--from", "blocks.*.attn_out", "--to", "blocks.*.mlp_in,logits"]
    assert main([*arguments, *paths]) == 0

    assert "blocks.1.mlp_in" in capsys.readouterr().out
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["site", "to", "value", "effect"]
    assert len(rows) == 3 + 2
    assert out.read_bytes().startswith(b"\x89PNG")

    assert main([*arguments, *paths, "--by", "position", "--json"]) == 0
    places = json.loads(capsys.readouterr().out)["places"]
    assert len(places) == 5 * 6
    assert places[0]["to"] == "blocks.0.mlp_in"
    assert places[0]["at"] == {"position": 0}


@pytest.mark.slow
def test_forge_patch_on_ranks_gives_the_table_of_one_process(run, tmp_path):
    arguments = ["patch", str(run), "--clean", "line 5", "--corrupt", "lime 5", "--answers", "a,b"]
    of_paths = ["--from", "blocks.0.z", "--to", "blocks.1.mlp_in", "--by", "head"]
    for kind, options in (("paths", of_paths), ("places", [])):
        tables = []
        for layout in ([], ["--nproc", "2", "parallel.tp=2"]):
            out = tmp_path / f"{kind}_{len(tables)}.csv"
            command = [sys.executable, "-m", "forge_core", *arguments, *options, "--out", str(out), *layout]
            done = fork_server.run(command, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("logit_diff of") == 1
            with out.open(newline="") as file:
                tables.append(list(csv.DictReader(file)))
        for found, expected in zip(tables[1], tables[0], strict=True):
            numbers = [{key: float(one.pop(key)) for key in ("value", "effect")} for one in (found, expected)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-3)
            assert found == expected


def test_forge_patch_refuses_a_pipeline(run, tmp_path):
    command = [sys.executable, "-m", "forge_core", *PATCH[:1], str(run), *PATCH[1:], "--nproc", "2", "parallel.pp=2"]
    done = fork_server.run(command, capture_output=True, text=True, timeout=200)

    assert done.returncode == 2
    assert "patching needs the logits on all ranks; open the model with parallel.pp=1" in done.stderr


PATH = [*PATCH, "--answers", "a,b", "--from", "blocks.0.mlp_out", "--to"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["patch", "--clean", "ab", "--corrupt", "abc", "--answers", "a,b"], "has 2 tokens, and the corrupt one 3"),
        ([*PATCH, "--metric", "logit_dif"], "did you mean 'logit_diff'"),
        ([*PATCH, "--answers", "a,bc"], "is 2 tokens, and must be one"),
        ([*PATCH, "--answers", "a"], "logit_diff needs two different answers"),
        ([*PATCH, "--answers", "a", "--sites", "blocks.9.attn_out"], "'blocks.9.attn_out': the model has none"),
        (["patch", "--clean", "ab", "--corrupt", "ab", "--answers", "a,b"], "nothing can be brought back"),
        (["patch", "--clean", "ab", "--corrupt", "ab"], "likeliest, and logit_diff is of two tokens; give two with a"),
        (
            [*PATCH, "--answers", "a,b", "--by", "hed"],
            "--by hed: site blocks.0.resid_post",
        ),
        ([*PATCH, "--by", "a,b,c"], "must be one dimension or two"),
        ([*PATCH, "--by", "position,position"], "--by position,position: must be one dimension or two"),
        ([*PATCH, "--metric", "kl", "--answers", "a"], "--answers a: has no effect with --metric kl"),
        ([*PATCH, "--metric", "loss", "--answers", "a,b"], "--answers a,b: --metric loss is of one answer; give one"),
        ([*PATCH, "--by", ""], "must be one dimension or two"),
        ([*PATH, "blocks.0.mlp_out"], "--to blocks.0.mlp_out: is the site that the path comes from"),
        ([*PATH, "blocks.0.attn_out"], "blocks.0.attn_out: is computed before blocks.0.mlp_out"),
        ([*PATH, "blocks.1.atn_out"], "none of that name; did you mean 'blocks.1.attn_out'?"),
        ([*PATH, "blocks.1.attn_head_out"], "site blocks.1.attn_head_out: it is computed for whoever looks"),
        ([*PATH, "logits", "--by", "hed"], "--by hed: site blocks.0.mlp_out"),
        ([*PATH, "logits", "--freeze", "blocks.*.atn"], "'blocks.*.atn': the model has none of that name"),
        ([*PATH, "logits", "--sites", "embed"], "--sites embed: has no effect with --from"),
        ([*PATH, "logits", "--method", "attribution"], "--method attribution: a path is patched, and not estimated"),
        ([*PATH[:-1]], "--from blocks.0.mlp_out: where the path ends is missing; add --to SITE"),
        ([*PATCH, "--to", "logits"], "--to logits: has no effect without --from"),
        ([*PATCH, "--freeze", "logits"], "--freeze logits: has no effect without --from"),
        (["lens", "--prompt", "ab", "--heads"], "--heads: has no effect without --attribute"),
        (["lens", "--prompt", "ab", "--attribute", "abc"], "is 3 tokens, and must be one"),
        (["lens", "--prompt", "ab", "--attribute", "a", "--top", "3"], "--top: has no effect with --attribute"),
        (["lens", "--prompt", "ab", "--sites", "blocks.*.z"], "a lens reads values of the residual stream"),
        (["lens", "--prompt", "ab", "--out", "a.svg"], "--out a.svg: must end with .csv or .png"),
    ],
)
def test_bad_input_is_a_sentence(run, capsys, arguments, message):
    command, *others = arguments
    assert main([command, str(run), *others]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
