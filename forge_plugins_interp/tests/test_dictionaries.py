"""The function of autoencoders: codes, what dead latents learn, and padding, which counts for nothing."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.config.builder import ComponentBuilder
from forge_core.contracts.callback import OneRank
from forge_core.contracts.loss import IGNORED
from forge_core.data.counts import with_counts
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp.autoencoders import similarity
from forge_plugins_interp.autoencoders.codes import batch_top_k, jump_relu, step, top_k
from forge_plugins_interp.autoencoders.config import AutoencoderEvaluationConfig, JumpReluConfig, TopKConfig
from forge_plugins_interp.autoencoders.dictionary import Dictionary
from forge_plugins_interp.autoencoders.evaluation import Explained
from forge_plugins_interp.autoencoders.model import Autoencoder
from forge_plugins_interp.autoencoders.similarity import mmcs

WIDTH = 32
MODELS = {
    "topk_sae": {"k": 3},
    "batch_topk_sae": {"k": 3, "threshold_decay": 0.9},
    "matryoshka_sae": {"k": 3, "prefixes": [8, 24]},
    "jumprelu_sae": {"l0_coefficient": 0.05, "bandwidth": 0.5, "initial_threshold": 0.5},
    "transcoder": {"k": 3, "target_width": WIDTH + 2, "skip": True},
}


def test_each_registered_autoencoder_is_looked_at_here():
    models = {one.component.name for one in discover().components("model") if "autoencoders" in one.component.factory}

    assert models == MODELS.keys()


def test_codes_are_their_definitions():
    pre = torch.tensor([[3.0, -1.0, 2.0, 0.5], [0.1, 0.2, -5.0, 4.0]])

    assert top_k(pre, 2).tolist() == [[3.0, 0.0, 2.0, 0.0], [0.0, pytest.approx(0.2), 0.0, 4.0]]
    assert batch_top_k(pre, 1).tolist() == [[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 4.0]]
    threshold = torch.tensor([1.0, 1.0, 1.0, 0.48], requires_grad=True)
    x = pre.clone().requires_grad_()
    value = jump_relu(x, threshold, 0.1)
    assert value.tolist() == [[3.0, 0.0, 2.0, 0.5], [0.0, 0.0, 0.0, 4.0]]
    assert jump_relu(torch.tensor([[-math.inf, -1.0]]), threshold[:2], 0.1).tolist() == [[0.0, 0.0]]  # nor NaN
    value.sum().backward()
    assert x.grad.tolist() == [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
    assert threshold.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, -0.48 / 0.1])  # one value is within 0.05 of it
    threshold.grad = None
    step(pre, threshold, 0.1).sum().backward()
    assert threshold.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, -1 / 0.1])


def test_a_threshold_learns_from_values_near_it_alone():
    config = JumpReluConfig(width=4, latents=6, l0_coefficient=0.0, bandwidth=0.5, initial_threshold=0.1)
    dictionary = Dictionary(config).double()
    with torch.no_grad():
        for tensor in dictionary.parameters():
            tensor.normal_(generator=torch.Generator().manual_seed(1))
        dictionary.log_threshold.fill_(math.log(0.1))  # below half of the bandwidth
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(2)).double()
    weights = torch.randn(50, 6, generator=torch.Generator().manual_seed(3)).double()
    codes = []
    dictionary.code.register_forward_hook(lambda _, __, code: codes.append(code))

    dictionary(x)
    (codes[0] * weights).sum().backward()

    # arXiv 2407.14435, equation 11, of what the encoder gives; as log θ is learned, with one more factor θ
    pre = F.linear(x - dictionary.decoder_bias, dictionary.encoder, dictionary.encoder_bias)
    near = ((pre - 0.1) / 0.5).abs() < 1 / 2
    assert bool((pre[near] < 0).any())
    assert torch.allclose(dictionary.log_threshold.grad, -0.1 * 0.1 / 0.5 * (weights * near).sum(0))


def test_dead_latents_learn_from_what_is_left_over():
    dictionary = Dictionary(TopKConfig(width=4, latents=6, k=1, dead_after=10))
    with torch.no_grad():
        for tensor in (*dictionary.parameters(), *dictionary.buffers()):
            tensor.normal_(generator=torch.Generator().manual_seed(1))
        dictionary.idle.zero_()
        dictionary.idle[4:] = 100.0
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))

    coded = dictionary(x, target=x)
    coded.penalty.sum().backward()

    assert bool((dictionary.encoder.grad[4:] != 0).any())
    assert not bool(dictionary.encoder.grad[:4].any())
    left = (x - coded.reconstruction).detach()
    aux = top_k(
        F.linear(x - dictionary.decoder_bias, dictionary.encoder, dictionary.encoder_bias).where(
            dictionary.idle > 10, 0.0
        ),
        2,
    )
    expected = (1 / 32) * (2 / 2) * (left - aux @ F.normalize(dictionary.decoder, dim=-1)).square().mean(-1)
    assert torch.allclose(coded.penalty, expected, atol=1e-6)


def test_mmcs_is_the_mean_of_the_best_cosines(monkeypatch):
    monkeypatch.setattr(similarity, "_ROWS", 3)
    first, second = (torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (7, 9))

    cosines = [[float(F.cosine_similarity(a.double(), b.double(), dim=0)) for b in second] for a in first]
    assert mmcs(first, second) == pytest.approx(np.mean([max(row) for row in cosines]), abs=1e-6)
    assert mmcs(first, torch.cat((second, -2 * first, 3 * first))) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ConfigError, match="directions of 5 and of 4 features"):
        mmcs(first, second[:, :4])


def autoencoder(name):
    """One in training, with random parameters, and latents of which some are dead."""
    table = {"name": name, "width": WIDTH, "latents": 64, "dead_after": 2000, **MODELS[name]}
    model = Autoencoder(ComponentBuilder(discover()).resolve("model", table).config, vocab_size=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(0.0, 0.3, generator=generator)
        for tensor in model.buffers():
            tensor.zero_()
        model.blocks["0"].idle[::2] = 5000.0
    return model


def rows_of(*lengths, padded_to=0, noise=3.0):
    """A batch of rows one after the other, so many of each sample, and of noise in its padding."""
    size = padded_to or lengths[0]
    generator = np.random.default_rng(0)
    rows, others = (generator.standard_normal((64, n)).astype(np.float32) for n in (WIDTH, WIDTH + 2))
    activation = noise * generator.standard_normal((len(lengths), size, WIDTH)).astype(np.float32)
    is_row = np.arange(size) < np.array(lengths)[:, None]
    activation[is_row] = rows[: sum(lengths)]
    target = np.zeros((*activation.shape[:2], WIDTH + 2), np.float32)
    target[is_row] = others[: sum(lengths)]
    return activation, target, np.where(is_row, np.arange(size), -1)


def learned(model, batch, scales):
    """Loss, gradients and counts of a batch, as the loader and the engine make them of what a source gives."""
    activation, target, positions = batch
    entries = with_counts(
        {
            "activation": activation,
            "positions": positions,
            "scales": np.array([[scale, 2 * scale] for scale in scales], np.float32),
            **({"target_activation": target} if hasattr(model.config, "target_width") else {}),
        },
        "activation",
    )
    found = model(**{name: torch.from_numpy(entry) for name, entry in entries.items()}, loss=True)
    found.total.backward()
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}


def alike(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing_that_is_learned_or_counted(name):
    plain, padded = autoencoder(name), autoencoder(name)

    expected, gradients = learned(plain, rows_of(*[1] * 8), [1.0] * 6 + [4.0] * 2)
    found, others = learned(padded, rows_of(6, 2, padded_to=16), [1.0, 4.0])

    assert (int(found.count), int(expected.count)) == (8, 8)
    assert found.total.item() == pytest.approx(expected.total.item(), rel=1e-5)
    alike(others, gradients)
    theirs, mine = plain.blocks["0"], padded.blocks["0"]
    alike(mine.accumulators(), theirs.accumulators())
    for one in (theirs, mine):
        one.before_optimizer_step(one.accumulators(), 0.0)
    alike(dict(mine.named_buffers()), dict(theirs.named_buffers()))
    alike(mine.step_metrics(), theirs.step_metrics())
    assert mine.scales.tolist() == pytest.approx([(6 * 1 + 2 * 4) / 8, (6 * 2 + 2 * 8) / 8])
    assert set(mine.idle.tolist()) <= {0.0, 8.0, 5008.0}


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_padding_alone_adds_nothing_and_a_step_of_it_changes_nothing(name):
    model = autoencoder(name)
    dictionary = model.blocks["0"]
    learned(model, rows_of(4, 4), [1.0, 1.0])
    counted = {key: value.clone() for key, value in dictionary.accumulators().items()}
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    found, others = learned(model, rows_of(0, 0, padded_to=4), [9.0, 9.0])

    assert found.total.item() == 0.0
    alike(others, gradients)
    alike(dictionary.accumulators(), counted)
    dictionary.before_optimizer_step(counted, 0.0)
    state = {key: value.clone() for key, value in dictionary.named_buffers()}
    dictionary.before_optimizer_step({key: torch.zeros_like(value) for key, value in counted.items()}, 0.0)
    alike(dict(dictionary.named_buffers()), state)


@pytest.mark.parametrize("name", [one for one in MODELS if one != "batch_topk_sae"])  # which chooses of all
def test_sums_over_ranks_are_those_of_their_rows(name):
    whole, *ranks = (autoencoder(name) for _ in range(3))

    _, gradients = learned(whole, rows_of(*[1] * 8), [1.0] * 5 + [4.0] * 3)
    activation, target, positions = rows_of(5, 3, padded_to=7)
    parts = [
        learned(model, (activation[at], target[at], positions[at]), [scale])
        for model, at, scale in zip(ranks, (slice(0, 1), slice(1, 2)), (1.0, 4.0), strict=True)
    ]

    alike({key: parts[0][1][key] + parts[1][1][key] for key in gradients}, gradients)
    sums = [model.blocks["0"].accumulators() for model in (whole, *ranks)]
    assert torch.allclose(sums[0]["fired"], sums[1]["fired"] + sums[2]["fired"])
    assert torch.allclose(sums[0]["sums"][:4], sums[1]["sums"][:4] + sums[2]["sums"][:4])


class CutsOut(TorchDispatchMode):
    """Counts what makes the host wait for how many rows there are."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = args[1] if func is torch.ops.aten.index.Tensor else ()
        is_mask = any(one is not None and one.dtype is torch.bool for one in indices)
        self.count += is_mask or func in (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["topk_sae", "jumprelu_sae", "transcoder"])
