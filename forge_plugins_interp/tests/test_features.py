"""Pages of latents: numbers are those of brute force, texts are escaped, and what is gone is told."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.autoencoders.base_model import logit_weights
from forge_plugins_interp.autoencoders.config import ActivationStoreConfig, TopKConfig
from forge_plugins_interp.autoencoders.dashboard import open_dashboard
from forge_plugins_interp.autoencoders.dictionary import Dictionary
from forge_plugins_interp.autoencoders.features import features, logit_rows
from forge_plugins_interp.autoencoders.features_config import FeaturesConfig
from forge_plugins_interp.autoencoders.splice import load_dictionary
from forge_plugins_interp.session import open_session
from forge_plugins_interp.store import TOKENS, Manifest, StoredSite, write_index, write_shard

WIDTH, LATENTS, SITE, PER_SHARD = 6, 20, "blocks.0.resid_post", 4
LENGTHS = [3, 9, 1, 5, 12, 2, 0, 7, 4, 6]
OFFSETS = np.cumsum([0, *LENGTHS])


def written(folder, values, lengths, *, is_token=True):
    """A store in shards of four samples, whose tokens are numbered through."""
    folder.mkdir()
    tokens, offsets = torch.arange(sum(lengths)), np.cumsum([0, *lengths])
    for shard, first in enumerate(range(0, len(lengths), PER_SHARD)):
        last = min(first + PER_SHARD, len(lengths))
        part = slice(offsets[first], offsets[last])
        write_shard(folder, SITE, shard, {"values": values[part] if is_token else values[first:last]})
        length = torch.tensor(lengths[first:last])
        write_shard(folder, TOKENS, shard, {"values": tokens[part], "length": length})
    ids = np.array([f"s{number}" for number in range(len(lengths))])
    write_index(folder, {"stimulus_id": ids, "length": np.array(lengths)})
    dims = ("token" if is_token else "sample", "width")
    Manifest(
        sites={SITE: StoredSite(dims=dims, sizes=(WIDTH,), dtype="float32")},
        n_samples=len(lengths),
        shard_samples=PER_SHARD,
        origin={"run": "gone", "step": 3, "checkpoint": "0"},
        complete=True,
    ).write(folder)
    return folder


@pytest.fixture(scope="module")
def values():
    return torch.randn(sum(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def store(tmp_path_factory, values):
    return written(tmp_path_factory.mktemp("features") / "acts", values, LENGTHS)


@pytest.fixture(scope="module")
def dictionary():
    made = Dictionary(TopKConfig(width=WIDTH, latents=LATENTS, k=3)).requires_grad_(requires_grad=False).eval()
    for number, tensor in enumerate((*made.parameters(), *made.buffers())):
        tensor.normal_(generator=torch.Generator().manual_seed(number))
    made.scales.fill_(2.0)
    made.encoder_bias *= 0.1
    made.decoder_bias *= 0.1
    made.encoder_bias[:2] = -100.0  # which silences them
    return made


def data(store, validation=0.3):
    return ActivationStoreConfig(path=str(store), site=SITE, validation=validation)


@pytest.mark.parametrize(
    ("validation", "limit", "order"),
    [
        (0.3, 1000, [7, 8, 9, 0, 1, 2, 3, 4, 5]),  # sample 6 is empty
        (0.3, 30, [7, 8, 9, 0, 1, 2]),  # 17 held-out rows, and 13 of the next samples; then come 5 too many
        (0.3, 1, [7]),
        (0.0, 13, [0, 1, 2]),
    ],
)
def test_densities_and_strengths_are_those_of_all_codes(dictionary, store, values, validation, limit, order):
    found = features(dictionary, data(store, validation), FeaturesConfig(rows=limit))

    rows = torch.cat([values[OFFSETS[sample] : OFFSETS[sample + 1]] for sample in order])
    codes = dictionary.encode(rows).double()
    fired = (codes > 0).double().sum(0)
    assert found.rows == len(rows)
    assert found.held_out == sum(LENGTHS[sample] for sample in order if validation and sample >= 7)
    assert torch.equal(found.density, fired / len(rows))
    assert torch.allclose(found.mean, codes.sum(0) / fired.clamp(min=1), rtol=1e-6)
    assert torch.allclose(found.strongest, codes.amax(0), rtol=1e-6)
    assert found.silent == float((fired == 0).double().mean()) >= 2 / LATENTS
    assert [row["density"] for row in found.latent_rows()] == found.density.tolist()


def test_contexts_are_the_strongest_rows_one_a_sample(dictionary, store, values):
    config = FeaturesConfig(contexts=4, before=2, after=1, bins=5)

    found = features(dictionary, data(store), config, [5, 11])

    codes = dictionary.encode(values)
    for latent in found.latents:
        column = codes[:, latent.number]
        best = []
        for sample, length in enumerate(LENGTHS):
            own = column[OFFSETS[sample] : OFFSETS[sample] + length].tolist()
            if own and max(own) > 0:
                best.append((max(own), sample, own.index(max(own))))
        best = sorted(best, reverse=True)[:4]
        assert [(one.sample, one.position) for one in latent.contexts] == [one[1:] for one in best]
        assert [one.activation for one in latent.contexts] == pytest.approx([one[0] for one in best], rel=1e-6)
        for (_, sample, position), context in zip(best, latent.contexts, strict=True):
            window = range(max(0, position - 2), min(LENGTHS[sample], position + 2))
            places = [int(OFFSETS[sample]) + place for place in window]
            assert (context.first, context.tokens) == (window.start, places)
            assert context.activations == pytest.approx(column[places].tolist(), abs=1e-6)
            assert context.stimulus_id == f"s{sample}"
        counts, _ = np.histogram(column[column > 0].numpy(), bins=5, range=(0, latent.strongest))
        assert latent.counts == counts.tolist()
        assert sum(latent.counts) == round(latent.density * found.rows)
    rows = found.context_rows()
    assert {row["latent"] for row in rows} == {5, 11}
    assert len(rows) == sum(len(one.tokens) for latent in found.latents for one in latent.contexts)


def test_a_card_goes_to_the_strongest_latents_of_middling_density(dictionary, store, values):
    config = FeaturesConfig(latents=4, least_density=0.05, most_density=0.25)

    found = features(dictionary, data(store), config)

    codes = dictionary.encode(values)
    density, strongest = (codes > 0).double().mean(0), codes.amax(0)
    allowed = [number for number in range(LATENTS) if 0.05 <= density[number] <= 0.25]
    assert 4 < len(allowed) < 15
    wanted = sorted(allowed, key=lambda number: (-float(strongest[number]), number))[:4]
    assert [latent.number for latent in found.latents] == wanted


def test_a_silent_latent_that_is_asked_for_has_no_context(dictionary, store):
    (latent,) = features(dictionary, data(store), FeaturesConfig(), [1]).latents

    assert (latent.density, latent.mean, latent.strongest, latent.contexts) == (0, 0, 0, [])


def test_a_store_with_a_row_a_sample_shows_the_ends_of_samples(dictionary, values, tmp_path):
    of_samples = written(tmp_path / "acts", values[: len(LENGTHS)], LENGTHS, is_token=False)

    found = features(dictionary, data(of_samples), FeaturesConfig(before=2, after=1))

    assert found.rows == len(LENGTHS)
    for latent in found.latents:
        for context in latent.contexts:
            assert (context.position, context.activations) == (None, [])
            end = int(OFFSETS[context.sample + 1])
            assert context.tokens == list(range(end - min(4, LENGTHS[context.sample]), end))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_logit_weights_are_those_of_gain_and_head(kind):
    generator = torch.Generator().manual_seed(3)
    model = nn.Module()
    model.norm = nn.RMSNorm(8, eps=1e-6) if kind == "rms" else nn.LayerNorm(8, eps=1e-6)
    model.head = nn.Linear(8, 11)
    for parameter in model.parameters():
        parameter.data.normal_(generator=generator)
    directions = torch.randn(3, 8, generator=generator)

    found = logit_weights(model, directions, "blocks.3.mlp_out")

    plain = directions.double()
    if kind == "layer":
        plain = plain - plain.mean(-1, keepdim=True)
    gain, weight = model.norm.weight.detach().double(), model.head.weight.detach().double()
    expected = (plain / plain.square().mean(-1, keepdim=True).sqrt() * gain) @ weight.T
    assert torch.allclose(found.double(), expected, atol=1e-5)
    rows = [row for row in logit_rows({7: found[0]}, 2) if row["effect"] == "lowers"]
    assert [row["token"] for row in rows] == found[0].argsort()[:2].tolist()
    assert [row["weight"] for row in rows] == [float(found[0].min()), float(found[0].sort().values[1])]


def test_contexts_need_all_tokens(store, dictionary, tmp_path):
    shutil.copytree(store, tmp_path / "digits")
    whole = Manifest.read(store)
    attrs.evolve(whole, origin={**whole.origin, "match": "[0-9]"}).write(tmp_path / "digits")

    with pytest.raises(ConfigError, match=r"keeps only tokens that match '\[0-9\]', and contexts are of all tokens"):
        features(dictionary, data(tmp_path / "digits"), FeaturesConfig())


def test_directions_that_are_not_of_the_stream_have_no_logits():
    with pytest.raises(ConfigError, match="mlp_in are not added to the residual stream"):
        logit_weights(nn.Module(), torch.ones(1, 4), "blocks.0.mlp_in")


SAE = """
[run]
name = "sae"
[data]
name = "activation_store"
path = "acts"
site = "blocks.1.resid_post"
validation = 0.3
[model]
name = "topk_sae"
width = 32
latents = 24
k = 3
[train]
steps = 20
seq_len = 8
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[scheduler]
name = "constant"
[loss]
name = "own"
[eval]
interval = 0
[[evaluations]]
name = "autoencoder"
interval = 10
"""
TEXT = '<img src=x>&<b>"quoted"</b> line'


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    """A reader's: a base run, a store of its activations on stimuli, and a dictionary that has learned from it."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "runs").mkdir()
    shutil.copytree(run, folder / "runs" / "tiny")
    lines = (f'{{"stimulus_id": "<{number}>", "text": {json.dumps(TEXT + str(number))}}}\n' for number in range(20))
    (folder / "texts.jsonl").write_text("".join(lines))
    (folder / "sae.toml").write_text(SAE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sites = ["--sites", "blocks.1.resid_post", "--out", "acts"]
        assert main(["extract", "runs/tiny", "--stimuli", "texts.jsonl", *sites]) == 0
        assert main(["run", "sae.toml"]) == 0
    return folder


@pytest.fixture
def here(folder, tmp_path, monkeypatch):
    """A copy of the reader's folder, as the working directory."""
    copy = tmp_path / "reader"
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    return copy


def test_the_report_of_an_autoencoder_has_cards_of_latents(here, capfd):
    assert main(["report", "runs/sae", "runs/tiny"]) == 0

    assert "note:" not in capfd.readouterr().err
    html = (here / "report.html").read_text()
    (section,) = re.findall(r'<section id="features">(.*?)</section>', html, re.S)
    assert 0 < section.count("<h4>Latent ") <= 12
    assert "24 latents of blocks.1.resid_post" in section
    assert section.count("<circle") == 2  # L0 against FVU, of two evaluations
    assert 'class="logits"' in section
    assert "&lt;" in section
    assert not re.search(r"<(img|b|script)\b", section)
    assert 'title="sample &lt;' in section
    assert not re.search(r"https?://|url\(|@import|<link|src=x>", section)


def test_a_page_of_chosen_latents_has_its_numbers_beside_it(here, capfd):
    assert main(["autoencoder", "features", "runs/sae", "--out", "page.html", "--latents", "3,17"]) == 0

    assert "wrote page.html: 2 of 24 latents" in capfd.readouterr().out
    html = (here / "page.html").read_text()
    assert re.findall(r"<h4>(.*?)</h4>", html) == ["Latent 3", "Latent 17"]
    assert "default-src 'none'" in html
    assert not re.search(r"<(img|b|script)\b|https?://", html)
    dashboard = open_dashboard("runs/sae", chosen=[3, 17])
    with (here / "page.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["density"]) for row in rows] == dashboard.features.density.tolist()
    with (here / "page.logits.csv").open() as file:
        (best, *_) = csv.DictReader(file)
    assert best["text"] == dashboard.tokenizer.decode([int(dashboard.weights[3].argmax())])
    texts: dict[tuple[int, str], str] = {}
    for row in dashboard.context_rows():
        key = row["latent"], row["stimulus_id"]
        texts[key] = texts.get(key, "") + row["text"]
    assert {latent for latent, _ in texts} <= {3, 17}
    assert texts
    assert all(text in TEXT + stimulus.strip("<>") for (_, stimulus), text in texts.items())


def test_the_logits_are_of_the_checkpoint_that_the_store_is_of(here):
    dashboard = open_dashboard("runs/sae", chosen=[5])
    direction = load_dictionary(here / "runs/sae", discover, print).decoder[5]
    with open_session(here / "runs/tiny") as session:
        (model,) = session.built.parts
        scaled = F.normalize(direction.double(), dim=-1) * 32**0.5
        gain, head = model.norm.weight.detach().double(), model.head.weight.detach().double()
    assert torch.allclose(dashboard.weights[5].double(), (scaled * gain) @ head.T, atol=1e-3)


def test_a_model_that_is_gone_leaves_numbers_of_tokens_and_a_sentence(here, capfd):
    shutil.rmtree(here / "runs/tiny")

    assert main(["report", "runs/sae"]) == 0

    html = (here / "report.html").read_text()
    assert "Tokens have numbers in place of words, and no logits are told: the checkpoint that acts was" in html
    assert str(TEXT.encode()[0]) in html
    assert 'class="logits"' not in html


def test_a_store_that_is_gone_is_told(here, capfd):
    shutil.rmtree(here / "acts")

    assert main(["report", "runs/sae"]) == 0
    assert "the store that it has learned from is not there any more: acts" in (here / "report.html").read_text()
    assert main(["autoencoder", "features", "runs/sae", "--out", "page.html"]) == 2
    assert "is not there any more" in capfd.readouterr().err


def test_a_report_from_another_folder_finds_the_store(here, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    assert main(["report", str(here / "runs/sae")]) == 0

    assert "<h4>Latent " in (tmp_path / "report.html").read_text()


def test_a_page_of_a_transcoder_names_what_it_predicts(here):
    transcoder = SAE.replace('"topk_sae"', '"transcoder"\ntarget_width = 32').replace('"sae"', '"predicting"')
    (here / "transcoder.toml").write_text(transcoder.replace("[model]", 'target_site = "blocks.1.mlp_out"\n[model]'))
    sites = ["--sites", "blocks.1.mlp_in,blocks.1.mlp_out", "--out", "ends"]
    assert main(["extract", "runs/tiny", "--stimuli", "texts.jsonl", *sites]) == 0
    assert main(["run", "transcoder.toml", "data.path=ends", "data.site=blocks.1.mlp_in"]) == 0

    assert main(["autoencoder", "features", "runs/predicting", "--out", "page.html"]) == 0

    html = (here / "page.html").read_text()
    assert "24 latents of blocks.1.mlp_in to blocks.1.mlp_out, over" in html
    assert 'class="logits"' in html  # of what is predicted, which is added to the stream


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/sae", "--out", "a.png"], "--out a.png: must end with .html"),
        (["runs/sae", "--out", "a.html", "--latents", "3,x"], "--latents 3,x: must be numbers with commas"),
        (["runs/sae", "--out", "a.html", "--latents", "24"], "latent 24: the dictionary has the latents 0 to 23"),
        (["runs/tiny", "--out", "a.html"], "contexts come from an activation_store"),
        (["runs/sae", "--out", "a.html", "--base", "runs/sae"], "was extracted from another checkpoint, of step 2"),
        (["nowhere", "--out", "a.html"], "there is no directory nowhere"),
        (["runs/sae", "--out", "nowhere/a.html"], "--out nowhere/a.html: the folder nowhere is not there"),
    ],
)
def test_bad_input_is_a_sentence(folder, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(folder)

    assert main(["autoencoder", "features", *arguments]) == 2

    said = " ".join(capfd.readouterr().err.split())
    assert message in said
    assert not (folder / "a.html").exists()


def test_a_report_of_other_runs_imports_nothing_heavy(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.toml").write_text('[model]\nname = "forge-plugins-dense:transformer"\n')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    program = f"""if True:
        import sys
        from forge_core.cli import main

        assert main(["report", {str(run)!r}, "--out", {str(tmp_path / "report.html")!r}]) == 0
        assert "torch" not in sys.modules
    """

    subprocess.run([sys.executable, "-c", program], check=True)

    assert 'id="features"' not in (tmp_path / "report.html").read_text()
