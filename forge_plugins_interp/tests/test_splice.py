"""A dictionary in the place of a site: what it recovers, and what it refuses."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import forge_plugins_interp as interp
from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_interp.autoencoders.config import TopKConfig, TranscoderConfig
from forge_plugins_interp.autoencoders.dictionary import Dictionary
from forge_plugins_interp.autoencoders.splice import Splice, recovery

JOB = """
[run]
name = "relu"
[model]
name = "transformer"
dim = 32
n_layers = 2
n_heads = 4
max_seq_len = 64
init_std = 0.2
[model.feed_forward]
name = "mlp"
activation = "relu"
[data]
name = "text_files"
path = "text"
pattern = "*.txt"
validation = 0.5
[train]
steps = 2
seq_len = 32
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-2
[scheduler]
name = "constant"
"""
TRANSCODER = """
[run]
name = "transcoder"
[model]
name = "transcoder"
width = 32
target_width = 32
latents = 64
k = 8
[data]
name = "activation_store"
path = "acts"
site = "blocks.1.mlp_in"
target_site = "blocks.1.mlp_out"
[train]
steps = 20
seq_len = 16
batch_size = 4
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
"""
TARGET, READ = "blocks.1.mlp_out", "blocks.1.mlp_in"
TOKENS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run whose layers have two matrices, and a transcoder that has learned from it."""
    folder = tmp_path_factory.mktemp("splice")
    (folder / "text").mkdir()
    for number in range(4):
        lines = (f"line {i}: {(i * 7919 + number) % 97}" for i in range(100))
        (folder / "text" / f"{number}.txt").write_text("\n".join(lines))
    (folder / "job.toml").write_text(JOB)
    (folder / "transcoder.toml").write_text(TRANSCODER)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["run", "job.toml"]) == 0
        assert main(["extract", "runs/relu", "--sites", f"{READ},{TARGET}", "--samples", "8", "--out", "acts"]) == 0
        assert main(["run", "transcoder.toml"]) == 0
    return folder