def test_an_evaluation_is_over_rows_without_padding_which_is_not_cut_out(name):
    """In float64, of the rows alone, whatever stands in the padding."""
    model = autoencoder(name).eval()
    batches = []
    for lengths, noise in (((6, 2), 3.0), ((3, 5), math.inf)):
        activation, target, positions = rows_of(*lengths, padded_to=8, noise=noise)
        entries = with_counts({"activation": activation, "positions": positions}, "activation")
        batch = {key: torch.from_numpy(entry) for key, entry in entries.items()}
        batches.append(batch | ({"target_activation": torch.from_numpy(target)} if name == "transcoder" else {}))
    context = SimpleNamespace(
        parts=[model],
        device=torch.device("cpu"),
        mesh=OneRank(),
        batches=lambda source, samples: iter(batches),
        predict=lambda batch: model(**batch),
    )

    with torch.no_grad(), CutsOut() as cuts:
        found = Explained(AutoencoderEvaluationConfig(), open_data=lambda *_: None).run(context)

    assert cuts.count == 0
    double = copy.deepcopy(model).double()
    codes = []
    double.blocks["0"].code.register_forward_hook(lambda module, args, code: codes.append(code))
    rows = {
        key: torch.cat([batch[key][batch["targets"] != IGNORED] for batch in batches]).double()[None]
        for key in batches[0].keys() & {"activation", "target_activation"}
    }
    with torch.no_grad():
        y = double(tokens=None, **rows)[0]
    expected = rows.get("target_activation", rows["activation"])[0]
    assert len(expected) == 16
    assert found == pytest.approx(
        {
            "fvu": float((expected - y).square().sum() / (expected - expected.mean(0)).square().sum()),
            "l0": float((codes[0] > 0).sum()) / 16,
            "silent": float((codes[0] > 0).sum((0, 1)).eq(0).double().mean()),
        },
        rel=1e-5,
    )
