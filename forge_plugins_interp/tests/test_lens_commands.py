"""``forge lens`` and ``forge patch``."""

from __future__ import annotations

import csv

import pytest

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["patch", "--clean", "ab", "--corrupt", "abc", "--answers", "a,b"], "has 2 tokens, and the corrupt one 3"),
        ([*PATCH, "--metric", "logit_dif"], "did you mean 'logit_diff'"),
        ([*PATCH, "--answers", "a,bc"], "is 2 tokens, and must be one"),
        ([*PATCH, "--answers", "a"], "logit_diff needs two different answers"),
        (["patch", "--clean", "ab", "--corrupt", "ab", "--answers", "a,b"], "nothing can be brought back"),
        (
            [*PATCH, "--answers", "a,b", "--by", "hed"],
            "--by hed: site blocks.0.resid_post",
        ),
        ([*PATCH, "--by", "a,b,c"], "must be one dimension or two"),
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
