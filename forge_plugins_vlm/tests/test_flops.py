"""FLOPs of encoders, connectors and layers that look at images, by the tiles that batches really have."""

from __future__ import annotations

import pytest
import torch
from small_vlm import entries, images
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

BATCHES = {
    "one tile a row": {"pixels": images(3, 1)},
    "several tiles": {"pixels": images(3, 5)},
    "text alone": {},
    "tiles of another size": {"pixels": torch.zeros(3, 2, 3, 24, 32, dtype=torch.uint8)},
}
ENCODER = {"name": "forge-plugins-vlm:conv_vit", "size": [16, 16], "patch": 8, "dim": 16, "n_layers": 1, "n_heads": 2}


def batch(pixels):
    given = entries("joint_decoder", "tt" * 6)
    return {
        "tokens": torch.zeros(3, 12, dtype=torch.int64),
        **{k: v.expand(3, 12, *v.shape[2:]) for k, v in given.items()},
        **pixels,
    }


def counted(module, model, given):
    """FLOPs of a module's forward, as torch counts them."""
    model.requires_grad_(False)  # torch's tracker of modules follows gradients, where there are some
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the others' attention torch does not count on a CPU
        model(**given)
    found = counter.get_flop_counts()
    return sum(next(of for name, of in found.items() if name.endswith(module)).values())


CONNECTORS = {
    "linear": {"name": "linear"},
    "mlp": {"name": "mlp", "n_layers": 3},
    "mlp of a width of its own": {"name": "mlp", "hidden_dim": 40},
    "fused_mlp": {"name": "fused_mlp"},
    "average_pool": {"name": "average_pool"},
    "average_pool of a width of its own": {"name": "average_pool", "hidden_dim": 40},
    "attention_pool": {"name": "attention_pool", "n_heads": 2},
    "attention_pool at edges": {"name": "attention_pool", "n_heads": 2, "window": 3},
    "pixel_shuffle": {"name": "pixel_shuffle", "n_layers": 2, "hidden_dim": 40},
    "resampler": {"name": "resampler", "n_tokens": 5, "n_heads": 2, "depth": 3},
}


def flops_of_images(model, given):
    """What a model says of a batch, beyond what it says of its tokens as text."""
    said = model.flops_beside(given) / len(given["tokens"])
    usual = model.flops_of("vision") + sum(map(model._usual_flops_of_images, range(model.config.n_layers)))
    return len(given["tokens"]) * (said + given["tokens"].shape[1] * usual)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_flops_are_those_that_torch_counts_of_the_tiles_of_a_batch(make_model, name, connector):
    keys = {"encoder": {**ENCODER, "any_size": True}, "freeze_encoder": True, "connector": CONNECTORS[connector]}
    if connector == "pixel_shuffle" and name == "tiles of another size":
        pytest.skip("it takes no 3 × 4 features")
    model, given = make_model(**keys), batch(BATCHES[name])
    model.set_frozen({name for name, _ in model.named_parameters() if name.startswith("vision.")})

    expected = counted("vision", model, {**given, "image_slots": torch.full_like(given["image_slots"], -1)})

    assert flops_of_images(model, given) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("place", "heads"),
    [
        ("insert", {}),
        ("insert", {"n_heads": 8, "n_kv_heads": 4}),
        ("replace", {}),
        ("replace", {"n_kv_heads": 2}),
    ],
)
@pytest.mark.parametrize("name", BATCHES)
def test_layers_that_look_at_images_count_keys_values_and_attention(make_model, name, place, heads):
    fusion = {"name": "cross_attention", "layers": [0, 1], "place": place, **heads}
    keys = {"encoder": {**ENCODER, "any_size": True}, "freeze_encoder": True, "n_kv_heads": 1, "newline": True}
    model, given = make_model(fusion=fusion, **keys), batch(BATCHES[name])
    model.set_frozen({name for name, _ in model.named_parameters() if name.startswith("vision.")})
    looking = ["blocks.0.looking.attention", "blocks.1.looking.attention"] if place == "insert" else [
        "blocks.0.attention", "blocks.1.attention"]  # fmt: skip

    found = sum(counted(module, model, given) for module in looking)
    of_text = sum(
        2.0 * model.get_submodule(f"{module}.{one}").weight.numel() * 36 for module in looking for one in "qo"
    )

    expected = counted("vision", model, given) + 3 * (found - of_text)
    assert flops_of_images(model, given) == pytest.approx(expected, rel=1e-6)


def test_flops_of_several_sizes_are_those_that_torch_counts(make_model):
    sizes = [(16, 16), (24, 32)]
    model = make_model(encoder={**ENCODER, "any_size": True}, freeze_encoder=True, encoded_sizes=sizes)
    given = batch(BATCHES["tiles of another size"]) | {"pixels_sizes": torch.tensor([(16, 16), (24, 32), (0, 0)])}
    model.set_frozen({name for name, _ in model.named_parameters() if name.startswith("vision.")})

    assert flops_of_images(model, given) == pytest.approx(counted("vision", model, given), rel=1e-6)


