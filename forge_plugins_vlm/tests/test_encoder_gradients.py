"""Values and gradients at the sites of an encoder are those of one process in every layout."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from test_runs import CONFIG

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_interp.session import initial_session
from forge_testing.several_ranks import on_ranks

MODELS = {
    "placed": [],
    "crossed": ['model.fusion={name="cross_attention", layers=[0,1]}'],
}
LAYOUTS = {
    "tp2": ["parallel.tp=2"],
    "tp2 without sp": ["parallel.tp=2", "parallel.passes.tensor_parallel.sequence_parallel=false"],
    "tp2 cut": ["parallel.tp=2", "model.cut_encoder=true"],
    "cp2": ["parallel.cp=2"],
    "fsdp2": ["parallel.dp_shard=2"],
}


def seen(model, settings, world_size):
    """The value and the gradient at each site of the encoder and behind it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(CONFIG.format(folder=folder))
        shared = ["model.vocab_size=40", "train.batch_size=2", *MODELS[model]]
        job = load_job(path, [*shared, *settings], catalog=discover(), world_size=world_size)
    session = initial_session(job, discover(), 40, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in session.parameters.items():
            if "gate" in name:  # which begins at zero, and lets no gradient through
                parameter.fill_(0.5)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 40, (2, 24), generator=generator)
    pixels = torch.randint(0, 256, (2, 1, 3, 32, 32), dtype=torch.uint8, generator=generator)
    slots, sees = torch.full((2, 24), -1), torch.zeros(2, 24, 3, dtype=torch.int64)
    for sample, start in enumerate((1, 4)):
        slots[sample, start : start + 16] = torch.arange(16)
        sees[sample, start:, 2] = 1
    sites = ("vision.layers.*.*", "image_features", "image_tokens", "blocks.0.resid_post")
    with session.observe(*sites, gradients=True) as found:
        logits = session.model(tokens, pixels=pixels, image_slots=slots, image_range=sees)
        (logits[0, -1, 3] + logits[1, 5, 7].square() + logits[:, 20, 2].sum()).backward()
    return {name: {"value": found[name], "gradient": found.grad(name)} for name in found}


class InLayouts:
    def placed(self):
        return {layout: seen("placed", settings, 2) for layout, settings in LAYOUTS.items()}

    def crossed(self):
        return {layout: seen("crossed", settings, 2) for layout, settings in LAYOUTS.items()}

    def placed_alone(self):
        return seen("placed", [], 1)

    def crossed_alone(self):
        return seen("crossed", [], 1)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_at_the_sites_of_an_encoder_are_those_of_one_process(model):
    (expected,) = on_ranks(InLayouts, f"{model}_alone", 1)

    for layouts in on_ranks(InLayouts, model, 2):
        for layout, found in layouts.items():
            assert found.keys() == expected.keys()
            for name, kinds in found.items():
                for kind, one in kinds.items():
                    wanted = expected[name][kind]
                    error = float((one - wanted).abs().max() / wanted.abs().max())
                    assert error < 1e-5, f"{layout}: the {kind} of {name} is off by {error:.1e}"
