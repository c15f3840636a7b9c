"""Any module as a model that is looked at: one of transformers, and a plain stack of layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import forge_plugins_interp as interp
from forge_core.errors import ConfigError
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.tokenizer_config import BytesConfig
from forge_plugins_interp.extraction import Request, extract
from forge_plugins_interp.reduction import Reduction
from forge_plugins_interp.stimuli import Stimuli
from forge_plugins_interp.store import Store

TOKENS = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=257, num_key_value_heads=2, **sizes)).eval()


@pytest.fixture
def wrapped(llama):
    def inputs(batch):
        return {"input_ids": batch["tokens"], "attention_mask": (batch["positions"] >= 0).long()}

    with interp.wrap(llama, inputs=inputs, batch_size=2) as opened:
        yield opened


@torch.no_grad()
def test_what_is_seen_of_a_model_of_transformers_is_what_it_says_itself(wrapped):
    with wrapped.observe("model.embed_tokens", "model.layers.*", "model.norm") as seen:
        given = wrapped.model(input_ids=TOKENS, output_hidden_states=True)

    ends = ("model.embed_tokens", "model.layers.0", "model.norm")
    for name, expected in zip(ends, given.hidden_states, strict=True):
        assert torch.equal(seen[name], expected), name
    norm = wrapped.module.model.norm
    assert torch.allclose(norm(seen["model.layers.1"]), given.hidden_states[-1], atol=1e-6)


@torch.no_grad()
def test_our_names_and_those_of_transformer_lens_mean_its_modules(wrapped):
    with wrapped.observe("blocks.*.hook_resid_post", "blocks.1.attn_out", "blocks.0.q", "logits") as seen:
        given = wrapped.model(input_ids=TOKENS)

    assert set(seen) == {f"model.layers.{name}" for name in ("0", "1", "1.self_attn", "0.self_attn.q_proj")} | {
        "lm_head"
    }
    assert torch.equal(seen["logits"], given.logits)
    assert seen["blocks.1.attn_out"].shape == (2, 9, 24)


@torch.no_grad()
def test_a_change_is_that_of_a_hook_by_hand(wrapped):
    at = {"position": -1, "features": [3, 4]}
    with wrapped.intervene(interp.Scale("blocks.0.mlp_out", factor=3.0, at=at)):
        changed = wrapped.model(input_ids=TOKENS).logits

    def by_hand(module, args, output):
        output = output.clone()
        output[:, -1, [3, 4]] *= 3
        return output

    handle = wrapped.module.model.layers[0].mlp.register_forward_hook(by_hand)
    expected = wrapped.model(input_ids=TOKENS).logits
    handle.remove()
    assert torch.equal(changed, expected)
    assert not torch.equal(wrapped.model(input_ids=TOKENS).logits, expected)


@torch.no_grad()
def test_an_argument_that_is_given_by_name_is_seen_and_changed(wrapped):
    with wrapped.observe("model.layers.1.self_attn.input", "model.layers.1.input_layernorm") as seen:
        wrapped.model(input_ids=TOKENS)
    with wrapped.intervene(interp.Zero("model.layers.1.self_attn.input")), wrapped.observe("blocks.1.v") as zero:
        wrapped.model(input_ids=TOKENS)

    assert torch.equal(seen["model.layers.1.self_attn.input"], seen["model.layers.1.input_layernorm"])
    assert (zero["blocks.1.v"] == 0).all()


def test_gradients_are_those_of_autograd(wrapped):
    with wrapped.observe("model.layers.0", gradients=True) as seen:
        wrapped.model(input_ids=TOKENS).logits[0, -1, 5].backward()
    given = wrapped.model(input_ids=TOKENS, output_hidden_states=True)
    (expected,) = torch.autograd.grad(given.logits[0, -1, 5], given.hidden_states[1])

    assert torch.allclose(seen.grad("model.layers.0"), expected, atol=1e-7)


@torch.no_grad()
def test_values_of_stimuli_are_written_to_a_store(wrapped, tmp_path):
    texts = {"a": "one", "b": "twenty-two", "c": "three words here"}
    (tmp_path / "texts.csv").write_text(
        "stimulus_id,text\n" + "".join(f"{key},{text}\n" for key, text in texts.items())
    )
    source = Stimuli(tmp_path / "texts.csv", "text", BytesTokenizer(BytesConfig()), longest=64, multiple=4)
    sites = ["model.layers.*", "blocks.0.mlp_pre"]
    request = Request(out=tmp_path / "acts", sites=sites, reduction=Reduction(), columns=source.columns)
    extract(wrapped, source, request, lambda line: None)

    store = Store(tmp_path / "acts")
    assert store.sites == ["model.layers.0", "model.layers.1", "model.layers.0.mlp.gate_proj"]
    assert store.manifest.sites["model.layers.0"].dims == ("token", "features")
    for number, text in enumerate(texts.values()):
        tokens = torch.tensor([list(text.encode())])
        with wrapped.observe("model.layers.1") as seen:
            wrapped.model(input_ids=tokens)
        assert store.tokens(number).tolist() == tokens[0].tolist()
        assert torch.allclose(store.read("model.layers.1", number), seen["model.layers.1"][0], atol=1e-5)


class Pictured:
    """A source of texts with a picture each."""

    fingerprint = "pictures"

    def __len__(self):
        return 3

    def read(self, indices):
        generator = np.random.default_rng(0)
        tokens = generator.integers(0, 255, (3, 12))
        tokens[:, 2:6] = 256  # a place for each patch
        pictures = generator.normal(size=(3, 3, 8, 8)).astype(np.float32)
        return {"tokens": tokens[indices], "pixel_values": pictures[indices]}


@torch.no_grad()
def test_a_model_of_pictures_and_text_is_extracted(tmp_path):
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
    text = LlamaConfig(vocab_size=257, **sizes)
    torch.manual_seed(0)
    llava = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=256))

    def inputs(batch):
        return {"input_ids": batch["tokens"], "pixel_values": batch["pixel_values"]}

    with interp.wrap(llava.eval(), inputs=inputs, batch_size=2) as model:
        sites = ["model.language_model.layers.1", "model.multi_modal_projector"]
        request = Request(out=tmp_path / "acts", sites=sites, reduction=Reduction())
        extract(model, Pictured(), request, lambda line: None)
        batch = {name: torch.from_numpy(entry) for name, entry in Pictured().read(np.arange(3)).items()}
        with model.observe(*sites) as seen:
            model.model(**inputs(batch))

    store = Store(tmp_path / "acts")
    assert store.manifest.sites[sites[0]].dims == ("token", "features")
    assert store.manifest.sites[sites[1]].dims == ("sample", "dim_1", "dim_2")
    for number in range(3):
        for site in sites:
            assert torch.allclose(store.read(site, number), seen[site][number], atol=1e-5)


class Vectors:
    """A source of vectors, not of tokens."""

    def __init__(self, values):
        self.values, self.fingerprint = values, "vectors"

    def __len__(self):
        return len(self.values)

    def read(self, indices):
        return {"input": self.values[indices]}


@torch.no_grad()
def test_vectors_through_plain_layers_have_a_row_a_sample(tmp_path):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    values = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    with interp.wrap(layers, dims=("sample",), batch_size=2) as model:
        with model.observe("1", "0.input", at={"features": [1, 2]}) as seen:
            model.model(torch.from_numpy(values))
        request = Request(out=tmp_path / "acts", sites=["*"], reduction=Reduction())
        extract(model, Vectors(values), request, lambda line: None)

    assert torch.equal(seen["0.input"], torch.from_numpy(values[:, 1:3]))
    store = Store(tmp_path / "acts")
    hidden = layers[0](torch.from_numpy(values))
    assert store.manifest.sites["1"].dims == ("sample", "features")
    assert torch.allclose(store.array("1"), hidden.relu(), atol=1e-6)
    assert torch.allclose(store.read("2", 4), layers(torch.from_numpy(values))[4], atol=1e-6)


def test_a_value_without_samples_is_a_sentence(llama):
    hooks = sum(len(one._forward_hooks) for one in llama.modules())
    with interp.wrap(llama) as model, torch.no_grad():
        message = "site model: output 0 of LlamaModel is no tensor, and cannot be read by the name of its module"
        with pytest.raises(ConfigError, match=message), model.observe("model"):
            model.model(input_ids=TOKENS)
        with (
            pytest.raises(ConfigError, match=r"did you mean 'model.layers.1.mlp'\?"),
            model.observe("model.layers.1.mpl"),
        ):
            pass
    assert sum(len(one._forward_hooks) for one in llama.modules()) == hooks
