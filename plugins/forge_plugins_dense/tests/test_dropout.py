"""What is dropped: as often as it should be, a function of what is numbered, and the same however a batch is cut."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from forge_core.errors import ConfigError
from forge_plugins_dense.attention import AttentionCore
from forge_plugins_dense.dropout import Dropout, drop_weights, noise_of_layer, uniform
from forge_plugins_dense.mask import causal_mask, document_block_mask
from forge_plugins_dense.multi_token_config import MultiTokenConfig

ALL = {"attention_dropout": 0.2, "residual_dropout": 0.3, "embedding_dropout": 0.1}
NOISE = torch.arange(2 * 24).view(2, 24) ^ 0x1234_5678_9ABC_DEF


def lowbias32(bits: int) -> int:
    """Wellons' hash, as he has it in C."""
    bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
    bits = (bits ^ bits >> 15) * 0x846CA68B % 2**32
    return bits ^ bits >> 16


def test_what_is_dropped_is_the_hash_of_token_place_and_feature():
    assert lowbias32(1) == 1753845952  # of his program
    noise = torch.tensor([[3, 2**32 - 1]])
    kept = Dropout(0.4, place=2)(torch.ones(1, 2, 5), noise) != 0

    for column, token in enumerate((3, 2**32 - 1)):
        bits = lowbias32((token + 2 * 0x9E3779B9) % 2**32)
        expected = [lowbias32(bits ^ lowbias32(feature)) >= 0.4 * 2**32 for feature in range(5)]
        assert kept[0, column].tolist() == expected


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_as_much_is_dropped_as_is_asked_for_and_the_rest_is_scaled(rate):
    noise = noise_of_layer(torch.arange(4096).view(4, -1), 3)
    hidden = torch.ones(4, 1024, 64)
    found = Dropout(rate, place=1)(hidden, noise)

    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / (1 - rate)).item()}
    spread = (rate * (1 - rate) / hidden.numel()) ** 0.5
    assert abs((found == 0).double().mean().item() - rate) < 4 * spread
    for dim in (-1, (0, 1)):  # no token and no feature has another rate than the rest
        sizes = (found == 0).double().mean(dim)
        of_each = rate * (1 - rate) * sizes.numel() / hidden.numel()
        assert sizes.var().item() == pytest.approx(of_each, rel=0.3 if sizes.numel() > 64 else 0.6)


def test_tokens_layers_places_and_features_are_dropped_independently():
    tokens = torch.arange(8192).view(1, -1) ^ 0x0FED_CBA9_8765_4321
    masks = {
        (layer, place): Dropout(0.5, place)(torch.ones(1, 8192, 32), noise_of_layer(tokens, layer)).flatten() != 0
        for layer in (0, 1)
        for place in (1, 2)
    }
    first = masks[0, 1].view(8192, 32)
    pairs = [(masks[0, 1], masks[0, 2]), (masks[0, 1], masks[1, 1]), (masks[0, 2], masks[1, 1])]
    pairs += [(first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first[64:], first[:-64])]
    for one, other in pairs:
        same = (one == other).double().mean().item()
        assert abs(same - 0.5) < 5 * 0.5 / one.numel() ** 0.5


@pytest.mark.parametrize("causal", [True, False])
def test_attention_drops_weights_after_its_softmax(causal):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 24, 8, generator=rng, requires_grad=True) for heads in (4, 2, 2))
    core = AttentionCore("auto", dropout=0.3)
    mask = None if causal else causal_mask(24, 5, q.device)[None, None]

    found = core(q, k, v, mask, causal, noise=NOISE)

    wide = [one.detach().double().requires_grad_() for one in (q, k, v)]
    repeated = [one.repeat_interleave(2, dim=1) for one in wide[1:]]
    sees = causal_mask(24, 0 if causal else 5, q.device)
    weights = (wide[0] @ repeated[0].mT / 8**0.5).masked_fill(~sees, -torch.inf).softmax(-1)
    kept = drop_weights(torch.ones(2, 4, 24, 24), 0.3, NOISE).double()
    expected = (weights * kept) @ repeated[1]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    assert 0.2 < (kept == 0).double().mean() < 0.4
    assert not torch.equal(kept[:, 0], kept[:, 1]), "heads drop what others do not"
    gradient = torch.randn(found.shape, generator=rng)
    of_ours = torch.autograd.grad(found, (q, k, v), gradient)
    for one, other in zip(of_ours, torch.autograd.grad(expected, wide, gradient.double()), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-4)
    evaluated = core.eval()(q, k, v, mask, causal, noise=NOISE)
    torch.testing.assert_close(evaluated.double(), weights @ repeated[1], atol=1e-6, rtol=1e-5)


def test_a_rank_with_a_part_of_the_heads_drops_what_one_with_all_does():
    whole = drop_weights(torch.ones(2, 6, 24, 24), 0.3, NOISE)

    parts = [drop_weights(torch.ones(2, 2, 24, 24), 0.3, NOISE, part) for part in range(3)]

    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not torch.equal(parts[0], parts[1])


