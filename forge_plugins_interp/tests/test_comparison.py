"""``forge compare``: stores joined by the ids of their samples."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
import torch

from forge_core.cli import main
from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.metrics.cka import linear_cka
from forge_plugins_interp.store import Manifest, Store, write_index

WORDS = ["alpha beta", "gamma", "delta eps", "zeta eta th", "iota", "kappa la", "mu nu xi o", "pi rho sig"]


def stimuli(folder, order, prefix=""):
    folder.mkdir()
    path = folder / "words.csv"
    path.write_text("stimulus_id,text\n" + "".join(f"{prefix}{i},{WORDS[i]}\n" for i in order))
    return path


def extract(run, out, path, *more):
    assert (
        main(
            [
                "extract",
                str(run),
                "--sites",
                "blocks.*.resid_post,embed",
                "--stimuli",
                str(path),
                "--out",
                str(out),
                *more,
            ]
        )
        == 0
    )
    return out


@pytest.fixture(scope="module")
def stores(run, tmp_path_factory):
    """All stimuli in order; six in another order; the tokens of all; other stimuli."""
    folder = tmp_path_factory.mktemp("compare")
    whole = stimuli(folder / "whole", range(8))
    return {
        "a": extract(run, folder / "a", whole, "--reduce", "last"),
        "b": extract(run, folder / "b", stimuli(folder / "some", [5, 2, 7, 0, 1, 6]), "--reduce", "last"),
        "tokens": extract(run, folder / "tokens", whole),
        "other": extract(run, folder / "other", stimuli(folder / "others", range(8), "x"), "--reduce", "last"),
    }  # fmt: skip


def test_samples_are_joined_by_their_ids(stores, capsys, tmp_path):
    out = tmp_path / "cka.png"

    assert main(["compare", str(stores["a"]), str(stores["b"]), "--out", str(out)]) == 0

    shown = capsys.readouterr().out
    assert "cka of 6 rows of 6 stimuli" in shown
    with out.with_suffix(".csv").open(newline="") as file:
        rows = {(row["site_a"], row["site_b"]): float(row["value"]) for row in csv.DictReader(file)}
    assert len(rows) == 9
    assert out.read_bytes().startswith(b"\x89PNG")
    common = [0, 1, 2, 5, 6, 7]
    first = Store(stores["a"])
    embed, last = (first.array(site)[common] for site in ("embed", "blocks.1.resid_post"))
    assert rows["embed", "embed"] == pytest.approx(1, abs=1e-6)
    assert rows["embed", "blocks.1.resid_post"] == pytest.approx(linear_cka(embed, last), abs=1e-5)


def test_a_store_with_itself_shows_which_other_site_is_most_alike(stores, capsys):
    assert (
        main(["compare", str(stores["tokens"]), str(stores["tokens"]), "--metric", "rsa", "metric.comparison=pearson"])
        == 0
    )

    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line.startswith(("embed", "blocks"))}
    assert all(site != closest for site, closest in lines.items())


@pytest.mark.parametrize("name", ["cca", "cka", "procrustes", "pwcca", "rsa", "svcca"])
@pytest.mark.filterwarnings("ignore:.*stimuli are few")
def test_every_metric_has_its_pairs_in_its_matrix(name):
    build = ComponentBuilder(discover())
    metric = build(build.resolve("representation_metric", {"name": name}))
    x, y, z = (torch.randn(40, width, generator=torch.Generator().manual_seed(width)) for width in (4, 6, 5))

    both = metric.matrix([x, y], [z])
    own = metric.matrix([x, y])

    assert torch.allclose(both[:, 0], torch.tensor([metric.compare(x, z), metric.compare(y, z)], dtype=torch.float64))
    assert torch.allclose(own[0, 1], torch.tensor(metric.compare(x, y), dtype=torch.float64))
    assert bool(torch.allclose(own, own.T)) is metric.is_symmetric


def test_routers_agree_as_far_as_their_sets_of_experts_do():
    build = ComponentBuilder(discover())
    metric = build(build.resolve("representation_metric", {"name": "routing_agreement"}))
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(50, 6, generator=generator).topk(3).indices for _ in range(2))
    pairs = zip(x.tolist(), y.tolist(), strict=True)

    assert metric.compare(x, y) == pytest.approx(sum(len({*a} & {*b}) / 3 for a, b in pairs) / 50)
    assert metric.compare(x.float(), x.flip(1)) == 1, "in any order"
    assert metric.compare(x, x + 6) == 0
    assert torch.equal(metric.matrix([x, y]), metric.matrix([x, y]).T)
    for other, message in ((x[:, :2], r"\(50, 3\) and \(50, 2\)"), (x + 0.5, "give it routing_expert")):
        with pytest.raises(ConfigError, match=message):
            metric.compare(x, other)


def test_batches_of_cka_are_near_the_whole():
    build = ComponentBuilder(discover())
    x = torch.randn(2002, 8, generator=torch.Generator().manual_seed(0))
    y = x[:, :4] + 0.1 * torch.randn(2002, 4, generator=torch.Generator().manual_seed(1))
    whole, parts = (
        build(build.resolve("representation_metric", {"name": "cka", **keys})).compare(x, y)
        for keys in ({}, {"batch": 500})
    )

    assert parts == pytest.approx(whole, abs=1e-3)
    assert parts != whole


@pytest.mark.parametrize(
    ("pair", "options", "message"),
    [
        (("a", "other"), [], "have no stimulus_id in common; the first one has '0', and the second 'x0'"),
        (("a", "tokens"), [], "some sites have a row a token, and some a row a sample"),
        (("a", "a"), ["--metric", "ckka"], "Did you mean 'cka'"),
        (("a", "a"), ["metric.kernl=rbf"], "did you mean 'kernel'"),
        (("a", "a"), ["train.steps=2"], "train: this command takes settings of metric only"),
        (("a", "a"), ["metric.batch=3"], "metric.batch: debiased estimates need at least 4 stimuli"),
        (("a", "a"), ["metric.fraction=2.0"], "metric.fraction: has no effect with kernel = 'linear'"),
        (("a", "a"), ["metric.kernel=rbf", "metric.batch=8"], "metric.batch: has no effect with kernel = 'rbf', got 8"),
        (("a", "a"), ["metric.debiased=false", "metric.batch=8"], "metric.batch: averages over batches"),
        (("a", "a"), ["--sites", "blocks.0.resid_pst"], "did you mean 'blocks.0.resid_post'"),
        (("a", "a"), ["--metric", "cca"], "need more stimuli than features; there are 8, and 32"),
        (("a", "a"), ["--out", "x.pdf"], "--out x.pdf: must end with .csv or .png"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(stores, capsys, pair, options, message):
    assert main(["compare", *(str(stores[name]) for name in pair), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_store_that_has_an_id_twice_is_refused(stores, tmp_path, capsys):
    shutil.copytree(stores["a"], tmp_path / "twice")
    columns = dict(Store(stores["a"]).columns)
    write_index(tmp_path / "twice", {**columns, "stimulus_id": np.array([*"01234566"])})

    assert main(["compare", str(stores["a"]), str(tmp_path / "twice")]) == 2
    assert "twice: stimulus_id '6' is there more than once" in " ".join(capsys.readouterr().err.split())


def test_a_store_that_is_not_complete_is_refused(stores, tmp_path, capsys):
    manifest = Manifest.read(stores["a"])
    table = json.loads((stores["a"] / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**table, "complete": False}))

    assert manifest.complete
    assert main(["compare", str(stores["a"]), str(tmp_path)]) == 2
    assert "is not complete" in capsys.readouterr().err