def test_a_backward_is_counted_where_encoder_and_connector_are_trained(make_model):
    given, model = batch(BATCHES["several tiles"]), make_model()
    names = [name for name, _ in model.named_parameters()]
    encoder, connector = (counted(f"vision.{part}", make_model(), given) for part in ("encoder", "connector"))

    def said(*frozen):
        model.set_frozen({name for name in names if name.startswith(frozen)})
        return flops_of_images(model, given)

    assert said("none") == pytest.approx(3 * (encoder + connector))
    assert said("vision.encoder.") == pytest.approx(encoder + 3 * connector)
    assert said("vision.") == pytest.approx(encoder + connector)
    assert said("none") == pytest.approx(3 * (encoder + connector))


def mlp(hidden_dim):
    """A layer, and the weights of it by which a token is multiplied."""
    return {"name": "mlp", "hidden_dim": hidden_dim}, 3 * 16 * hidden_dim


def experts(n_experts, hidden_dim, top_k):
    router = {"name": "softmax_topk", "top_k": top_k, "balance": 0.01}
    layer = {"name": "moe", "n_experts": n_experts, "hidden_dim": hidden_dim, "router": router}
    return layer, 16 * n_experts + top_k * 3 * 16 * hidden_dim


MODALITIES = {
    "mixture_of_transformers": (mlp(24), None),
    "mixture_of_transformers of experts": (experts(4, 8, 2), None),
    "moma of equal layers": (mlp(24), mlp(24)),
    "moma with wider images": (mlp(24), mlp(80)),
    "moma with narrower images": (mlp(80), mlp(24)),
    "moma with experts of images": (mlp(24), experts(8, 8, 3)),
    "moma with experts of both": (experts(4, 8, 2), experts(8, 12, 2)),
}
"""Fusions, with the feed-forward layers of text and of images."""


def by_modality(make_model, name):
    """A model, and the weights of a token of text and of an image in a layer: those of attention, 4 · 16², too."""
    text, image = MODALITIES[name]
    fusion = {"name": name.partition(" ")[0]} | ({} if image is None else {"image": image[0]})
    return make_model(fusion=fusion, feed_forward=text[0]), 1024 + text[1], 1024 + (image or text)[1]


@pytest.mark.parametrize("layout", ["tItttIt", "tttt", "I"])
@pytest.mark.parametrize("name", MODALITIES)
def test_each_token_counts_by_the_weights_of_its_modality(make_model, name, layout):
    model, text, image = by_modality(make_model, name)
    tiles = layout.count("I")
    given = entries("moma", layout) | ({"pixels": images(1, tiles)} if tiles else {})
    length = given["image_slots"].shape[1]
    given["tokens"] = torch.zeros(1, length, dtype=torch.int64)
    of_vision = counted("vision", model, given)

    said = length * model.flops_per_token(length) + model.flops_beside(given)

    of_blocks = 4 * tiles * image + (length - 4 * tiles) * text + 2 * length**2 * 16
    assert said == pytest.approx(6.0 * (2 * of_blocks + length * model.head.weight.numel()) + 3 * of_vision)


def test_weights_of_a_modality_are_those_that_torch_multiplies_by(make_model):
    """Both layers look at all positions, and one product of each is kept."""
    model, text, image = by_modality(make_model, "moma with wider images")
    given = batch({})

    of_text, of_image = (counted(f"blocks.1.{name}", model, given) for name in ("feed_forward", "image_feed_forward"))

    assert (of_text, of_image) == (2 * 36 * (text - 1024), 2 * 36 * (image - 1024))


def test_a_stage_of_a_pipeline_costs_what_a_tile_in_each_sequence_does(make_model):
    model, text, image = by_modality(make_model, "moma with wider images")
    of_weights = 6.0 * (4 * image + 60 * text) / 64

    assert model.max_seq_len == 64
    assert model.flops_of("blocks.1") == pytest.approx(of_weights + 12 * 64 * 16)


def test_layers_of_other_stages_are_counted_where_the_images_are(make_model):
    model, *_ = by_modality(make_model, "moma with wider images")
    given = {"tokens": torch.zeros(1, 4, dtype=torch.int64), "pixels": images(1, 1), **entries("moma", "I")}
    whole = model.flops_beside(given)
    del model.blocks["1"]

    assert model.flops_beside(given) == whole


@pytest.mark.parametrize("fusion", ["joint_decoder", "cross_attention", "mixture_of_transformers", "moma"])
def test_what_is_said_of_a_token_is_the_sum_of_all_parts(make_model, fusion):
    model = make_model(fusion)
    parts = ["embed", "vision", *(f"blocks.{layer}" for layer in model.blocks)]

    whole = sum(map(model.flops_of, parts)) + 6.0 * model.head.weight.numel()

    assert model.flops_per_token(model.max_seq_len) == pytest.approx(whole)


def test_what_no_batch_changes_is_reckoned_once(make_model, monkeypatch):
    """Of an encoder from a folder, each layer would ask for it with each microbatch."""
    model, given = make_model("cross_attention"), batch(BATCHES["several tiles"])
    first = model.flops_beside(given)
    monkeypatch.delattr(type(model), "_usual_flops_of_images")

    assert model.flops_beside(given) == first


def test_a_stage_without_the_encoder_counts_nothing(make_model):
    model = make_model()
    model.vision = None

    assert model.flops_beside(batch({})) == 0
