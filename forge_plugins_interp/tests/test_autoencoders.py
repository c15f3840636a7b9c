"""Autoencoders are ordinary runs: they learn, resume exactly, and are the same on two ranks."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fork_server
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.autoencoders.config import ActivationStoreConfig, TranscoderConfig
from forge_plugins_interp.autoencoders.formats import read, write
from forge_plugins_interp.autoencoders.similarity import mmcs
from forge_plugins_interp.autoencoders.splice import load_dictionary
from forge_plugins_interp.autoencoders.store_source import ActivationRows
from forge_plugins_interp.store import TOKENS, Manifest, Store, StoredSite, write_index, write_shard
from forge_testing.data_source import DataSourceConformance

WIDTH, PLANTED, ACTIVE, SAMPLES, LENGTH = 32, 32, 3, 40, 128
JOB = """
[run]
name = "sae"
[data]
name = "activation_store"
path = "acts"
site = "blocks.0.resid_post"
validation = 0.2
[train]
steps = 300
seq_len = 32
batch_size = 8
precision = "fp32"
[optimizer]
name = "adamw"
lr = 5e-3
weight_decay = 0.0
[scheduler]
name = "linear"
[loss]
name = "own"
[eval]
interval = 0
[[evaluations]]
name = "autoencoder"
[checkpoint]
interval = 150
[metrics]
interval = 1
[model]
"""
MODELS = {
    "topk_sae": "k = 3",
    "batch_topk_sae": "k = 3\nthreshold_decay = 0.9",
    "matryoshka_sae": "k = 3\nprefixes = [8, 24]",
    "jumprelu_sae": "l0_coefficient = 0.05\nbandwidth = 0.5\ninitial_threshold = 0.5",
    "transcoder": f"k = 3\ntarget_width = {WIDTH + 2}\nskip = true",
}


def planted():
    """Rows that are sums of few directions; and a linear map of their positive codes."""
    generator = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(PLANTED, WIDTH, generator=generator), dim=-1)
    n = SAMPLES * LENGTH
    chosen = torch.rand(n, PLANTED, generator=generator).topk(ACTIVE).indices
    codes = torch.zeros(n, PLANTED).scatter(1, chosen, 1 + torch.rand(n, ACTIVE, generator=generator))
    others = torch.randn(PLANTED, WIDTH + 2, generator=generator)
    return directions, 5 * codes @ directions, codes @ others


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("autoencoders")
    _, rows, others = planted()
    acts = folder / "acts"
    acts.mkdir()
    values = {"blocks.0.resid_post": rows.bfloat16().float(), "blocks.0.mlp_out": others}
    per_shard = 16
    for shard in range(-(-SAMPLES // per_shard)):
        part = slice(shard * per_shard * LENGTH, (shard + 1) * per_shard * LENGTH)
        for site, one in values.items():
            write_shard(acts, site, shard, {"values": one[part]})
        n = min(per_shard, SAMPLES - shard * per_shard)
        tokens = torch.zeros(n * LENGTH, dtype=torch.int64)
        write_shard(acts, TOKENS, shard, {"values": tokens, "length": torch.full((n,), LENGTH)})
    write_index(acts, {"stimulus_id": np.arange(SAMPLES), "length": np.full(SAMPLES, LENGTH)})
    sites = {
        site: StoredSite(dims=("token", "width"), sizes=(one.shape[1],), dtype="float32")
        for site, one in values.items()
    }
    Manifest(sites=sites, n_samples=SAMPLES, shard_samples=per_shard, origin={"run": "planted"}, complete=True).write(
        acts
    )
    for name, keys in MODELS.items():
        text = JOB + f'name = "{name}"\nwidth = {WIDTH}\nlatents = 64\ndead_after = 2000\n{keys}\n'
        if name == "transcoder":
            text = text.replace("validation = 0.2", 'validation = 0.2\ntarget_site = "blocks.0.mlp_out"')
        (folder / f"{name}.toml").write_text(text)
    return folder


def forge(folder, *arguments, code=0):
    command = [sys.executable, "-m", "forge_core", *arguments]
    done = fork_server.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def lines(folder, name):
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(folder):
    for name in MODELS:
        forge(folder, "run", f"{name}.toml", f"run.name={name}")
    return folder


class TestStoreSource(DataSourceConformance):
    component = "forge-plugins-interp:activation_store"

    @pytest.fixture(autouse=True)
    def _of_the_store(self, folder):
        self.config = {"path": str(folder / "acts"), "site": "blocks.0.resid_post", "validation": 0.2}


def fvu_of_pca(components):
    _, rows, _ = planted()
    centred = (rows - rows.mean(0)).double()
    values = torch.linalg.svdvals(centred).square()
    return float(values[components:].sum() / values.sum())


@pytest.mark.parametrize("name", MODELS)
def test_each_explains_more_than_as_many_principal_components(trained, name):
    final = lines(trained, name)[-1]

    assert final["eval/autoencoder/fvu"] < 0.5 * fvu_of_pca(ACTIVE)
    assert 1 < final["eval/autoencoder/l0"] < 6
    if name in ("topk_sae", "matryoshka_sae", "transcoder"):
        assert final["eval/autoencoder/l0"] <= 3
    logged = [line for line in lines(trained, name) if "loss" in line]
    assert logged[-1]["loss"] < 0.5 * logged[0]["loss"]
    assert {"l0/blocks.0", "dead/blocks.0"} <= logged[-1].keys()


def test_the_planted_directions_are_found(trained):
    directions, _, _ = planted()
    dictionary = load_dictionary(trained / "runs" / "topk_sae", lambda *_: discover(), print)

    assert mmcs(directions, dictionary.decoder) > 0.9
    assert mmcs(dictionary.decoder, directions) < mmcs(directions, dictionary.decoder)  # it has twice as many


def test_two_ranks_learn_as_one_process_does(trained):
    forge(trained, "run", "topk_sae.toml", "run.name=two", "--nproc", "2", "train.batch_size=4", "train.steps=40")
    forge(trained, "run", "topk_sae.toml", "run.name=one", "train.steps=40")

    for mine, theirs in zip(lines(trained, "one"), lines(trained, "two"), strict=True):
        for key in mine.keys() & {"loss", "grad_norm", "l0/blocks.0", "dead/blocks.0", "eval/autoencoder/fvu"}:
            assert theirs[key] == pytest.approx(mine[key], rel=1e-3), (mine["step"], key)


def test_a_resumed_run_goes_on_exactly(trained):
    forge(trained, "run", "batch_topk_sae.toml", "run.name=resumed", "checkpoint.interval=150", "train.steps=150",
          'scheduler={name="constant"}')  # fmt: skip
    forge(trained, "run", "batch_topk_sae.toml", "run.name=resumed", "train.steps=200", 'scheduler={name="constant"}')
    forge(trained, "run", "batch_topk_sae.toml", "run.name=straight", "train.steps=200", 'scheduler={name="constant"}')

    resumed, straight = (
        {line["step"]: line["loss"] for line in lines(trained, name) if "loss" in line}
        for name in ("resumed", "straight")
    )
    assert resumed == straight


def test_an_error_of_reconstruction_has_no_perplexity(trained):
    said = forge(trained, "eval", "runs/topk_sae", "--evaluation", "perplexity")

    assert "eval/perplexity/loss" in said
    assert "eval/perplexity/perplexity" not in said


def test_a_plan_leaves_out_what_an_autoencoder_cannot_recompute(folder):
    """It was refused, as if the job had asked for the mode "selective", with which a plan compares."""
    said = forge(folder, "plan", "topk_sae.toml", "--world-size", "1")

    assert 'mode = "full"' in said
    assert 'mode = "selective"' not in said


def test_what_a_mixture_of_stores_holds_out_is_evaluated(folder):
    store = '{name="activation_store", path="acts", site="blocks.0.resid_post", validation=0.2}'
    data = f'data={{name="mixture", sources=[{{name="a", weight=1.0, source={store}}}]}}'

    forge(folder, "run", "topk_sae.toml", "run.name=mixed", "train.steps=2", 'scheduler={name="constant"}', data)

    assert "eval/autoencoder/fvu" in lines(folder, "mixed")[-1]


def test_codes_are_a_site_like_any_other(trained):
    said = forge(trained, "sites", "runs/topk_sae", "--json")
    listed = json.loads(said[said.index("[") :])
    forge(trained, "extract", "runs/topk_sae", "--sites", "code", "--samples", "5", "--out", "codes")

    assert [(row["name"], row["shape"]) for row in listed] == [("code", "B × S × 64")]
    store = Store(trained / "codes")
    values = store.array("code")
    assert values.shape == (5 * 32, 64)  # seq_len rows a sample
    assert ((values > 0).sum(1) <= 3).all()
    source = ActivationRows(
        ActivationStoreConfig(path=str(trained / "acts"), site="blocks.0.resid_post", validation=0.2),
        seq_len=32,
        split="validation",
        seed=42,  # of every job
    )
    dictionary = load_dictionary(trained / "runs" / "topk_sae", lambda *_: discover(), print)
    seen = []
    dictionary.code.register_forward_hook(lambda module, args, code: seen.append(code))
    dictionary(torch.from_numpy(source.read(np.arange(5))["activation"]))
    assert torch.allclose(seen[0].flatten(0, 1), values, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("topk_sae", "saelens"),
        ("topk_sae", "sparsify"),
        ("batch_topk_sae", "saelens"),
        ("jumprelu_sae", "saelens"),
        ("matryoshka_sae", "sparsify"),
        ("transcoder", "sparsify"),
    ],
)
def test_files_of_other_tools_hold_the_same_function(trained, tmp_path, name, form):
    dictionary = load_dictionary(trained / "runs" / name, lambda *_: discover(), print)
    _, rows, _ = planted()
    forge(trained, "autoencoder", "export", f"runs/{name}", "--format", form, "--out", str(tmp_path / "out"))

    again = read(tmp_path / "out")

    expected = dictionary.reconstruct(rows[:200])
    assert (dictionary.scales - 1).abs().max() > 0.1  # which the files have no place for
    assert torch.allclose(again.reconstruct(rows[:200]), expected, atol=1e-3)
    facts = json.loads((tmp_path / "out" / "cfg.json").read_text())
    assert facts["d_in"] == WIDTH


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("topk_sae", ["model.k=65"], "k: must be at most latents = 64, got 65"),
        ("topk_sae", ["model.width=8"], "8 is not the width of the site 'blocks.0.resid_post', which is 32"),
        ("topk_sae", ["data.site=blocks.0.resid_pst"], "did you mean 'blocks.0.resid_post'"),
        ("topk_sae", ["data.path=nowhere"], "nowhere"),
        ("topk_sae", ['loss={name="cross_entropy"}'], "has a loss of its own, so that loss.name = 'cross_entropy'"),
        ("topk_sae", ["data.target_site=blocks.0.mlp_out"], "reads one site; leave data.target_site out"),
        ("transcoder", ["model.target_width=3"], "3 is not the width of data.target_site, which is 34"),
        ("matryoshka_sae", ["model.prefixes=[8, 64]"], "must be from 1 to latents"),
        ("matryoshka_sae", ["model.prefixes=[8, 4]"], "prefixes: must grow"),
        ("topk_sae", ['callbacks=[{name="export"}]'], "GptOssForCausalLM: the architecture is a decoder alone"),
        ("topk_sae", ["parallel.tp=2"], "model: is of one layer, and is not cut: set parallel.tp = 1"),
        ("topk_sae", ['evaluations=[{name="accuracy"}]'], "evaluations accuracy: its data have no tokens to predict"),
        ("topk_sae", ["data.validation=0.0", "eval.interval=10"], "so that eval.interval has nothing to evaluate"),
    ],
)
def test_bad_input_is_a_sentence(folder, name, settings, message):
    shown = forge(folder, "run", f"{name}.toml", "run.name=wrong", *settings, code=2)

    assert message in " ".join(shown.split())
    assert not (folder / "runs" / "wrong").exists()


def stored(folder, **sites):
    """A store of 4 samples; dimensions and rows of each site."""
    for site, (_, rows) in sites.items():
        write_shard(folder, site, 0, {"values": rows})
    write_index(folder, {"stimulus_id": np.arange(4), "length": np.full(4, len(sites["x"][1]) // 4)})
    kinds = {site: StoredSite(dims=(row, "width"), sizes=(3,), dtype="float32") for site, (row, _) in sites.items()}
    Manifest(sites=kinds, n_samples=4, shard_samples=4, origin={"run": "r"}, complete=True).write(folder)


@pytest.mark.parametrize(("row", "target", "n"), [("sample", "token", 4), ("token", "sample", 8)])
def test_a_row_a_sample_and_a_row_a_token_are_no_pairs(tmp_path, row, target, n):
    """The first sample was paired with the first token, the second with the second."""
    stored(tmp_path, x=(row, torch.randn(n, 3)), y=(target, torch.randn(12 - n, 3)))
    config = ActivationStoreConfig(path=str(tmp_path), site="x", target_site="y")

    with pytest.raises(ConfigError, match=f"data.target_site: y has a row a {target}, and x a row a {row}"):
        ActivationRows(config, seq_len=2, split="all", seed=0)


def test_rows_that_are_all_zero_stay_so(tmp_path):
    """They were divided by their mean norm, so that the loss was not a number."""
    stored(tmp_path, x=("sample", torch.zeros(4, 3)))

    rows = ActivationRows(ActivationStoreConfig(path=str(tmp_path), site="x"), seq_len=2, split="all", seed=0)

    assert (rows.read(np.arange(2))["activation"] == 0).all()


def test_a_model_without_a_loss_of_its_own_says_so(folder):
    (folder / "corpus").mkdir(exist_ok=True)
    (folder / "corpus" / "a.txt").write_text("text " * 200)
    job = 'data={name="text_files",path="corpus",pattern="*.txt"}'
    model = 'model={name="transformer",dim=16,n_layers=1,n_heads=2}'
    shown = forge(folder, "run", "topk_sae.toml", "run.name=wrong2", job, model, "evaluations=[]", code=2)

    assert "this model has no loss of its own" in shown


def test_what_the_formats_do_not_have_is_refused(tmp_path):
    from forge_plugins_interp.autoencoders.dictionary import Dictionary

    transcoder = Dictionary(TranscoderConfig(width=4, latents=6, k=1, target_width=4))
    with pytest.raises(ConfigError, match="give a transcoder the format sparsify"):
        write(transcoder, tmp_path / "a", "saelens", "x")
    with pytest.raises(ConfigError, match="has no dictionary of SAELens or sparsify that can be read"):
        read(tmp_path)
