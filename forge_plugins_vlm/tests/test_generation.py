"""Text is generated after images, by all fusions."""

from __future__ import annotations

import pytest
import torch
from small_vlm import FUSIONS, entries, images
from torch.nn.functional import pad

from forge_core.errors import ConfigError
from forge_plugins_inference.generation import generate
from forge_plugins_vlm.image_mask import image_mask

ALL = pytest.mark.parametrize("fusion", FUSIONS)


def prompt_of(fusion, layout, seed):
    """Token ids, and the entries of one row."""
    given = entries(fusion, layout)
    length = given["image_slots"].shape[1]
    ids = torch.randint(0, 31, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids, {**given, "pixels": images(1, max(1, layout.count("I")), seed)}


def together(prompts, inputs):
    """The entries of several rows, padded on the left, and with blank tiles after those of a row."""
    width, tiles = max(map(len, prompts)), max(one["pixels"].shape[1] for one in inputs)
    rows = []
    for prompt, one in zip(prompts, inputs, strict=True):
        missing, blank = width - len(prompt), tiles - one["pixels"].shape[1]
        rows.append(
            {
                "image_slots": pad(one["image_slots"], (missing, 0), value=-1),
                "image_range": pad(one["image_range"], (0, 0, missing, 0)),
                "pixels": pad(one["pixels"], (0, 0, 0, 0, 0, 0, 0, blank)),
            }
        )
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@ALL
@torch.no_grad()
def test_rows_with_different_numbers_of_images_go_on_as_each_does_alone(make_model, fusion):
    model = make_model(fusion)
    layouts = ("tIttI", "ttt", "It")
    prompts, inputs = zip(*(prompt_of(fusion, layout, seed) for seed, layout in enumerate(layouts)), strict=True)

    found = generate(model, prompts, max_new_tokens=4, temperature=0, inputs=together(prompts, inputs))

    for prompt, own, tokens in zip(prompts, inputs, found, strict=True):
        assert generate(model, [prompt], max_new_tokens=4, temperature=0, inputs=own) == [tokens]


@ALL
@torch.no_grad()
def test_the_likeliest_tokens_are_those_of_the_whole_sequence(make_model, fusion):
    model = make_model(fusion).eval()
    prompt, given = prompt_of(fusion, "tItt", 1)
    (found,) = generate(model, [prompt], max_new_tokens=3, temperature=0, inputs=given)

    for number, token in enumerate(found):
        length = len(prompt) + number
        slots = pad(given["image_slots"], (0, number), value=-1)
        bounds = torch.cat((given["image_range"], given["image_range"][:, -1:].expand(-1, number, -1)), dim=1)
        ids = torch.tensor([[*prompt, *found[:number]]])
        logits = model(ids, image_slots=slots, image_range=bounds, pixels=given["pixels"])
        assert logits[0, length - 1].argmax() == token


def test_forbidden_tokens_are_never_sampled(make_model):
    model = make_model()
    prompt, given = prompt_of("joint_decoder", "tIt", 1)
    generator = torch.Generator().manual_seed(0)
    kept = {3, 4}
    forbidden = [token for token in range(31) if token not in kept]

    (found,) = generate(
        model, [prompt], max_new_tokens=20, inputs=given, forbidden=forbidden, generator=generator, temperature=2.0
    )

    assert set(found) == kept
    with pytest.raises(ConfigError, match="forbidden has the token id 31; the model's are 0 to 30"):
        generate(model, [prompt], max_new_tokens=1, forbidden=[31])
    with pytest.raises(ConfigError, match="all token ids"):
        generate(model, [prompt], max_new_tokens=1, forbidden=range(31))


def test_padding_is_not_seen_in_both_directions_either():
    given = entries("joint_decoder", "It")
    slots, bounds = pad(given["image_slots"], (2, 0), value=-1), pad(given["image_range"], (0, 0, 2, 0))
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3, 4]])

    seen = image_mask({"image_slots": slots, "image_range": bounds}, None, positions)[0, 0]

    assert not seen[2:, :2].any()
    assert seen.any(1).all()  # no row is empty, for which kernels have no softmax
    assert seen[2:6, 2:6].all()
    assert seen[6, 2:].all()
    assert not seen[2:6, 6].any()
