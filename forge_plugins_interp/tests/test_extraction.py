"""Stores of activations: the same in every layout, whole after a kill, and refused where they are another's."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

import forge_plugins_interp as interp
import fork_server
from forge_core.cli import main
from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_plugins_interp import sample_check
from forge_plugins_interp import session as session_module
from forge_plugins_interp.host_copy import begin_copy, wait_for_copies
from forge_plugins_interp.principal_components import PrincipalComponents
from forge_plugins_interp.reduction import Reduction, token_mask
from forge_plugins_interp.shard_writer import ShardPart, ShardWriter
from forge_plugins_interp.store import Manifest, Store, components_file, shard_file
from forge_plugins_interp.token_pattern import TokenPattern

SITES = "blocks.*.resid_post,blocks.*.z,logits,blocks.1.attention.o"
SAMPLES = 7  # no number of ranks that is tried divides it


def extract(run, out, *more):
    return main(["extract", str(run), "--sites", SITES, "--samples", str(SAMPLES), "--out", str(out), *more])


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("stores") / "alone"
    assert extract(run, out) == 0
    return Store(out)


def test_a_store_has_what_is_seen(run, alone):
    with interp.open(run) as session:
        source = session.open_data()
        batch = source.read(np.arange(SAMPLES))
        with torch.no_grad(), session.observe("blocks.1.resid_post", "blocks.0.z") as seen:
            session.model(torch.from_numpy(batch["tokens"]))

    assert len(alone) == SAMPLES
    streams = ["blocks.0.resid_post", "blocks.1.resid_post"]
    assert alone.sites == [*streams, "blocks.0.z", "blocks.1.z", "logits", "blocks.1.attention.o"]
    assert alone.manifest.sites["blocks.0.z"].dims == ("token", "head", "head_width")
    assert alone.manifest.sites["blocks.1.attention.o"].dims == ("token", "features")
    for sample in range(SAMPLES):
        assert torch.allclose(alone.read("blocks.1.resid_post", sample), seen["blocks.1.resid_post"][sample], atol=1e-5)
        assert torch.allclose(alone.read("blocks.0.z", sample), seen["blocks.0.z"][sample].movedim(1, 0), atol=1e-5)
        assert alone.tokens(sample).tolist() == batch["tokens"][sample].tolist()
    assert alone.ids.tolist() == list(range(SAMPLES))
    assert torch.equal(torch.cat(list(alone.batches("logits", 50))), alone.array("logits"))
    assert [len(one) for one in alone.batches("logits", 50)][:-1] == [50] * (SAMPLES * 32 // 50)


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.dp_shard=2"],
        ["parallel.tp=2"],
        ["parallel.cp=2"],
        ["parallel.pp=2"],
    ],
    ids=lambda one: one[0],
)
def test_a_store_is_the_same_in_every_layout(run, alone, tmp_path, layout):
    command = [sys.executable, "-m", "forge_core", "extract", str(run), "--sites", SITES, "--samples", str(SAMPLES)]
    done = fork_server.run(
        [*command, "--out", str(tmp_path / "two"), "--nproc", "2", *layout], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr

    assert_same(Store(tmp_path / "two"), alone)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["parallel.dp_shard=2", "parallel.tp=2", "parallel.pp=2"])
def test_rows_on_principal_components_are_the_same_in_every_layout(run, tmp_path, layout):
    options = ["--features", "4", "--directions", "principal", "--fit-samples", "3"]
    assert extract(run, tmp_path / "one", *options) == 0
    command = [sys.executable, "-m", "forge_core", "extract", str(run), "--sites", SITES, "--samples", str(SAMPLES)]
    out = tmp_path / "two"

    done = fork_server.run(
        [*command, "--out", str(out), "--nproc", "2", layout, *options], capture_output=True, text=True, timeout=200
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("4 principal components have") == 1
    for site in Store(out).sites:
        found, expected = Store(out).array(site), Store(tmp_path / "one").array(site)
        assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max())), site


def assert_same(found: Store, expected: Store) -> None:
    assert found.sites == expected.sites
    assert found.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        assert (found.columns[name] == column).all()
    for site in expected.sites:
        wanted = expected.array(site)
        assert torch.allclose(found.array(site), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0), site


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (["--reduce", "last"], (SAMPLES, 32)),
        (["--reduce", "mean", "--dtype", "bfloat16"], (SAMPLES, 32)),
        (["--positions", "0,-1"], (SAMPLES, 2, 32)),
        (["--features", "5"], (SAMPLES * 32, 5)),
    ],
)
def test_what_is_kept(run, alone, tmp_path, options, shape):
    assert extract(run, tmp_path / "kept", *options) == 0
    kept = Store(tmp_path / "kept").array("blocks.1.resid_post")
    whole = alone.array("blocks.1.resid_post").view(SAMPLES, 32, 32)
    expected = {"last": whole[:, -1], "mean": whole.mean(1).bfloat16(), "0,-1": whole[:, [0, -1]]}.get(options[1])

    assert tuple(kept.shape) == shape
    if expected is not None:
        assert torch.allclose(kept, expected, atol=1e-5)


@pytest.mark.parametrize(
    "options", [[], ["--reduce", "last"], ["--reduce", "mean"], ["--positions", "1,-1"]], ids=" ".join
)
def test_tokens_that_match_are_kept(run, alone, tmp_path, options, capsys):
    site = "blocks.1.resid_post"
    assert extract(run, tmp_path / "digits", "--match", "[0-9]", *options) == 0
    assert re.search(r"\d+ tokens match '\[0-9\]'", capsys.readouterr().err)
    store = Store(tmp_path / "digits")

    for sample in range(SAMPLES):
        tokens, values = alone.tokens(sample), alone.read(site, sample)
        where = [at for at, token in enumerate(tokens.tolist()) if chr(token) in "0123456789"]
        of_digits = values[where]
        expected = {"last": of_digits[-1], "mean": of_digits.mean(0), "1,-1": of_digits[[1, -1]]}
        wanted = expected[options[1]] if options else of_digits
        assert torch.allclose(store.read(site, sample), wanted, atol=1e-5)
        assert store.positions(sample).tolist() == where
        assert store.tokens(sample).tolist() == tokens[where].tolist()
        assert store.columns["length"][sample] == len(where)
        assert alone.positions(sample).tolist() == list(range(32))


def test_tokens_that_are_in_few_samples(run, tmp_path, capsys):
    """Samples without one have no row; where each must have one, the first without is named."""
    table = tmp_path / "stimuli.csv"
    table.write_text("stimulus_id,text\na,xyz\nb,xq\nc,q:q\n")
    command = ["extract", str(run), "--stimuli", str(table), "--sites", "blocks.0.resid_post", "--match", "q|:"]
    assert main([*command, "--out", str(tmp_path / "few")]) == 0
    store = Store(tmp_path / "few")

    assert store.columns["length"].tolist() == [0, 1, 3]
    assert [store.positions(sample).tolist() for sample in range(3)] == [[], [1], [0, 1, 2]]
    assert store.array("blocks.0.resid_post").shape == (4, 32)
    assert [len(one) for one in store.batches("blocks.0.resid_post", 10)] == [4]
    assert main([*command, "--reduce", "last", "--out", str(tmp_path / "last")]) == 2
    assert "--match 'q|:': sample a has no such token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--match", "q", "--reduce", "mean"],
            "--match 'q': sample 20 has no such token (1 more has too few), and rows",
        ),
        (["--match", "q", "--positions", "-1,1"], "sample 20 has no such token (5 more have too few)"),
        (["--positions", "1"], "--positions 1: sample 24 has 1 token;"),
    ],
    ids=" ".join,
)
def test_a_late_sample_with_too_few_tokens_is_told_before_the_model_runs(
    run, tmp_path, capsys, monkeypatch, options, sentence
):
    table, out = tmp_path / "stimuli.csv", tmp_path / "acts"
    texts = ["qq"] * 20 + ["xx", "xq", "qx", "qq", "x", "xqx", "xq"]
    table.write_text("stimulus_id,text\n" + "".join(f"{number},{text}\n" for number, text in enumerate(texts)))
    monkeypatch.setattr(sample_check, "_SECONDS", 0.0)
    monkeypatch.setattr(session_module.Session, "run_batch", lambda *_: pytest.fail("the model ran"))
    command = ["extract", str(run), "--stimuli", str(table), "--sites", "logits", "--out", str(out)]

    assert main([*command, *options]) == 2

    said = capsys.readouterr().err
    assert sentence in " ".join(said.split())
    assert "counted them in" in said
    assert not out.exists()


def test_ranks_share_out_the_search_for_samples_with_too_few_tokens(run, tmp_path):
    table, out = tmp_path / "stimuli.csv", tmp_path / "acts"
    texts = ["q"] * 9 + ["x", "q"] * 4
    table.write_text("stimulus_id,text\n" + "".join(f"{number},{text}\n" for number, text in enumerate(texts)))
    command = [sys.executable, "-m", "forge_core", "extract", str(run), "--stimuli", str(table), "--sites", "logits"]
    command += ["--match", "q", "--reduce", "last", "--out", str(out), "--nproc", "2", "parallel.dp_shard=2"]

    done = fork_server.run(command, capture_output=True, text=True, timeout=200)

    assert done.returncode == 2, done.stderr
    assert "sample 9 has no such token (3 more have too few)" in " ".join(done.stderr.split())
    assert not out.exists()


def test_others_know_that_tokens_are_missing(run, alone, tmp_path, capsys):
    """Labels go by the position in the sample, and stores of other tokens are not compared."""
    assert extract(run, tmp_path / "digits", "--match", "[0-9]") == 0
    store, labels = Store(tmp_path / "digits"), tmp_path / "labels.csv"
    places = [(sample, at) for sample in range(SAMPLES) for at in store.positions(sample).tolist()]
    # a label that the token itself decides: a probe that reads other rows could not know it
    rows = [f"{sample},{at},{int(alone.tokens(sample)[at]) % 2}\n" for sample, at in places]
    labels.write_text("stimulus_id,token,label\n" + "".join(rows))
    command = ["probe", str(store.folder), "--labels", str(labels), "--sites", "blocks.0.resid_post"]
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert found["accuracy"] > found["majority"] + 0.1
    labels.write_text(labels.read_text() + f"0,{next(at for at in range(32) if (0, at) not in places)},1\n")
    assert main(command) == 2
    assert "does not match '[0-9]'" in " ".join(capsys.readouterr().err.split())

    assert main(["compare", str(alone.folder), str(store.folder), "--sites", "blocks.0.resid_post"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "keeps all tokens" in said
    assert "tokens that match '[0-9]'" in said


def test_ids_beyond_the_vocabulary_match_nothing_and_a_batch_needs_tokens():
    pattern = TokenPattern("a", torch.tensor([False, True]))

    assert pattern.matches(torch.tensor([[0, 1], [2, 300]])).tolist() == [[False, True], [False, False]]
    with pytest.raises(ConfigError, match="the model reads pixels, and no tokens"):
        Reduction(tokens=pattern).kept_tokens({"pixels": torch.zeros(1, 3)}, torch.ones(1, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("match", "sentence"),
    [
        ("(", "--match '(': no regular expression: missing ), unterminated subpattern"),
        ("ab", "--match 'ab': no token of the vocabulary matches"),
    ],
)
def test_a_pattern_of_no_token_is_refused(run, tmp_path, capsys, match, sentence):
    assert extract(run, tmp_path / "none", "--match", match) == 2

    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_random_features_keep_distances():
    values = torch.randn(1, 40, 600, generator=torch.Generator().manual_seed(0))
    site = Site(module="", dims=("sample", "position", "width"))

    rows = Reduction(features=300).rows(site, values, torch.ones(1, 40, dtype=torch.bool), seed=0)

    ratio = torch.pdist(rows) / torch.pdist(values[0])
    assert 0.8 < ratio.min() < ratio.max() < 1.2


def test_principal_components_are_those_of_the_singular_value_decomposition(run, alone, tmp_path, capsys):
    """Of the first samples; the store is gone on with by the same components, and not by those of other samples."""
    site, options = "blocks.1.resid_post", ["--features", "4", "--directions", "principal", "--fit-samples", "3"]
    assert extract(run, tmp_path / "kept", *options) == 0
    said = capsys.readouterr().err
    whole = alone.array(site)
    fitted = whole[: 3 * 32].double()
    _, scales, directions = torch.linalg.svd(fitted - fitted.mean(0), full_matrices=False)
    expected = (whole.double() - fitted.mean(0)) @ directions[:4].T

    kept = Store(tmp_path / "kept").array(site)
    found = PrincipalComponents.read(components_file(tmp_path / "kept", site))

    assert torch.allclose(kept.double().abs(), expected.abs(), atol=1e-4)
    share = scales[:4].square() / scales.square().sum()
    assert torch.allclose(found.explained.double(), share, atol=1e-5)
    assert re.search(r"4 principal components have \d+% to \d+% of the variance of a site", said)
    assert bool((found.directions.gather(0, found.directions.abs().argmax(0, keepdim=True)) > 0).all())

    shard_file(tmp_path / "kept", site, 0).unlink()
    assert extract(run, tmp_path / "kept", *options) == 0
    assert torch.equal(Store(tmp_path / "kept").array(site), kept)
    assert extract(run, tmp_path / "kept", *options[:-1], "4") == 2
    assert "of another reduction" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [[3, 3], [3, 2]], ids=["whole", "padded"])
def test_what_is_kept_stays_as_it_was_seen(lengths):
    """The model may change a value in place before it is written."""
    site = Site(module="", dims=("sample", "position", "width"))
    value = torch.arange(12.0).view(2, 3, 2)
    expected = torch.cat([value[sample, :length] for sample, length in enumerate(lengths)])

    is_token = torch.arange(3) < torch.tensor(lengths)[:, None]
    rows = Reduction().rows(site, value, is_token, seed=0)
    value.zero_()

    assert torch.equal(rows, expected)


def test_values_that_float16_does_not_have_are_refused(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Reduction, "rows", lambda *_: torch.tensor([[-7e4, 1.0], [torch.inf, 65504.0]]))

    assert extract(run, tmp_path / "narrow", "--dtype", "float16") == 2

    said = "has values beyond 65,504, the largest of float16 (1 in a batch); take bfloat16 or float32"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("over", ["none", "last"])
def test_numbers_of_experts_are_kept_with_all_their_digits(over):
    """In bf16, 257 would be 256; and the mean of experts 0 and 8 is not expert 4."""
    site = Site(module="", dims=("sample", "position", "choice"))
    experts = torch.tensor([[[0, 257], [8, 300]]])
    is_token = torch.ones(1, 2, dtype=torch.bool)

    reduction = Reduction(over=over, dtype=torch.bfloat16)
    rows, _ = reduction.cast(reduction.rows(site, experts, is_token, seed=0))

    assert rows.dtype == torch.int64
    assert rows.tolist() == ([[0, 257], [8, 300]] if over == "none" else [[8, 300]])
    for refused in ({"over": "mean"}, {"features": 1}, {"features": 1, "directions": "principal"}):
        with pytest.raises(ConfigError, match="numbers that name experts says nothing; leave out the site with the"):
            Reduction(**refused).rows(site, experts, is_token, seed=0)


def test_stimuli_have_their_ids_and_no_padding(run, tmp_path):
    table = tmp_path / "stimuli.csv"
    table.write_text("stimulus_id,sentence,kind,file\nx7,line 1,a,f\nx3,li,b,g\nx9,line 22: 1,a,h\n")
    out = tmp_path / "stimuli"
    command = ["extract", str(run), "--stimuli", str(table), "--column", "sentence", "--out", str(out)]
    assert main([*command, "--sites", "blocks.*.resid_post"]) == 0
    store = Store(out)

    assert store.ids.tolist() == ["x7", "x3", "x9"]
    assert store.columns["kind"].tolist() == ["a", "b", "a"]
    assert store.columns["file"].tolist() == ["f", "g", "h"]
    assert store.columns["length"].tolist() == [6, 2, 10]
    assert len(store.array("blocks.0.resid_post")) == 18
    with interp.open(run) as session, torch.no_grad(), session.observe("blocks.1.resid_post") as seen:
        session.model(torch.tensor([session.tokenizer.encode("li").tolist()]))
    assert torch.allclose(store.read("blocks.1.resid_post", 1), seen["blocks.1.resid_post"][0], atol=1e-5)


def test_a_killed_extraction_goes_on(run, alone, tmp_path, monkeypatch):
    out = tmp_path / "killed"
    code = (
        "import sys, forge_plugins_interp.extraction as e, attrs\n"
        "make = e.Request\n"
        "e.Request = lambda **keys: make(**{**keys, 'shard_samples': 2})\n"
        "from forge_core.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "extract", str(run), "--sites", SITES]
    command += ["--samples", str(SAMPLES), "--out", str(out)]
    process = fork_server.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not shard_file(out, "logits", 0).exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = shard_file(out, "logits", 0).stat().st_mtime_ns
    if not Manifest.read(out).complete:
        assert main(["sites", str(run)]) == 0  # any other command leaves it alone
        with pytest.raises(Exception, match="is not complete; the same forge extract goes on with it"):
            Store(out)
    done = fork_server.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert shard_file(out, "logits", 0).stat().st_mtime_ns == first
    assert_same(Store(out), alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sites", "blocks.*.reside"], "site 'blocks.*.reside': the model has none of that name"),
        (["--positions", "0,a"], "--positions 0,a: must be numbers with commas between them"),
        (["--positions", "40"], "--positions 40: sample 0 has 32 tokens ("),
        (["--positions", "0", "--reduce", "mean"], "--positions 0: has no effect with --reduce mean"),
        (["--stimuli", "no.csv"], "--stimuli no.csv: cannot be read"),
        (["--stimuli", "no.txt"], "--stimuli no.txt: must end with .csv or .jsonl"),
        (["--stimuli", "no.csv", "data.path=x"], "data.path=x: has no effect with --stimuli"),
        (["data.path=nowhere"], "nowhere"),
        (["--sites", "blocks.*.attn_scores", "--reduce", "mean"], "scores that a mask hides, which are -inf"),
        (["--sites", "blocks.*.attn_scores", "--features", "3"], "scores that a mask hides, which are -inf"),
        (["--directions", "principal"], "--directions principal: how many is missing; add --features"),
        (["--column", "sentence"], "--column sentence: has no effect without --stimuli"),
        (["--sites", ""], "--sites '': names no site"),
        (["--fit-samples", "3"], "--fit-samples 3: has no effect without --directions principal"),
        (
            ["--features", "33", "--directions", "principal", "--samples", "2"],
            "--features 33: blocks.0.resid_post has 32 features in 64 rows, which have at most 32 principal components",
        ),
    ],
)
def test_bad_input_is_a_sentence_and_nothing_is_written(run, tmp_path, capsys, options, message):
    out = tmp_path / "none"

    assert main(["extract", str(run), "--sites", "blocks.*.resid_post", "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("stimulus_id,text\na,x\na,y\n", "stimulus_id 'a' is there more than once"),
        ("stimulus_id,text\na,x\nb,\n", "row 2 has no 'text'"),
        ("id,text\na,x\n", "row 1 has no 'stimulus_id'; it has id, text"),
        ("stimulus_id,text\na,x\nb,x, y\n", 'line 3 has more fields than the header; quote texts with commas: "a, b"'),
        ("stimulus_id,text\n", "it has no stimulus"),
        ("stimulus_id,text,length\na,x,9\n", "a store calls the number of tokens 'length'; give this column another"),
        (f"stimulus_id,text\na,{'x' * 80}\n", "row 1 has 80 tokens, and the model takes 64"),
    ],
)
def test_stimuli_that_cannot_be_used_are_told(run, tmp_path, capsys, rows, message):
    table = tmp_path / "s.csv"
    table.write_text(rows)

    command = ["extract", str(run), "--sites", "logits", "--stimuli", str(table), "--out", str(tmp_path / "o")]
    assert main(command) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tags", [["b"], {"b": 1}])
def test_a_list_in_place_of_a_fact_about_a_stimulus_is_told(run, tmp_path, capsys, tags):
    table = tmp_path / "s.jsonl"
    rows = ({"stimulus_id": "a", "text": "x", "tags": "b"}, {"stimulus_id": "b", "text": "y", "tags": tags})
    table.write_text("\n".join(map(json.dumps, rows)))

    command = ["extract", str(run), "--sites", "logits", "--stimuli", str(table), "--out", str(tmp_path / "o")]
    assert main(command) == 2
    assert f"--stimuli {table}: row 2: tags must be one value, got {tags!r}" in capsys.readouterr().err


def test_ids_may_be_the_texts(run, tmp_path):
    table = tmp_path / "s.csv"
    table.write_text("stimulus_id\nline\nlines\n")
    command = ["extract", str(run), "--sites", "logits", "--stimuli", str(table), "--column", "stimulus_id"]

    assert main([*command, "--out", str(tmp_path / "o")]) == 0
    assert Store(tmp_path / "o").ids.tolist() == ["line", "lines"]


def test_a_store_of_something_else_is_not_gone_on_with(run, alone, capsys, tmp_path):
    folder = alone.folder
    assert extract(run, folder, "--reduce", "last") == 2
    assert "a store is there already, of another reduction" in capsys.readouterr().err
    assert main(["extract", str(run), "--sites", "logits", "--samples", "7", "--out", str(folder)]) == 2
    assert "of another sites" in capsys.readouterr().err
    (tmp_path / "mine.txt").write_text("x")
    assert extract(run, tmp_path) == 2
    assert "has other files in it" in capsys.readouterr().err
    assert extract(run, tmp_path / "mine.txt") == 2
    assert "mine.txt: is a file or has other files in it; give a folder" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["run", "step", "checkpoint", "data", "tokenizer"])
def test_a_store_of_another_origin_is_not_gone_on_with(run, alone, capsys, tmp_path, what):
    folder = tmp_path / "acts"
    shutil.copytree(alone.folder, folder)
    manifest = Manifest.read(folder)
    other = {**manifest.origin, what: "another"}
    attrs.evolve(manifest, origin=other, complete=False).write(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    assert extract(run, folder) == 2

    assert f"a store is there already, of another {what}: another in place of" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_a_full_disk_is_told_before_the_first_byte(run, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert extract(run, tmp_path / "out") == 2
    assert "and the store needs" in capsys.readouterr().err
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("text", [None, "", "PK cut off"])
def test_a_damaged_index_is_a_sentence(store, tmp_path, text):
    folder = tmp_path / "acts"
    shutil.copytree(store, folder)
    (folder / "index.npz").unlink()
    if text is not None:
        (folder / "index.npz").write_text(text)

    with pytest.raises(ConfigError, match=re.escape(f"{folder / 'index.npz'} cannot be read: ")):
        Store(folder)


def test_a_store_of_another_form_is_told_by_its_form(store):
    manifest = Store(store).manifest
    sites = {name: attrs.evolve(site, dtype="float16", reduced="last") for name, site in manifest.sites.items()}

    with pytest.raises(ConfigError) as raised:
        attrs.evolve(manifest, sites=sites).refuse_other(manifest, store)
    told = (
        "another form of blocks.0.resid_post: sample × 8 width of float32 in place of sample × 8 width of float16, last"
    )
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"version": 9}', "a store of version 9"),
        ('{"version": 1, "sites": {}}', "no manifest"),
    ],
)
def test_a_damaged_manifest_is_a_sentence(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(Exception, match=message):
        Store(tmp_path)


def test_a_shard_that_is_cut_off_is_a_sentence(run, tmp_path):
    assert extract(run, tmp_path / "cut") == 0
    file = shard_file(tmp_path / "cut", "logits", 0)
    file.write_bytes(file.read_bytes()[:100])

    with pytest.raises(Exception, match=r"shard-00000\.safetensors cannot be read"):
        Store(tmp_path / "cut").array("logits")


def test_the_manifest_says_where_a_store_comes_from(alone):
    origin = json.loads((Path(alone.folder) / "manifest.json").read_text())["origin"]

    assert origin["run"] == "tiny"
    assert origin["step"] == 2
    assert len(origin["checkpoint"]) == 64
    assert "forge-core" in origin["versions"]


def test_positions_below_zero_are_padding():
    batch = {"tokens": torch.zeros(2, 4, dtype=torch.int64)}

    assert token_mask(batch, 2, 4).all()
    positions = torch.tensor([[0, 1, 2, -1], [0, 1, -1, -1]])
    assert token_mask({**batch, "positions": positions}, 2, 4).sum(1).tolist() == [3, 2]


@pytest.mark.gpu
def test_a_copy_on_the_host_has_the_values_of_its_time():
    value = torch.ones(2**24, device="cuda")

    copy = begin_copy(value)
    value.zero_()
    wait_for_copies()

    assert copy.is_pinned()
    assert bool((copy == 1).all())


def test_rows_wait_for_a_slow_disk_in_bounded_memory(tmp_path, monkeypatch):
    written, disk = [], threading.Semaphore(0)
    monkeypatch.setattr(ShardWriter, "_write", lambda self, part: (disk.acquire(), written.append(part.shard)))
    rows = {"a": torch.empty(40, 2**20, dtype=torch.uint8)}
    parts = [ShardPart(shard=shard, rows=rows, beside_tokens={}, is_last=True) for shard in range(3)]

    with ShardWriter(tmp_path) as writer:
        putting = threading.Thread(target=lambda: [writer.put(part) for part in parts])
        putting.start()
        putting.join(0.2)
        assert putting.is_alive(), "the second does not fit beside the first, which is not written"
        for _ in parts:
            disk.release()
        putting.join()

    assert written == [0, 1, 2]
