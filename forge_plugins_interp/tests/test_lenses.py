"""Lenses and patching: identities of known sums, and the same in a layout."""

from __future__ import annotations

import attrs
import pytest
import torch

import forge_plugins_interp as interp
from forge_core.errors import ConfigError
from forge_plugins_interp.interventions import Patch, Replace
from forge_plugins_interp.lenses.attribution import attribute
from forge_plugins_interp.lenses.logit_lens import lens_rows, logit_lens
from forge_plugins_interp.patching.metric import metric_named
from forge_plugins_interp.patching.paths import path_sweep
from forge_plugins_interp.patching.prompts import Prompts
from forge_plugins_interp.patching.sweep import sweep

TOKENS = torch.tensor([[10, 20, 30, 40, 50]])
CORRUPT = torch.tensor([[10, 21, 30, 40, 50]])


@pytest.fixture(scope="module")
def session(run):
    with interp.open(run) as session:
        yield session


@pytest.fixture(scope="module")
def prompts(session):
    with torch.no_grad():
        clean = session.model(TOKENS)
    return Prompts(TOKENS, CORRUPT, metric_named("logit_diff", clean, [3, 7]))


def test_the_lens_of_the_last_layer_is_what_the_model_predicts(session):
    with torch.no_grad():
        expected = session.model(TOKENS)

    found = logit_lens(session, TOKENS, ["embed", "blocks.*.resid_post"])

    assert list(found) == ["embed", "blocks.0.resid_post", "blocks.1.resid_post"]
    assert torch.equal(found["blocks.1.resid_post"], expected)
    model = session.built.parts[0]
    with session.observe("blocks.0.resid_post") as seen, torch.no_grad():
        session.model(TOKENS)
    with torch.no_grad():
        by_hand = model.head(model.norm(seen["blocks.0.resid_post"]))
    assert torch.allclose(found["blocks.0.resid_post"], by_hand, atol=1e-6)


def test_rows_of_a_lens_have_the_next_token_and_its_place():
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 1.0]])

    rows = lens_rows({"blocks.0.resid_post": logits}, [2, 1], str, top=2)

    assert [row["predicted"] for row in rows] == ["2", "1", "0", "2"]
    assert rows[0]["next_place"] == 2
    assert rows[0]["next_log_probability"] == pytest.approx(float(logits[0].log_softmax(0)[1]))
    probabilities = logits[0].softmax(0)
    assert rows[0]["entropy"] == pytest.approx(float(-(probabilities * probabilities.log()).sum()))
    assert rows[3]["next_place"] is None


@pytest.mark.parametrize("heads", [False, True], ids=["layers", "heads"])
def test_contributions_add_up_to_the_logit(session, heads):
    with torch.no_grad():
        logits = session.model(TOKENS)[0, -1]

    found = attribute(session, TOKENS, 3, heads=heads)
    difference = attribute(session, TOKENS, 3, minus=7, heads=heads)

    assert sum(one.value for one in found) == pytest.approx(float(logits[3]), abs=1e-4)
    assert sum(one.value for one in difference) == pytest.approx(float(logits[3] - logits[7]), abs=1e-4)
    assert len(found) == 1 + 2 * ((4 if heads else 1) + 1) + 1


@pytest.mark.parametrize("missing", ["resid_mid", "attn_head_out"])
def test_heads_are_refused_where_a_block_does_not_tell_of_them(session, monkeypatch, missing):
    """Without a middle, as with ``parallel_residual``, they were left out without a word. A mixture of transformers has
    heads for each modality."""
    sites = session.sites
    monkeypatch.delitem(sites.here, f"blocks.0.{missing}")

    with pytest.raises(
        ConfigError, match=rf"--heads\): the model has no site blocks\.0\.{missing}, so that they cannot"
    ):
        attribute(session, TOKENS, 3, heads=True)


def test_contributions_have_the_factor_of_the_logits(session, monkeypatch):
    """They were those of logits without ``output_multiplier``, which Granite divides by."""
    model = session.built.parts[0]
    monkeypatch.setattr(model, "config", attrs.evolve(model.config, output_multiplier=0.25))
    with torch.no_grad():
        logits = session.model(TOKENS)[0, -1]

    found = attribute(session, TOKENS, 3)

    assert sum(one.value for one in found) == pytest.approx(float(logits[3]), abs=1e-4)

    hook = model.head.register_forward_pre_hook(lambda _, given: (given[0].tanh(),))
    with pytest.raises(ConfigError, match="more than a factor, so that a logit is no sum"):
        attribute(session, TOKENS, 3)
    hook.remove()


