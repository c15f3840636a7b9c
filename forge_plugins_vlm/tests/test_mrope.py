"""Positions in time, rows and columns, against Qwen2-VL of transformers."""

from __future__ import annotations

import pytest
import torch
from small_vlm import entries, images
from torch.utils._python_dispatch import TorchDispatchMode

from forge_plugins_vlm.mrope import image_axes

FUSION = {"name": "joint_decoder", "mrope_sections": [2, 1, 1]}


def axes_of(layout, grid=(2, 2)):
    given = entries("joint_decoder", layout)
    slots = given["image_slots"]
    positions = given.get("positions", torch.arange(slots.shape[1])[None])
    return image_axes(slots, positions, torch.tensor([grid]), slots.new_zeros((1, 1)))[0][0]


def test_text_has_its_position_and_an_image_its_rows_and_columns():
    found = axes_of("ttItIIt").tolist()

    first = [[2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3]]
    second = [[5, 5, 5], [5, 5, 6], [5, 6, 5], [5, 6, 6]]
    third = [[7, 7, 7], [7, 7, 8], [7, 8, 7], [7, 8, 8]]
    assert found == [[0, 0, 0], [1, 1, 1], *first, [4, 4, 4], *second, *third, [9, 9, 9]]


def test_each_packed_document_begins_anew():
    assert torch.equal(axes_of("tIt|ItIt"), torch.cat((axes_of("tIt"), axes_of("ItIt"))))


def test_the_positions_are_those_of_qwen2_vl():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    config = Qwen2VLConfig(vision_config={"spatial_merge_size": 2, "depth": 1, "embed_dim": 8, "num_heads": 1})
    with torch.device("meta"):
        model = Qwen2VLModel(config)
    slots = entries("joint_decoder", "ttItIttI")["image_slots"]
    ids = torch.where(slots >= 0, config.image_token_id, 5)
    grids = torch.tensor([[1, 4, 4]] * 3)  # patches, of which 2 × 2 become a token

    kinds = (slots >= 0).int()
    expected, _ = model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)

    assert torch.equal(axes_of("ttItIttI"), expected[:, 0].T)


def test_each_pair_of_features_has_its_axis_without_a_copy_from_the_host(make_model):
    model, axes, made = make_model(fusion=FUSION), torch.arange(30).view(2, 5, 3), []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    with Operations():
        found = model.rotary_positions(torch.zeros(2, 5), {"image_axes": axes}, 4)

    assert torch.equal(found, axes[..., [0, 0, 1, 2]])
    assert "arange" in made
    assert not {"lift_fresh", "lift_fresh_copy", "repeat_interleave"} & {*made}


@torch.no_grad()
def test_a_cache_goes_on_where_images_have_ended(make_model):
    model = make_model(fusion=FUSION).eval()
    given = entries("joint_decoder", "tIttIttt")
    tokens = torch.arange(14)[None]
    pixels = images(1, 2)
    whole = model(tokens, pixels=pixels, **given)
    for cut in (6, 12):
        cache = model.make_cache(1, 14)
        first = model(
            tokens[:, :cut], pixels=pixels, cache=cache, **{name: one[:, :cut] for name, one in given.items()}
        )
        rest = {name: one[:, cut:] for name, one in given.items()} if cut == 6 else {}
        second = model(tokens[:, cut:], cache=cache, **rest)
        assert torch.allclose(torch.cat((first, second), dim=1), whole, atol=1e-5)


@torch.no_grad()
def test_rows_and_columns_make_a_difference_and_text_alone_none(make_model):
    model, plain = make_model(fusion=FUSION).eval(), make_model().eval()
    given = entries("joint_decoder", "tItt")
    tokens, text = torch.arange(7)[None], torch.arange(9)[None]

    assert torch.equal(model(text), plain(text))
    mixed = [one(tokens, pixels=images(1), **given) for one in (model, plain)]
    assert torch.allclose(mixed[0][:, :2], mixed[1][:, :2], atol=1e-6)
    assert not torch.equal(mixed[0][:, -1], mixed[1][:, -1])


@torch.no_grad()
def test_left_padding_changes_no_axis(make_model):
    from forge_plugins_inference.generation import generate

    model = make_model(fusion=FUSION)
    one = entries("joint_decoder", "tIt")
    alone = generate(model, [[1, 2, 2, 2, 2, 3]], max_new_tokens=3, temperature=0, inputs={**one, "pixels": images(1)})
    padded = {
        "image_slots": torch.cat((torch.full((1, 2), -1), one["image_slots"]), 1).repeat(2, 1),
        "image_range": torch.cat((torch.zeros(1, 2, 3, dtype=torch.int64), one["image_range"]), 1).repeat(2, 1, 1),
        "pixels": images(1).repeat(2, 1, 1, 1, 1),
    }
    padded["image_slots"][1] = -1
    both = generate(model, [[1, 2, 2, 2, 2, 3], [4] * 8], max_new_tokens=3, temperature=0, inputs=padded)
    assert both[0] == alone[0]


@pytest.mark.parametrize("sections", [[2, 2, 1], [4, 1, 1]])
def test_sections_are_all_pairs_of_a_head(sections):
    from pathlib import Path

    from forge_core.errors import ConfigError
    from forge_core.job import load_job
    from forge_core.registry.discovery import discover

    config = Path(__file__).parents[2] / "configs/vlm/joint_decoder.toml"
    with pytest.raises(ConfigError, match="pairs of features, and layer 0 rotates 8 pairs a head"):
        load_job(config, [f"model.fusion.mrope_sections={sections}"], catalog=lambda *_: discover(), world_size=1)
