"""A model of a checkpoint, looked at from Python and by commands."""

from __future__ import annotations

import attrs
import pytest
import torch
import torch.nn.functional as F

import forge_plugins_interp as interp
from forge_core.config.builder import ComponentBuilder
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_interp import session as session_module
from forge_plugins_interp.sites import Sites


@pytest.fixture(scope="module")
def session(run):
    with interp.open(run) as opened:
        yield opened


TOKENS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_explicit_attention_is_that_of_the_kernel(session):
    with session.observe("blocks.*.*") as seen:
        session.model(TOKENS)
    for layer in ("blocks.0", "blocks.1"):
        q, k, z = (seen[f"{layer}.{name}"] for name in ("q_rot", "k_rot", "z"))
        v = seen[f"{layer}.v"].unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, dim=1)
        raw = q @ k.repeat_interleave(2, dim=1).mT
        assert torch.allclose(seen[f"{layer}.attn_scores_raw"], raw, atol=1e-5)
        assert torch.allclose(seen[f"{layer}.attn_scores_scaled"], raw / 8**0.5, atol=1e-5)
        pattern = seen[f"{layer}.attn_pattern"]
        assert torch.allclose(pattern.sum(-1), torch.ones(()), atol=1e-5)
        assert (pattern.triu(1) == 0).all()
        assert torch.allclose(pattern @ v, z, atol=1e-5)
        heads = seen[f"{layer}.attn_head_out"]
        assert torch.allclose(heads.sum(2), seen[f"{layer}.attn_out"], atol=1e-5)


@torch.no_grad()
def test_a_query_that_sees_no_key_has_zeros():
    from forge_plugins_dense.attention import AttentionCore
    from forge_plugins_dense.attention_sites import pattern

    q = torch.randn(1, 2, 3, 4)
    mask = torch.tensor([[False, False, False], [True, False, False], [True, True, False]])

    found = pattern(AttentionCore("auto"), q, q, q, mask[None, None], False)

    assert not found.isnan().any()
    assert torch.allclose(found.sum(-1), torch.tensor([0.0, 1, 1]).expand(1, 2, 3))
    assert (found[..., 0, :] == 0).all()


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (torch.zeros(3, 3), "a tensor of torch.float32"),
        (frozenset(), "a frozenset"),
    ],
    ids=["additive", "of its own kind"],
)
def test_a_mask_that_cannot_be_read_is_a_sentence(session, mask, kind):
    """A kernel of another package takes masks of its own; the model still declares that its pattern is computed."""

    class TheirKernel(torch.nn.Module):
        softcap = None

        def forward(self, q, k, v, mask, causal, *_, **__):
            return v.repeat_interleave(2, 1)

    attention = session.built.parts[0].blocks["1"].attention
    ours, attention.core = attention.core, TheirKernel()
    attention.core.register_forward_pre_hook(lambda _, args: (*args[:3], mask, False))
    sites = Sites.of(session.built.parts, [], session.context.mesh, ComponentBuilder(discover()))
    again = attrs.evolve(session, sites=sites)
    message = (
        rf"site blocks.1.attn_pattern: the mask that .*TheirKernel is given cannot be read: it is {kind}, and must"
    )
    try:
        with torch.no_grad(), pytest.raises(ConfigError, match=message), again.observe("blocks.1.attn_pattern"):
            again.model(TOKENS)
        with torch.no_grad(), again.observe("blocks.1.z"):
            again.model(TOKENS)
    finally:
        attention.core = ours