@torch.no_grad()
@pytest.mark.parametrize("keys", [ALL, *({key: rate} for key, rate in ALL.items())], ids=str)
def test_a_model_drops_the_same_for_a_token_however_a_batch_is_cut(tiny_model, tokens, keys):
    model = tiny_model(**keys).train()
    together = model(tokens, noise=NOISE)

    apart = torch.cat([model(row[None], noise=noise[None]) for row, noise in zip(tokens, NOISE, strict=True)])

    torch.testing.assert_close(apart, together, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(tokens, noise=NOISE + 1000), together, atol=1e-2)
    evaluated = model.eval()(tokens, noise=NOISE)
    torch.testing.assert_close(evaluated, tiny_model()(tokens), rtol=0, atol=0)
    assert not torch.allclose(evaluated, together, atol=1e-2)


@torch.no_grad()
def test_without_numbers_torch_decides(tiny_model, tokens):
    model = tiny_model(**ALL).train()
    one, other = model(tokens), model(tokens)
    assert not torch.allclose(one, other)
    assert one.isfinite().all()


@torch.no_grad()
def test_what_predicts_further_tokens_drops_too_and_numbers_come_to_it(tiny_model, tokens, build):
    from forge_core.contracts.component_ref import ComponentRef
    from forge_plugins_dense.multi_token_config import SequentialConfig

    use = ComponentRef(
        kind="predictor",
        name="sequential",
        provider="forge-plugins-dense",
        factory="forge_plugins_dense.predictor:SequentialPredictor",
        config=SequentialConfig(),
    )
    model = tiny_model(multi_token=MultiTokenConfig(predictor=use), residual_dropout=0.3).train()
    seen = []
    for layer in ("0", "1", "2"):
        block = model.blocks[layer] if layer != "2" else model.blocks[layer].block
        block.mixed_dropout.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    surroundings = model._surroundings(tokens, torch.arange(24)[None], None, None, None, None, {}, None)
    usual = surroundings[model.kinds["2"]]

    model(tokens, noise=NOISE)
    (given,) = model._surroundings_ahead(usual, tokens[..., None], NOISE)

    assert torch.equal(given.noise, noise_of_layer(NOISE, 2))
    assert [torch.equal(one, noise_of_layer(NOISE, layer)) for layer, one in enumerate(seen)] == [True, True]


def test_what_is_computed_again_drops_the_same(tiny_model, tokens):
    gradients = []
    for again in (False, True):
        model = tiny_model(**ALL).train()
        if again:
            for block in model.blocks.values():
                block.forward = lambda *args, run=block.forward: checkpoint(
                    run, *args, use_reentrant=False, preserve_rng_state=False
                )
        model(tokens, noise=NOISE).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"attention_dropout": 0.1, "attention": "flash"}, '"flash" has no weights that could be dropped'),
        ({"residual_dropout": 1.0}, "residual_dropout"),
        ({"embedding_dropout": -0.1}, "embedding_dropout"),
    ],
)
def test_rates_and_kernels_that_cannot_be_are_refused(tiny_config, keys, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**keys)


def test_layouts_that_cannot_drop_weights_are_refused(tiny_config):
    from types import SimpleNamespace

    def found(config, device, **parallel):
        degrees = SimpleNamespace(**{"tp": 1, "pp": 1, "cp": 1} | parallel)
        train, run = SimpleNamespace(seq_len=8), SimpleNamespace(device=device)
        job = SimpleNamespace(train=train, parallel=degrees, run=run, parametrization=None)
        return [key for key, _ in config.check(job)]

    config = tiny_config(**ALL)
    assert found(config, "cuda", cp=2) == ["attention_dropout"]
    assert (
        found(config, "cuda", tp=2)
        == found(config, "cpu", cp=2)
        == found(tiny_config(residual_dropout=0.1), "cuda", tp=2, cp=2)
        == []
    )
    assert config.beyond_causal == "attention_dropout"
    q = torch.zeros(1, 4, 8, 8)
    with pytest.raises(ConfigError, match=r"attention_dropout: context parallelism on CUDA"):
        AttentionCore("auto", dropout=0.1)(q, q, q, document_block_mask(torch.zeros(1, 8).long()), False)


def test_uniform_numbers_are_between_nothing_and_one_and_reach_neither(monkeypatch):
    found = uniform(torch.arange(2**16), 4)
    assert found.dtype == torch.float32
    assert found.min() > 0
    assert found.max() < 1
    assert found.mean().item() == pytest.approx(0.5, abs=0.003)

    for bits, end in ((0, 2.0**-24), (0xFFFF_FFFF, 1 - 2.0**-24)):  # whatever a hash gives
        monkeypatch.setattr("forge_plugins_dense.dropout._mixed", lambda _, bits=bits: torch.tensor([bits]))
        assert uniform(torch.zeros(1, dtype=torch.int64), 1).item() == end