def test_contributions_know_layernorm_with_a_bias(session):
    from forge_plugins_interp.lenses.attribution import _frozen

    norm = torch.nn.LayerNorm(8)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    parts = torch.randn(3, 8, dtype=torch.float64)
    linear = _frozen(norm, parts.sum(0))

    together = sum(linear(part) for part in parts) + linear.bias
    assert torch.allclose(together, norm(parts.sum(0).float()).double(), atol=1e-4)
    assert linear.centres


def test_another_norm_is_refused():
    from forge_core.errors import ConfigError
    from forge_plugins_interp.lenses.attribution import _frozen

    class Squash(torch.nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    with pytest.raises(ConfigError, match="Squash, is neither like RMSNorm nor like LayerNorm"):
        _frozen(Squash(), torch.randn(8, dtype=torch.float64))


def test_patching_everything_of_a_layer_brings_everything_back(session, prompts):
    rows = sweep(session, prompts, ["blocks.1.resid_post"])

    last = {row["position"]: row["effect"] for row in rows}
    assert last[4] == pytest.approx(1, abs=1e-4)
    assert all(abs(last[position]) < 1e-5 for position in range(4))
    first = {row["position"]: row["effect"] for row in sweep(session, prompts, ["embed"])}
    assert first[1] == pytest.approx(1, abs=1e-4)  # the only token that differs
    assert all(abs(first[position]) < 1e-5 for position in (0, 2, 3, 4))


def test_each_place_is_patched_alone(session, prompts):
    rows = sweep(session, prompts, ["blocks.0.z"], by=["head", "position"])

    assert len(rows) == 4 * 5
    with torch.no_grad():
        with session.observe("blocks.0.z") as clean:
            session.model(TOKENS)
        change = Patch("blocks.0.z", at={"head": 2, "position": 3}, source=clean)
        with session.intervene(change):
            expected = float(prompts.metric(session.model(CORRUPT)))
    (row,) = [row for row in rows if (row["head"], row["position"]) == (2, 3)]
    assert row["value"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("sites", [["blocks.*.resid_post", "blocks.*.mlp_out"], ["blocks.*.attn_scores", "blocks.*.z"]])
def test_gradients_estimate_small_changes(session, sites):
    """For a prompt that hardly differs, attribution is what patching gives; the path's mean gradient is nearer."""
    table = session.built.parts[0].embed.weight
    saved = table.detach().clone()
    with torch.no_grad():
        table[21] = table[20] + 0.01 * table[21]
        clean = session.model(TOKENS)
    try:
        close = Prompts(TOKENS, CORRUPT, metric_named("logit_diff", clean, [3, 7]))
        found = {
            method: {
                (row["site"], row["position"]): row["effect"] for row in sweep(session, close, sites, method=method)
            }
            for method in ("patching", "attribution", "integrated_gradients")
        }
    finally:
        with torch.no_grad():
            table.copy_(saved)

    exact = torch.tensor(list(found["patching"].values()))
    for method in ("attribution", "integrated_gradients"):
        estimate = torch.tensor(list(found[method].values()))
        assert torch.allclose(estimate, exact, atol=0.05), method
        assert (estimate - exact).abs().sum() < 0.5 * exact.abs().sum(), method


def test_attribution_by_the_pattern_is_that_of_what_it_mixes(session, prompts):
    """The pattern is computed for whoever looks; its gradient is that of autograd on a copy of attention."""
    (site,) = sites = ["blocks.1.attn_pattern"]
    rows = sweep(session, prompts, sites, by=("head",), method="attribution")
    with torch.no_grad():
        seen = []
        for tokens in (TOKENS, CORRUPT):
            with session.observe(site) as one:
                session.model(tokens)
            seen.append(one[site])
    steps = []
    for sign in (1, -1):  # a central difference along the way from corrupt to clean, one head at a time
        for head in range(4):
            value = seen[1].clone()
            value[:, head] += sign * 1e-2 * (seen[0] - seen[1])[:, head]
            with torch.no_grad(), session.intervene(Replace(site, value=value)):
                steps.append(float(prompts.metric(session.model(CORRUPT))))
    expected = [(up - down) / 2e-2 for up, down in zip(steps[:4], steps[4:], strict=True)]
    with torch.no_grad():
        corrupt = float(prompts.metric(session.model(CORRUPT)))

    assert [row["value"] - corrupt for row in rows] == pytest.approx(expected, rel=2e-2, abs=2e-4)
    assert max(map(abs, expected)) > 1e-3


@torch.no_grad()
def through_one_path(model, clean, corrupt, place):
    """Logits of the corrupt prompt, into which the clean output of the first layer's attention comes by one path: it
    is added to what the second layer's attention reads, and to nothing else."""
    first, second = model.blocks["0"], model.blocks["1"]
    seen = []
    handles = [
        first.attention.register_forward_hook(lambda _, __, output: seen.append(output)),
        second.register_forward_pre_hook(lambda _, args: seen.append(args)),
    ]
    model(clean)
    model(corrupt)
    for handle in handles:
        handle.remove()
    of_clean, _, of_corrupt, (hidden, surroundings, *_) = seen
    change = torch.zeros_like(hidden)
    change[:, place] = (of_clean - of_corrupt)[:, place]
    received = second.mixed(hidden + change, surroundings, None)
    added = hidden + received
    return model.head(model.norm(added + second.changed(added, surroundings, generates=False)))


def test_a_path_is_patched_as_its_definition_says(session, prompts):
    """In both directions: the answer brought back into the corrupt prompt, and taken from the clean one."""
    swapped = Prompts(CORRUPT, TOKENS, prompts.metric)
    for pair in (prompts, swapped):
        (row,) = path_sweep(session, pair, ["blocks.0.attn_out"], ["blocks.1.attn_out"])
        places = path_sweep(session, pair, ["blocks.0.attn_out"], ["blocks.1.attn_out"], by=["position"])

        model = session.built.parts[0]
        with torch.no_grad():
            clean, corrupt = (float(prompts.metric(model(one))) for one in (pair.clean, pair.corrupt))
        for place, found in [(slice(None), row), *enumerate(places)]:
            value = float(prompts.metric(through_one_path(model, pair.clean, pair.corrupt, place)))
            assert found["value"] == pytest.approx(value, abs=1e-5)
            assert found["effect"] == pytest.approx((value - corrupt) / (clean - corrupt), abs=1e-4)
        assert abs(row["value"] - corrupt) > 1e-4
        assert (row["site"], row["to"]) == ("blocks.0.attn_out", "blocks.1.attn_out")
        assert [one["position"] for one in places] == [0, 1, 2, 3, 4]
    assert row["effect"] != pytest.approx(sum(one["effect"] for one in sweep(session, pair, ["blocks.0.attn_out"])))


def test_a_path_that_nothing_is_frozen_beside_is_the_whole_effect(session, prompts):
    (row,) = path_sweep(session, prompts, ["embed"], ["blocks.1.resid_post"], frozen=[])

    assert row["effect"] == pytest.approx(1, abs=1e-4)


def test_paths_lead_from_each_sender_to_each_later_receiver(session, prompts):
    rows = path_sweep(session, prompts, ["blocks.*.z"], ["blocks.*.mlp_in"], by=["head", "position"])

    paths = list(dict.fromkeys((row["site"][7], row["to"][7]) for row in rows))
    assert paths == [("0", "0"), ("0", "1"), ("1", "1")]
    assert len(rows) == 3 * 4 * 5
    assert max(abs(row["effect"]) for row in rows) > 1e-5


@pytest.mark.parametrize("sender", ["blocks.0.attn_in", "blocks.0.z", "blocks.0.attn_out"])
def test_a_layer_that_the_sender_acts_by_is_not_frozen(session, prompts, sender):
    (row,) = path_sweep(session, prompts, [sender], ["blocks.1.resid_post"])
    (expected,) = path_sweep(session, prompts, ["blocks.0.attn_out"], ["blocks.1.resid_post"])

    assert row["effect"] == pytest.approx(expected["effect"], abs=1e-4)
    assert abs(row["effect"]) > 1e-3


def test_metrics_are_their_formulas():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    clean = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(1))
    p, q = clean[0, -1].softmax(0), logits[1, -1].softmax(0)

    assert metric_named("probability", clean, [2])(logits)[1] == pytest.approx(float(q[2]))
    assert metric_named("loss", clean, [2])(logits)[1] == pytest.approx(float(-q[2].log()))
    assert metric_named("kl", clean, [])(logits)[1] == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)
    assert metric_named("logit_diff", clean, [2, 4])(logits)[1] == pytest.approx(
        float(logits[1, -1, 2] - logits[1, -1, 4])
    )