@torch.no_grad()
@pytest.mark.parametrize("decides", [None, lambda batch, head, query, key: query >= key], ids=["by blocks", "causal"])
def test_blocks_of_a_mask_are_read_as_kernels_read_them(decides):
    """Those that are listed as full are seen whole, and ``mask_mod`` decides in those that are listed as partial."""
    from torch.nn.attention.flex_attention import BlockMask

    from forge_plugins_dense.attention import AttentionCore
    from forge_plugins_dense.attention_sites import pattern

    partial, full = [[0], [1, 0], [0, 2]], [[], [], [1]]
    listed = []
    for rows in (partial, full):
        listed.append(torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32))
        listed.append(torch.tensor([[[[*row, *(3 - len(row)) * [0]] for row in rows]]], dtype=torch.int32))
    mask = BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=4, mask_mod=decides, seq_lengths=(11, 11))
    q, k, v = torch.randn(3, 1, 2, 11, 4, generator=torch.Generator().manual_seed(0))

    seen = pattern(AttentionCore("auto"), q, k, v, mask, False)[0, 1] > 0

    for query in range(11):
        for key in range(11):
            is_partial, is_full = (key // 4 in rows[query // 4] for rows in (partial, full))
            expected = is_full or (is_partial and (decides is None or query >= key))
            assert bool(seen[query, key]) == expected, (query, key)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(session):
    document = torch.arange(12).div(5, rounding_mode="floor").expand(2, -1)
    with session.observe("blocks.*.attn_pattern") as seen:
        session.model(TOKENS, document=document)

    apart = document[0][:, None] != document[0][None]
    assert (seen["blocks.1.attn_pattern"][..., apart] == 0).all()


@torch.no_grad()
def test_a_change_of_some_tokens_is_made_where_they_are(session):
    wanted = [int(TOKENS[0, 3]), int(TOKENS[1, 7])]
    change = interp.Scale("blocks.0.z", factor=2.0, at={"head": 1}, tokens=wanted)
    with session.observe("blocks.0.z") as plain:
        session.model(TOKENS)
    with session.intervene(change), session.observe("blocks.0.attention.o.input") as seen:
        session.model(TOKENS)

    expected = plain["blocks.0.z"].clone()
    for sample, position in torch.isin(TOKENS, torch.tensor(wanted)).nonzero().tolist():
        expected[sample, 1, position] *= 2
    assert torch.equal(seen["blocks.0.attention.o.input"], expected.transpose(1, 2).flatten(2))
    assert not torch.equal(expected, plain["blocks.0.z"])


@torch.no_grad()
def test_a_change_of_some_steps_is_made_in_these_forwards(session):
    model = session.built.parts[0]
    with session.intervene(interp.Zero("blocks.0.attn_out", steps=[1])), session.observe("blocks.0.attn_out") as seen:
        cache = model.make_cache(2, 12)
        for token in TOKENS.split(4, dim=1):
            model(token, cache=cache)

    assert [bool((one == 0).all()) for one in seen.forwards["blocks.0.attn_out"]] == [False, True, False]


@torch.no_grad()
def test_the_identities_of_changes(session):
    plain = session.model(TOKENS)
    with session.observe("*", "blocks.*.*") as seen:
        assert torch.equal(session.model(TOKENS), plain)
    for name in ("blocks.*.resid_post", "blocks.*.z", "blocks.*.mlp_post", "embed"):
        with session.intervene(interp.Patch(name, source=seen)):
            assert torch.equal(session.model(TOKENS), plain)
    for name in ("blocks.*.attn_pattern", "blocks.*.attn_scores"):
        with session.intervene(interp.Patch(name, source=seen)):
            assert torch.allclose(session.model(TOKENS), plain, atol=1e-5)
    nothing = [interp.Zero("blocks.*.attn_out"), interp.Zero("blocks.*.mlp_out")]
    with session.intervene(*nothing), session.observe("final_norm") as bare:
        session.model(TOKENS)
    norm = session.built.parts[0].norm
    assert torch.allclose(bare["final_norm"], norm(seen["embed"]), atol=1e-6)


@torch.no_grad()
def test_changes_of_one_site_are_made_in_their_order(session):
    first, second = interp.Add("embed", value=torch.ones(32)), interp.Scale("embed", factor=2.0)
    with session.intervene(first, second), session.observe("embed") as seen:
        session.model(TOKENS)
    with session.observe("embed") as plain:
        session.model(TOKENS)

    assert torch.allclose(seen["embed"], 2 * (plain["embed"] + 1))


def test_gradients_are_those_of_autograd(session):
    with session.observe("blocks.0.resid_post", gradients=True) as seen:
        session.model(TOKENS)[0, -1, 3].backward()
    model = session.built.parts[0]
    kept = []
    handle = model.blocks["0"].register_forward_hook(lambda _, __, output: kept.append(output))
    logits = model(TOKENS)
    handle.remove()
    (expected,) = torch.autograd.grad(logits[0, -1, 3], kept[0])

    assert torch.allclose(seen.grad("blocks.0.resid_post"), expected, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_each_forward_has_gradients_of_its_own(session):
    """As autograd has them, which goes back from the last forward to the first."""
    given = [TOKENS, TOKENS.flip(1), TOKENS[:1]]
    with session.observe("blocks.0.resid_post", gradients=True) as seen:
        first, second, third = (session.model(tokens)[0, -1, 3] for tokens in given)
        (first + 10 * second).backward(retain_graph=True)
        second.backward()
    alone = []
    for tokens in given:
        with session.observe("blocks.0.resid_post", gradients=True) as one:
            session.model(tokens)[0, -1, 3].backward()
        alone.append(one.grad("blocks.0.hook_resid_post"))

    assert torch.allclose(seen.grad("blocks.0.resid_post", forward=0), alone[0], atol=1e-6)
    assert torch.allclose(seen.grad("blocks.0.resid_post", forward=-2), 11 * alone[1], atol=1e-5)
    assert third.requires_grad
    with pytest.raises(ConfigError, match="depends on its value in the last forward before"):
        seen.grad("blocks.0.resid_post")


@torch.no_grad()
def test_nothing_is_left_behind_by_an_error(session):
    plain = session.model(TOKENS)
    with pytest.raises(ConfigError), session.intervene(interp.Zero("*")), session.observe("blocks.*.*"):
        session.model(TOKENS.repeat(1, 20))  # longer than the model takes
    hooks = [m for m in session.built.parts[0].modules() if m._forward_hooks or m._forward_pre_hooks]

    assert hooks == []
    assert torch.equal(session.model(TOKENS), plain)


@torch.no_grad()
def test_several_forwards_are_kept_apart(session):
    with session.observe("logits", at={"position": -1}) as seen:
        logits = [session.model(TOKENS[:, :length]) for length in (5, 12)]

    assert [one.shape for one in seen.forwards["logits"]] == [(2, 1, 257)] * 2
    assert torch.equal(seen["logits"], logits[1][:, -1:])


@torch.no_grad()
def test_a_text_that_is_generated_with_a_cache_is_seen_and_changed(session):
    model = session.built.parts[0]
    cache = model.make_cache(2, 12)
    with session.observe("blocks.*.z", "blocks.*.attn_pattern") as seen:
        for token in TOKENS.split(4, dim=1):
            model(token, cache=cache)
    with session.observe("blocks.*.z") as whole:
        session.model(TOKENS)

    assert torch.allclose(torch.cat(seen.forwards["blocks.1.z"], 2), whole["blocks.1.z"], atol=1e-5)
    assert [one.shape for one in seen.forwards["blocks.1.attn_pattern"]] == [(2, 4, 4, 4 * n) for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("blocks.1.hook_resid_post", "blocks.1.resid_post"),
        ("blocks.*.attn.hook_pattern", "blocks.*.attn_pattern"),
        ("blocks.0.ln1.hook_out", "blocks.0.attn_in"),
        ("blocks.0.mlp.hook_in", "blocks.0.mlp_in"),
        ("ln_final.hook_out", "final_norm"),
        ("model.layers.1.self_attn", "blocks.1.attn_out"),
        ("model.layers.0", "blocks.0.resid_post"),
        ("lm_head", "logits"),
    ],
)
def test_names_of_other_projects_are_understood(session, name, canonical):
    assert session.sites.names(name) == session.sites.names(canonical)


@pytest.mark.parametrize(
    "name", ["blocks.0.ln1.hook_normalized", "blocks.0.ln2.hook_normalized", "ln_final.hook_normalized"]
)
def test_a_name_of_what_a_gain_multiplies_afterwards_is_none_of_ours(session, name):
    """What our norms give has it in it."""
    with pytest.raises(ConfigError, match="the model has none of that name"):
        session.sites.names(name)


@torch.no_grad()
def test_a_module_by_name_is_a_site(session):
    names = (
        "blocks.*.attention.o",
        "blocks.0.attention.o.input",
        "blocks.0.attention.q_norm",
        "blocks.0.attention.core",
    )
    with session.observe(*names) as seen, session.observe("blocks.*.attn_out", "blocks.0.z") as declared:
        session.model(TOKENS)

    for layer in ("blocks.0", "blocks.1"):
        assert torch.equal(seen[f"{layer}.attention.o"], declared[f"{layer}.attn_out"])
    assert torch.equal(seen["blocks.0.attention.o.input"], declared["blocks.0.z"].transpose(1, 2).flatten(2))
    assert torch.equal(seen["blocks.0.attention.core"], declared["blocks.0.z"])
    dims = {placed.name: placed.site.dims for placed in session.sites.chosen(names)}
    assert dims["blocks.1.attention.o"] == ("sample", "position", "features")
    assert dims["blocks.0.attention.q_norm"] == ("sample", "position", "dim_2", "dim_3")
    assert dims["blocks.0.attention.core"] == ("sample", "head", "position", "head_width")


@torch.no_grad()
def test_a_module_by_name_is_changed(session):
    at = {"position": [2, -1], "features": 3}
    with session.intervene(interp.Zero("blocks.0.attention.o", at=at)), session.observe("blocks.0.attn_out") as seen:
        session.model(TOKENS)
    with session.observe("blocks.0.attn_out") as plain:
        session.model(TOKENS)

    expected = plain["blocks.0.attn_out"].clone()
    expected[:, [2, -1], 3] = 0
    assert torch.equal(seen["blocks.0.attn_out"], expected)


def test_a_value_that_is_not_of_samples_and_positions_is_a_sentence(session):
    with torch.no_grad(), session.observe("blocks.0.attention.core.input"):
        session.model(TOKENS)  # the model declares it, as q_rot
    summed = torch.nn.Identity()
    session.built.parts[0].norm.add_module("summed", summed)
    handle = session.built.parts[0].norm.register_forward_hook(lambda _, __, output: (summed(output.sum(1)), output)[1])
    sites = Sites.of(session.built.parts, [], session.context.mesh, ComponentBuilder(discover()))
    again = attrs.evolve(session, sites=sites)
    try:
        for pattern in ("norm.summed", "norm.summed.input"):
            with (
                pytest.raises(ConfigError, match=rf"site {pattern}: .* samples and positions, 2 × 12 here, .* 2 × 32;"),
                again.observe(pattern),
            ):
                again.model(TOKENS)
    finally:
        handle.remove()
        del session.built.parts[0].norm._modules["summed"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("blocks.0.resid_pots", "site 'blocks.0.resid_pots': the model has none of that name; did you mean"),
        ("blocks.7.z", "the model has none of that name"),
        ("blocks.0.attention.cor", r"the model has none of that name; did you mean 'blocks.0.attention.core'\?"),
    ],
)
def test_a_site_that_is_not_there_is_a_sentence(session, pattern, message):
    with pytest.raises(ConfigError, match=message), session.observe(pattern):
        pass


