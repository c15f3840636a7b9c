"""The model ``vision_language`` with each fusion, against the dense decoder and against itself."""

from __future__ import annotations

import pytest
import torch
from small_vlm import FUSIONS, SMALL, entries, images

from forge_core.errors import ConfigError, PluginError
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.attention_sites import pattern
from forge_plugins_vlm.fusions import cross_attention
from forge_plugins_vlm.visibility import visible_tokens

ALL = pytest.mark.parametrize("fusion", FUSIONS)
DECODER = {"dim": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 64}


def tokens(length: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 31, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch(fusion: str, layout: str, seed: int = 0) -> dict[str, torch.Tensor]:
    given = entries(fusion, layout)
    return {"tokens": tokens(given["image_slots"].shape[1]), "pixels": images(1, layout.count("I"), seed), **given}


def take_over(model, other):
    """Give a model the tensors of another one that have names of its own."""
    own = model.state_dict()
    model.load_state_dict({**own, **{name: one for name, one in other.state_dict().items() if name in own}})


@torch.no_grad()
@pytest.mark.parametrize("fusion", ["joint_decoder", "cross_attention", "mixture_of_transformers"])
def test_text_alone_is_the_decoders_bit_for_bit(make_model, fusion):
    text, model = make_model(name="transformer", **DECODER).eval(), make_model(fusion).eval()
    take_over(model, text)

    assert torch.equal(model(tokens(12, 3)), text(tokens(12, 3)))


@torch.no_grad()
def test_closed_gates_leave_the_decoder_bit_identical(make_model):
    text, model = make_model(name="transformer", **DECODER).eval(), make_model("cross_attention").eval()
    take_over(model, text)
    given = batch("cross_attention", "tItt")
    assert not torch.equal(model(**given), text(given["tokens"]))

    for gate in (one for name, one in model.named_parameters() if name.endswith("_gate.weight")):
        gate.zero_()

    assert torch.equal(model(**given), text(given["tokens"]))


@pytest.mark.parametrize("place", ["insert", "replace"])
def test_layers_without_gates_begin_as_nothing_and_learn(make_model, place):
    fusion = {"name": "cross_attention", "layers": [1], "place": place, "gated": False}
    model, given = make_model(fusion=fusion), batch("cross_attention", "tItt")
    looking = model.blocks["1"].looking if place == "insert" else model.blocks["1"]
    entered = []
    looking.register_forward_hook(lambda _, inputs, output: entered.append((inputs[0], output)))

    model(**given).logsumexp(-1).sum().backward()

    ((before, after),) = entered
    assert torch.equal(before, after)
    assert not any(name.endswith("_gate.weight") for name, _ in model.named_parameters())
    assert looking.attention.o.weight.grad.any()
    assert set(looking.parameter_roles()) == {name for name, _ in looking.named_parameters()}


@torch.no_grad()
def test_equal_weights_for_both_modalities_are_the_joint_decoder(make_model):
    joint, model = make_model("joint_decoder").eval(), make_model("mixture_of_transformers").eval()
    take_over(model, joint)
    for block in model.blocks.values():
        take_over(block.image, block)
    given = batch("joint_decoder", "tIttIt")

    assert torch.allclose(model(**given), joint(**given), atol=1e-6)


@torch.no_grad()
def test_equal_feed_forward_layers_are_the_joint_decoder(make_model):
    joint, model = make_model("joint_decoder").eval(), make_model(fusion={"name": "moma"}).eval()
    take_over(model, joint)
    for block in model.blocks.values():
        take_over(block.image_feed_forward, block.feed_forward)
    given = batch("joint_decoder", "tIttIt")

    assert torch.allclose(model(**given), joint(**given), atol=1e-6)


@ALL
@torch.no_grad()
def test_an_image_changes_what_follows_it_and_nothing_before(make_model, fusion):
    model, given = make_model(fusion).eval(), batch(fusion, "ttIttItt")
    before = model(**given)
    given["pixels"][:, 1] = images(1, seed=9)[:, 0]
    after = model(**given)

    second = 5 if fusion == "cross_attention" else 8
    assert torch.equal(before[:, :second], after[:, :second])
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-4)


@ALL
@torch.no_grad()
def test_a_token_changes_nothing_before_it_nor_another_row(make_model, fusion):
    model = make_model(fusion).eval()
    one, other = batch(fusion, "ttIttt"), batch(fusion, "ttIttt", seed=3)
    both = {name: torch.cat((one[name], other[name])) for name in one}
    before = model(**both)
    changed = both["tokens"].clone()
    changed[0, -2] = (changed[0, -2] + 1) % 31
    after = model(**{**both, "tokens": changed})

    assert torch.equal(before[0, :-2], after[0, :-2])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, -2], after[0, -2])


