"""Probes, against published packages and what was planted, and ``forge probe``."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_interp.probes.probe import Labelled, code_length, probe
from forge_plugins_interp.store import TOKENS, Manifest, StoredSite, write_index, write_shard

IDS = np.array([f"s{i}" for i in range(40)])


def planted(informative: bool):
    generator = torch.Generator().manual_seed(0)
    documents = np.repeat(np.arange(30), 40)
    words = np.random.default_rng(0).integers(25, size=len(documents))
    labels = torch.randint(3, (len(documents),), generator=generator)
    values = torch.randn(len(documents), 12, generator=generator)
    if informative:
        values[:, :3] += 3 * torch.nn.functional.one_hot(labels, 3)
    return Labelled(values=values, labels=labels, documents=documents, words=words)


@pytest.mark.parametrize("kind", ["logistic", "ridge", "mlp"])
def test_a_probe_reads_what_is_there_and_not_what_is_not(kind):
    found, nothing = probe(planted(True), kind=kind), probe(planted(False), kind=kind)

    assert found.accuracy > 0.9
    assert found.low <= found.accuracy <= found.high
    assert nothing.accuracy == pytest.approx(1 / 3, abs=0.12)
    assert found.control < 0.5
    assert found.selectivity == pytest.approx(found.accuracy - found.control)
    assert found.chance == pytest.approx(1 / 3, abs=0.05)


def test_a_probe_is_that_of_sklearn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    from forge_plugins_interp.probes.probe import _fit

    data = planted(True)
    mine = _fit(data.values, data.labels, 3, 1.0, "logistic", 0)(data.values)
    theirs = linear_model.LogisticRegression(C=0.5, tol=1e-8, max_iter=1000).fit(
        data.values.numpy(), data.labels.numpy()
    )
    assert (mine.numpy() == theirs.predict(data.values.numpy())).mean() > 0.995


def test_a_ridge_probe_is_that_of_sklearn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    from forge_plugins_interp.probes.probe import _fit

    data = planted(True)
    mine = _fit(data.values, data.labels, 3, 5.0, "ridge", 0)(data.values)
    theirs = linear_model.Ridge(10.0).fit(data.values.double().numpy(), np.eye(3)[data.labels.numpy()])
    assert np.array_equal(mine.numpy(), theirs.predict(data.values.double().numpy()).argmax(1))


def test_labels_that_are_read_take_few_bits():
    uniform = np.log2(3)
    assert probe(planted(True)).bits < 0.5 * uniform
    assert probe(planted(False)).bits == pytest.approx(uniform, rel=0.25)
    few = torch.arange(8) % 3
    assert code_length(torch.zeros(8, 2), few, 3, 0) == pytest.approx(8 * uniform)  # the uniform code


def test_balanced_accuracy_sees_that_a_rare_class_is_lost():
    data = planted(False)
    rare = Labelled(values=data.values, labels=(torch.arange(1200) % 20 == 0).long(), documents=data.documents)
    found = probe(rare)

    assert found.accuracy == found.majority > 0.9
    assert found.balanced == 0.5


def test_few_documents_and_one_class_are_refused():
    data = planted(True)
    few = Labelled(values=data.values[:120], labels=data.labels[:120], documents=data.documents[:120])
    with pytest.raises(ConfigError, match="at least 5 documents to hold some out, and there are 3"):
        probe(few)
    single = Labelled(values=data.values, labels=torch.zeros_like(data.labels), documents=data.documents)
    with pytest.raises(ConfigError, match="a single class"):
        probe(single)


def test_forge_probe_reads_labels_and_columns(store, tmp_path, capsys):
    labels = tmp_path / "labels.csv"
    labels.write_text("stimulus_id,label\n" + "".join(f"s{i},{'even' if i % 2 == 0 else 'odd'}\n" for i in range(40)))
    assert main(["probe", str(store), "--labels", str(labels), "--out", str(tmp_path / "p.png")]) == 0
    by_file = capsys.readouterr().out
    assert main(["probe", str(store), "--column", "kind"]) == 0
    by_column = capsys.readouterr().out

    np.savez(tmp_path / "l.npz", stimulus_id=IDS, label=["even" if i % 2 == 0 else "odd" for i in range(40)])
    assert main(["probe", str(store), "--labels", str(tmp_path / "l.npz")]) == 0
    assert capsys.readouterr().out.splitlines() == by_file.splitlines()[:3]
    assert main(["probe", str(store), "--column", "kind", "--documents", "stimulus_id"]) == 0
    assert by_file.splitlines()[1].startswith("blocks.0.resid_post")
    assert by_column.splitlines()[0] == by_file.splitlines()[0]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["labels.csv", "labels.png"])
def test_labels_are_not_written_over(store, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    text = "stimulus_id,label\n" + "".join(f"s{i},{i % 2}\n" for i in range(40))
    (tmp_path / "labels.csv").write_text(text)

    assert main(["probe", str(store), "--labels", str(tmp_path / "labels.csv"), "--out", name]) == 2

    assert f"--out {name}: labels.csv would be written over {tmp_path}/labels.csv; give" in capsys.readouterr().err
    assert (tmp_path / "labels.csv").read_text() == text


def test_a_sample_without_tokens_is_left_out_and_not_read_from_the_sample_before(tmp_path, capsys):
    """A store of tokens that match has none of some samples. Classes are those of samples, which values tell."""
    lengths = np.array([0, 2, 1, 0, 3, 0, *[1] * 14])
    labels = np.arange(20) % 2
    values = torch.from_numpy(np.repeat(labels, lengths)).float()[:, None] * torch.ones(1, 3)
    write_shard(tmp_path, "blocks.0.z", 0, {"values": values})
    ids = torch.zeros(len(values), dtype=torch.int64)
    write_shard(tmp_path, TOKENS, 0, {"values": ids, "length": torch.from_numpy(lengths)})
    names = {0: "x", 3: "y", 5: "z"}  # had they rows, these would be further classes
    column = np.array([names.get(number, str(label)) for number, label in enumerate(labels)])
    write_index(tmp_path, {"stimulus_id": np.arange(20), "length": lengths, "kind": column})
    sites = {"blocks.0.z": StoredSite(dims=("token", "width"), sizes=(3,), dtype="float32")}
    origin = {"match": "def"}
    Manifest(sites=sites, n_samples=20, shard_samples=20, origin=origin, complete=True).write(tmp_path)

    assert main(["probe", str(tmp_path), "--column", "kind", "--json"]) == 0

    told = capsys.readouterr()
    assert "blocks.0.z: left out 3 samples without a token that matches 'def'" in told.err
    (found,) = json.loads(told.out)
    assert found["classes"] == 2
    assert found["accuracy"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --labels FILE or --column NAME"),
        (["--column", "knd"], "did you mean 'kind'"),
        (["--labels", "nowhere.csv"], "cannot be read"),
        (["--column", "kind", "--seed", "-1"], "-1 is not in the range x>=0"),
        (["--column", "kind", "--control", "2"], "--control 2: has no effect on rows of samples"),
        (["--column", "kind", "--documents", "knd"], "--documents knd: the index has"),
    ],
)
def test_bad_input_of_forge_probe_is_a_sentence(store, capsys, options, message):
    assert main(["probe", str(store), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("stimulus_id,token,label\na,-1,x\n", "line 2: token must be a number from 0, got '-1'"),
        ("stimulus_id,token,label\na,0,x\na,0,y\n", "stimulus_id 'a' has a label at token 0 more than once"),
        ("stimulus_id,token,label\na,0,\n", "line 2 has no label"),
        ("stimulus_id,token,label\na,0,x,y\n", "cannot be read: line 2 has more fields than the header"),
        ("stimulus_id,token,label\nb,1,x\n", "token 1 lies beyond the 1 of b"),
    ],
)
def test_labels_that_cannot_be_used_are_a_sentence(store_of_tokens, tmp_path, capsys, rows, message):
    (tmp_path / "l.csv").write_text(rows)
    command = ["probe", str(store_of_tokens[0]), "--sites", "blocks.0.z", "--labels", str(tmp_path / "l.csv")]
    assert main(command) == 2
    assert message in " ".join(capsys.readouterr().err.split())