def test_a_site_that_is_only_computed_cannot_be_changed(session):
    change = interp.Zero("blocks.0.attn_head_out")
    with pytest.raises(ConfigError, match="cannot be changed"), session.intervene(change):
        pass


def test_tokens_of_a_site_without_positions_are_a_sentence(session):
    change = interp.Zero("blocks.0.k_rot", tokens=[3])
    with (
        torch.no_grad(),
        pytest.raises(ConfigError, match=r"tokens: site blocks.0.k_rot has the dimensions .* and no positions"),
        session.intervene(change),
    ):
        session.model(TOKENS)


def test_softmax_of_the_scores_is_the_pattern(session):
    with torch.no_grad(), session.observe("blocks.0.attn_*") as seen:
        session.model(TOKENS)

    assert torch.allclose(F.softmax(seen["blocks.0.attn_scores"], -1), seen["blocks.0.attn_pattern"], atol=1e-6)
    assert seen["blocks.0.attn_scores"].isneginf().any()


@torch.no_grad()
def test_a_site_that_is_not_there_is_told_with_those_that_are(session):
    with session.observe("blocks.0.resid_post") as seen:
        with pytest.raises(ConfigError, match=r"site blocks.0.resid_post: .* observed are none, as no forward has run"):
            seen["blocks.0.resid_post"]
        session.model(TOKENS)
    with pytest.raises(ConfigError, match=r"site final_norm: it is not observed; the sites observed are blocks.0"):
        seen["final_norm"]
    assert "final_norm" not in seen
    with pytest.raises(
        ConfigError, match=r"site blocks.9.resid_post: another .* has it, that of rank 3 along pp; read"
    ):
        session_module.Seen({"blocks.9.resid_post": 3})["blocks.9.resid_post"]