@pytest.fixture
def session(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with interp.open("runs/relu") as opened:
        yield opened


def blank(config):
    """A dictionary of zeros, with which rows are not scaled."""
    made = Dictionary(config).requires_grad_(requires_grad=False).eval()
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.zero_()
    made.scales.fill_(1)
    return made


def exact(session):
    """The transcoder that computes what layer 1 computes: rows of its decoder have norm 1, and codes are larger."""
    (model,) = session.built.parts
    layer = model.blocks["1"].feed_forward
    up, down = layer.up.weight.detach(), layer.down.weight.detach()
    made = blank(TranscoderConfig(width=32, latents=len(up), k=len(up), target_width=32))
    norms = down.norm(dim=0)
    made.encoder.copy_(up * norms[:, None])
    made.decoder.copy_(down.T)
    return made


def test_a_transcoder_that_computes_the_layer_recovers_all(session):
    splice = Splice(TARGET, dictionary=exact(session), reads=READ)

    found = recovery(session, splice, session.open_data(), 4)

    assert found.ablated - found.original > 0.05
    assert found.recovered == pytest.approx(1.0, abs=1e-4)
    assert abs(found.kl) < 1e-8


def test_a_prediction_stands_in_at_some_positions_alone(session):
    dictionary = blank(TranscoderConfig(width=32, latents=4, k=1, target_width=32))
    with torch.no_grad(), session.observe(TARGET) as plain:
        session.model(TOKENS)

    at = {"position": [2, -1]}
    with (
        torch.no_grad(),
        session.intervene(Splice(TARGET, dictionary=dictionary, reads=READ, at=at)),
        session.observe("blocks.1.resid_post", "blocks.1.resid_mid") as seen,
    ):
        session.model(TOKENS)

    expected = plain[TARGET].clone()
    expected[:, [2, -1]] = 0
    assert torch.allclose(seen["blocks.1.resid_post"] - seen["blocks.1.resid_mid"], expected, atol=1e-5)


def test_gradients_pass_through_a_transcoder(session):
    dictionary = exact(session)

    found = []
    for changes in ([], [Splice(TARGET, dictionary=dictionary, reads=READ)]):
        with session.observe("blocks.0.resid_post", gradients=True) as seen, session.intervene(*changes):
            session.model(TOKENS)[0, -1, 3].backward()
        found.append(seen.grad("blocks.0.resid_post"))

    assert torch.allclose(*found, atol=1e-5)


def test_a_run_says_where_its_transcoder_belongs(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    recover = ["autoencoder", "recover", "runs/relu", "runs/transcoder", "--samples", "2"]

    assert main(recover) == 0
    by_default = capfd.readouterr().out
    assert main([*recover, "--site", TARGET, "--reads", READ]) == 0

    assert by_default == capfd.readouterr().out
    assert re.match(r"loss \d+\.\d+, with the transcoder \d+\.\d+, with zeros \d+\.\d+\nrecovered ", by_default)


def test_a_folder_of_another_tool_needs_its_sites(folder, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert main(["autoencoder", "export", "runs/transcoder", "--format", "sparsify", "--out", "files"]) == 0
    recover = ["autoencoder", "recover", "runs/relu", "files", "--samples", "2"]
    capfd.readouterr()

    assert main(recover) == 2
    assert "--site: files does not say where it stands in" in capfd.readouterr().err
    assert main([*recover, "--site", TARGET]) == 2
    assert "--reads: files does not say what it reads" in capfd.readouterr().err
    assert main([*recover, "--site", TARGET, "--reads", READ]) == 0


@pytest.mark.parametrize(
    ("site", "reads", "message"),
    [
        (TARGET, "", "a transcoder predicts it from another site; name that as reads"),
        ("blocks.0.mlp_out", READ, r"reads: blocks\.1\.mlp_in comes after blocks\.0\.mlp_out"),
        ("blocks.*.mlp_out", READ, "means 2 sites, and a transcoder reads one and predicts one"),
        (TARGET, "blocks.1.mlp_post", "the dictionary makes rows of 32 features from rows of 32"),
        (TARGET, "blocks.1.mlp_inn", r"did you mean 'blocks\.1\.mlp_in'"),
    ],
)
def test_a_transcoder_in_the_wrong_place_is_refused(session, site, reads, message):
    dictionary = blank(TranscoderConfig(width=32, latents=4, k=1, target_width=32))

    with (
        pytest.raises(ConfigError, match=message),
        torch.no_grad(),
        session.intervene(Splice(site, dictionary=dictionary, reads=reads)),
    ):
        session.model(TOKENS)


def test_an_autoencoder_reads_where_it_stands_in(session):
    dictionary = blank(TopKConfig(width=32, latents=4, k=1))

    with (
        pytest.raises(ConfigError, match="has no effect, as an autoencoder reads the site that it stands in for"),
        session.intervene(Splice(TARGET, dictionary=dictionary, reads=READ)),
    ):
        pass


def random_dictionary(config):
    made = Dictionary(config).requires_grad_(requires_grad=False).eval()
    for number, tensor in enumerate((*made.parameters(), *made.buffers())):
        tensor.normal_(generator=torch.Generator().manual_seed(number))
    made.scales.copy_(torch.tensor([2.0, 3.0]))
    made.encoder_bias[7] = 20.0  # so that it fires everywhere
    return made


CONFIGS = [TopKConfig(width=32, latents=12, k=3), TranscoderConfig(width=32, latents=12, k=3, target_width=32)]


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_changed_latents_move_the_value_along_their_directions(session, config):
    dictionary = random_dictionary(config)
    reads = {"reads": READ} if dictionary.predicts() else {}
    with session.observe(TARGET, READ) as plain:
        session.model(TOKENS)

    change = {"values": {4: 6.0}, "factors": {7: -1.5}}
    found = {}
    for error in (False, True):
        splice = Splice(TARGET, dictionary=dictionary, **reads, **change, error=error)
        with session.intervene(splice), session.observe("blocks.1.resid_post", "blocks.1.resid_mid") as seen:
            session.model(TOKENS)
        found[error] = seen["blocks.1.resid_post"] - seen["blocks.1.resid_mid"]

    code = dictionary.encode(plain[READ] if reads else plain[TARGET])
    assert bool((code[..., 7] > 0).any())
    directions = F.normalize(dictionary.decoder, dim=-1) * (3.0 if reads else 2.0)
    moved = (6.0 - code[..., 4, None]) * directions[4] - 2.5 * code[..., 7, None] * directions[7]
    made = dictionary.reconstruct(plain[READ] if reads else plain[TARGET])
    assert torch.allclose(found[False], made + moved, atol=1e-4)
    assert torch.allclose(found[True], plain[TARGET] + moved, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_with_its_error_and_no_changed_latent_nothing_changes(session, config):
    dictionary = random_dictionary(config)
    reads = {"reads": READ} if dictionary.predicts() else {}
    plain = session.model(TOKENS)

    with session.intervene(Splice(TARGET, dictionary=dictionary, **reads, error=True)):
        kept = session.model(TOKENS)
    with session.intervene(Splice(TARGET, dictionary=dictionary, **reads)):
        without = session.model(TOKENS)

    assert torch.equal(kept, plain)
    assert (without - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": {12: 1.0}}, "values: latent 12: the dictionary has the latents 0 to 11"),
        ({"factors": {-1: 1.0}}, "factors: latent -1: the dictionary has the latents 0 to 11"),
        ({"values": {3: 1.0}, "factors": {3: 0.0}}, "factors: latent 3 has a new activation in values"),
    ],
)
def test_latents_that_are_not_there_or_changed_twice_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        Splice(TARGET, dictionary=random_dictionary(CONFIGS[0]), **change)
