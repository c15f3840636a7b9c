"""FLOPs of encoders, by the tiles that batches really have."""

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
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the others' attention torch does not count on a CPU
        model(**given)
    found = counter.get_flop_counts()
    return sum(next(of for name, of in found.items() if name.endswith(module)).values())


@pytest.mark.parametrize("name", BATCHES)
def test_an_encoders_flops_are_those_that_torch_counts_of_the_tiles_of_a_batch(make_model, name):
    model, given = make_model(encoder={**ENCODER, "any_size": True}, freeze_encoder=True), batch(BATCHES[name])
    n_tokens = given["tokens"].numel()

    said = model.flops_beside(given) + n_tokens * model.flops_of("vision")

    assert said == pytest.approx(counted("vision.encoder", model, given), rel=1e-6)


def test_a_backward_is_counted_where_the_encoder_is_trained(make_model):
    given = batch(BATCHES["several tiles"])
    frozen, model = make_model(freeze_encoder=True), make_model()
    n_tokens = given["tokens"].numel()
    forward = frozen.flops_beside(given) + n_tokens * frozen.flops_of("vision")
    counted_before = n_tokens * model.flops_of("vision")

    assert model.flops_beside(given) + counted_before == pytest.approx(3 * forward)
    model.set_frozen({name for name, _ in model.named_parameters() if name.startswith("vision.encoder.")})
    assert model.flops_beside(given) + counted_before == pytest.approx(forward)
    model.set_frozen(())
    assert model.flops_beside(given) + counted_before == pytest.approx(3 * forward)


def test_a_stage_without_the_encoder_counts_nothing(make_model):
    model = make_model()
    model.vision = None

    assert model.flops_beside(batch({})) == 0