@ALL
@torch.no_grad()
def test_no_fusion_needs_as_many_heads_of_keys_or_of_the_encoder_as_of_queries(make_model, fusion):
    """8, 4 and 2 heads are the same as 8 of queries and of keys, where each key and value is there twice."""
    heads = {"n_heads": 8, "encoder": {**SMALL["encoder"], "n_heads": 2}}
    grouped, equal = make_model(fusion, **heads, n_kv_heads=4).eval(), make_model(fusion, **heads).eval()
    own, given = equal.state_dict(), batch(fusion, "tItIIt")
    other = {name: one.clone() for name, one in grouped.state_dict().items()}
    for name in (fewer := [name for name, one in other.items() if one.shape != own[name].shape]):
        other[name] = other[name].unflatten(0, (4, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
    assert {name.rsplit(".", 2)[-2] for name in fewer} == {"k", "v"}

    equal.load_state_dict(other)

    assert torch.allclose(grouped(**given), equal(**given), atol=1e-5)


@ALL
@torch.no_grad()
def test_packed_documents_equal_those_by_themselves(make_model, fusion):
    model = make_model(fusion).eval()
    packed = batch(fusion, "tItt|ItIIt|tt")
    whole = model(**packed)

    start = tile = 0
    for layout in ("tItt", "ItIIt", "tt"):
        alone, n_images = entries(fusion, layout), layout.count("I")
        length = alone["image_slots"].shape[1]
        pixels = {"pixels": packed["pixels"][:, tile : tile + n_images]} if n_images else {}
        logits = model(packed["tokens"][:, start : start + length], **alone, **pixels)
        assert torch.allclose(whole[:, start : start + length], logits, atol=1e-5)
        start, tile = start + length, tile + n_images


@ALL
@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_whole_and_looks_once(make_model, fusion):
    model, given = make_model(fusion).eval(), batch(fusion, "tIttt")
    whole = model(**given)
    looked = []
    model.vision.register_forward_hook(lambda *_: looked.append(1))
    prompt = given["tokens"].shape[1] - 2
    cache = model.make_cache(1, prompt + 2)
    cut = {name: one if name == "pixels" else one[:, :prompt] for name, one in given.items()}
    first = model(**cut, cache=cache)
    rest = [model(given["tokens"][:, place : place + 1], cache=cache) for place in (prompt, prompt + 1)]

    assert torch.allclose(torch.cat((first, *rest), dim=1), whole, atol=1e-5)
    assert len(looked) == 1


@torch.no_grad()
def test_text_that_goes_on_has_one_mask_of_images_until_it_is_told_of_others(make_model, monkeypatch):
    """Two positions see the first image; two, one by one, are told that they see the second; text goes on."""
    model, given, made = make_model("cross_attention").eval(), batch("cross_attention", "ItItttt"), []
    monkeypatch.setattr(cross_attention, "visible_tokens", lambda *a, **k: made.append(1) or visible_tokens(*a, **k))
    whole, n_made = model(**given), []
    cache, logits = model.make_cache(1, 7), []
    for start, end in [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]:
        names = ["tokens"] if start >= 4 else ["tokens", "image_slots", "image_range"]
        told = {name: given[name][:, start:end] for name in names}
        logits.append(model(**told, **({} if start else {"pixels": given["pixels"]}), cache=cache))
        n_made.append(len(made))

    assert torch.allclose(torch.cat(logits, dim=1), whole, atol=1e-5)
    assert n_made == [2, 3, 4, 5, 5, 5]  # one for the whole


@torch.no_grad()
@pytest.mark.parametrize(("attend", "changes"), [("latest", False), ("all_previous", True)])
def test_text_sees_the_latest_images_or_all_before_it(make_model, attend, changes):
    fusion = {"name": "cross_attention", "layers": [1], "place": "replace", "attend": attend}
    model, given = make_model(fusion=fusion).eval(), batch("cross_attention", "ItIIt")
    before = model(**given)[:, -1]
    given["pixels"][:, 0] = images(1, seed=9)[:, 0]
    of_first = model(**given)[:, -1]
    given["pixels"][:, 1] = images(1, seed=10)[:, 0]

    assert torch.equal(before, of_first) != changes
    assert not torch.equal(of_first, model(**given)[:, -1])  # consecutive images share the text after them


@torch.no_grad()
@pytest.mark.parametrize("heads", [(8, 2), (4, 1), (2, 2)])
def test_heads_that_look_at_images_are_those_of_llama_in_any_number(make_model, heads):
    pytest.importorskip("transformers")
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig
    from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention

    n_heads, n_kv_heads = heads
    fusion = {"name": "cross_attention", "layers": [1], "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    fusion |= {"norm_images": False}
    ours = make_model(fusion=fusion).blocks["1"].looking.attention
    sizes = {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "num_hidden_layers": 1}
    config = MllamaTextConfig(hidden_size=16, cross_attention_layers=[0], **sizes)
    config._attn_implementation = "eager"
    theirs = MllamaTextCrossAttention(config, layer_idx=0)
    for name in ("q", "k", "v", "o"):
        getattr(theirs, f"{name}_proj").load_state_dict(getattr(ours, name).state_dict())
    for name in ("q_norm", "k_norm"):
        getattr(ours, name).weight.normal_()
        getattr(theirs, name).load_state_dict(getattr(ours, name).state_dict())
    text, tiles = torch.randn(1, 3, 16), torch.randn(1, 4, 16)
    range_of_all = torch.tensor([[[0, 0, 1]]]).expand(1, 3, 3)
    facts = {"image_range": range_of_all, "image_tile": torch.zeros(4, dtype=torch.int64), "image_tokens": tiles}

    nothing = torch.empty(0)

    torch.testing.assert_close(ours(text, BlockInputs(nothing, nothing, facts=facts)), theirs(text, tiles)[0])


@torch.no_grad()
def test_text_before_any_image_gets_nothing_from_layers_that_look(make_model):
    model, given = make_model("cross_attention").eval(), batch("cross_attention", "ttItt")
    text = {"tokens": given["tokens"]}

    assert torch.equal(model(**given)[:, :2], model(**text)[:, :2])
    assert not torch.allclose(model(**given)[:, 2:], model(**text)[:, 2:], atol=1e-4)


@torch.no_grad()
def test_a_scaled_gate_is_further_open(make_model):
    model, given = make_model("cross_attention").eval(), batch("cross_attention", "tItt")
    scaled = make_model(fusion={"name": "cross_attention", "layers": [1], "gate_scale": 10.0}).eval()
    for name, gate in scaled.named_parameters():
        if name.endswith("_gate.weight"):
            gate.fill_(model.get_parameter(name).item() / 10)

    assert torch.allclose(scaled(**given), model(**given), atol=1e-6)


def test_layers_in_place_of_others_have_no_attention_over_text(make_model):
    fusion = {"name": "cross_attention", "layers": [1], "place": "replace"}
    model = make_model(fusion=fusion)

    assert list(model.context_plan()) == ["blocks.0.attention.core"]
    logits = model(**batch("cross_attention", "tItt"))
    assert logits.shape == (1, 4, 31)


def test_an_encoder_that_is_not_trained_keeps_nothing_and_stays_in_evaluation_mode(make_model):
    model = make_model(freeze_encoder=True).train()
    features = []
    model.vision.encoder.register_forward_hook(lambda *given: features.append(given[-1]))

    model(**batch("joint_decoder", "tItt")).sum().backward()

    assert not model.vision.encoder.training
    assert not features[0].requires_grad
    assert all(one.grad is None for one in model.vision.encoder.parameters())
    assert all(one.grad is not None for one in model.vision.connector.parameters())


def test_a_learned_token_ends_rows_of_tiles(make_model):
    model, given = make_model(newline=True), batch("joint_decoder", "tItt")
    given["image_slots"][0, 2] = -2
    model(**given).sum().backward()

    assert model.vision.newline.grad.abs().sum() > 0
    plain = make_model()
    with torch.no_grad():
        take_over(plain, model)
    with pytest.raises(RuntimeError):
        plain(**{**given, "image_slots": given["image_slots"].masked_fill(given["image_slots"] == 3, 4)})


def test_a_connector_that_gives_another_number_of_tokens_is_refused(make_model, monkeypatch):
    model = make_model()
    monkeypatch.setattr(type(model.vision.connector), "forward", lambda self, features, grid: features[:, 1:])

    with pytest.raises(PluginError, match="gives 3 tokens for a tile, and its config says 4"):
        model(**batch("joint_decoder", "tItt"))


@torch.no_grad()
def test_tokens_of_an_image_see_each_other_and_text_what_is_before_it(make_model):
    model = make_model(fusion={"name": "joint_decoder", "bidirectional": True}).eval()
    given = batch("joint_decoder", "tIt|tIt")
    given["pixels"] = images(1, 2)
    before = model(**given)
    other = given["image_slots"].clone()
    other[0, 4] = 0  # the last token of the first image, at position 4, becomes another one
    after = model(**{**given, "image_slots": other})

    changed = [place for place in range(12) if not torch.equal(before[0, place], after[0, place])]
    assert changed == [1, 2, 3, 4, 5]


@torch.no_grad()
def test_a_cache_gives_the_logits_of_a_bidirectional_whole(make_model):
    model = make_model(fusion={"name": "joint_decoder", "bidirectional": True}).eval()
    given = batch("joint_decoder", "tIttt")
    whole = model(**given)
    cache = model.make_cache(1, 8)
    first = model(**{name: one if name == "pixels" else one[:, :6] for name, one in given.items()}, cache=cache)
    rest = [model(given["tokens"][:, place : place + 1], cache=cache) for place in (6, 7)]

    assert torch.allclose(torch.cat((first, *rest), dim=1), whole, atol=1e-5)


@torch.no_grad()
def test_the_pattern_of_attention_to_images_is_over_those_that_are_seen(make_model):
    model, given = make_model("cross_attention").eval(), batch("cross_attention", "tItIt")
    site = model.sites()["blocks.1.looking.attn_pattern"]
    read = []
    model.get_submodule(site.module).register_forward_hook(lambda core, args, _: read.append(pattern(core, *args)))
    model(**given)

    assert site.dims == ("sample", "head", "position", "image_token")
    weights = read[0]  # (1, 2, 5, 8): an image has four tokens
    assert torch.allclose(weights[:, :, 1:].sum(-1), torch.ones(()))
    assert (weights[:, :, 1:3, 4:] == 0).all()
    assert (weights[:, :, 3:, :4] == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("fusion", ["mixture_of_transformers", "moma"])
def test_what_each_modality_computes_is_a_site_of_its_own(make_model, fusion):
    model, given = make_model(fusion, init_std=0.3).eval(), batch(fusion, "tItI")
    sites = model.sites()
    halves = sorted(name.removeprefix("blocks.0.text.") for name in sites if name.startswith("blocks.0.text."))
    seen = {}

    def keep(name):
        site = sites[name]
        module = model.get_submodule(site.module)
        if site.where == "output":
            module.register_forward_hook(lambda _, args, output: seen.setdefault(name, []).append(output))
        else:
            module.register_forward_pre_hook(lambda _, args: seen.setdefault(name, []).append(args[site.argument]))

    of_block = [name for name, site in sites.items() if name.startswith("blocks.0.") and not site.compute]
    for name in of_block:
        keep(name)
    model(**given)

    assert halves == sorted(
        name.removeprefix("blocks.0.image.") for name in sites if name.startswith("blocks.0.image.")
    )
    of_both = {"mlp_out"} if fusion == "moma" else {"mlp_out", "mlp_in", "mlp_post", "attn_out", "q", "attn_head_out"}
    assert of_both <= set(halves)
    modules = [[sites[f"blocks.0.{half}.{name}"].module for name in halves] for half in ("text", "image")]
    assert all(one != other for one, other in zip(*modules, strict=True))
    assert all(len(seen[name]) == 1 for name in of_block), seen.keys() ^ set(of_block)
    is_image = given["image_slots"][0] != -1
    text, image = (seen[f"blocks.0.{half}.mlp_out"][0][0] for half in ("text", "image"))
    assert (text[is_image] == 0).all()
    assert (image[~is_image] == 0).all()
    assert (text[~is_image] != 0).any()
    added = seen["blocks.0.resid_post"][0] - seen["blocks.0.resid_mid"][0]
    assert torch.allclose(added, text + image, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("fusion", "text", "image"),
    [
        ("mixture_of_transformers", part, f"image.{part}")
        for part in ("attention.q", "attention.o", "attention_norm", "feed_forward", "feed_forward_norm")
    ]
    + [("moma", "feed_forward.experts", "image_feed_forward.experts")],
)
def test_each_modality_is_computed_by_its_own_weights(make_model, fusion, text, image):
    model = make_model(fusion, init_std=0.3).eval()
    block, read = model.blocks["0"], []
    given = batch(fusion, "It"), batch(fusion, "tI")  # each begins with positions that see their own modality alone

    block.register_forward_hook(lambda *args: read.append(args[-1]))

    def computed():
        read.clear()
        for own in given:
            model(**own)
        return read[0][:, :4], read[1][:, :1]

    before = computed()
    for changed, part in enumerate((image, text)):
        for one in block.get_submodule(part).parameters():
            one.add_(torch.rand(one.shape, generator=torch.Generator().manual_seed(changed)))
        after = computed()
        if part != "attention.q":  # a position that sees itself alone reads the same by any query
            assert not torch.allclose(before[changed], after[changed], atol=1e-3)
        assert torch.equal(before[1 - changed], after[1 - changed])
        before = after


def test_a_vocabulary_keeps_tokens_that_can_be_predicted(make_model):
    with pytest.raises(ConfigError, match=r"model\.input_tokens: must be less than the 31 tokens of the vocabulary"):
        make_model(input_tokens=31)


def test_a_target_that_is_no_token_to_predict_is_told_with_the_key(make_model, build):
    model, tokens = make_model(input_tokens=4), torch.full((1, 8), 30)
    loss = build(build.resolve("loss", {"name": "cross_entropy"}))

    with pytest.raises(ConfigError, match=r"model\.input_tokens: .* among the last 4 tokens \(Target 30"):
        model(tokens, tokens, loss)
