import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.cli import main
from forge_testing.model import ModelConformance
from forge_testing.package import PluginConformance


class TestPlugin(PluginConformance):
    dist = "acme-mixers"


SHAPE = {"name": "transformer", "dim": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32}


class TestLinear(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"mixer": "gated_linear"}


class TestHybrid(ModelConformance):
    component = "forge-plugins-dense:transformer"
    config = SHAPE | {"layers": [{"at": 0, "mixer": {"name": "gated_linear", "memory": 3.0}}], "window": 6}


def test_it_is_the_recurrence():
    from acme_mixers.config import GatedLinearConfig
    from acme_mixers.gated_linear import GatedLinear

    from forge_plugins_dense.attention import BlockInputs

    class Shape:
        dim, n_heads, head_size = 8, 2, 4

    torch.manual_seed(0)
    mixer = GatedLinear(GatedLinearConfig(), model=Shape, layer=0).double()
    hidden = torch.randn(1, 7, 8, dtype=torch.float64)
    nowhere = torch.zeros(1, 7, 1, 0)
    inputs = BlockInputs(nowhere, nowhere, facts={"sequence": torch.zeros(1, 7, dtype=torch.int64)})
    q, k, v = (f(hidden)[0].view(7, 2, 4) for f in (mixer.q, mixer.k, mixer.v))
    fading = torch.exp(-torch.nn.functional.softplus(mixer.gate(hidden)[0].float() + mixer.shift)).double()
    state, rows = torch.zeros(2, 4, 4, dtype=torch.float64), []
    for t in range(7):
        state = fading[t][:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
        rows.append((q[t][:, None] @ state)[:, 0].flatten() / 2)
    torch.testing.assert_close(mixer(hidden, inputs)[0], mixer.o(torch.stack(rows)), atol=1e-6, rtol=1e-6)


def test_a_model_goes_there_and_back(tmp_path, capfd):
    config = {"architectures": ["AcmeLinearForCausalLM"], "model_type": "acme_linear", "memory": 5.0}
    config |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"vocab_size": 20, "max_position_embeddings": 32}
    layer = "model.layers.0."
    shapes = {"model.embed_tokens": (20, 16), "lm_head": (20, 16), "model.norm": (16,)}
    shapes |= {f"{layer}{norm}_layernorm": (16,) for norm in ("input", "post_attention")}
    shapes |= {f"{layer}self_attn.{name}_proj": (16, 16) for name in "qkvo"} | {f"{layer}self_attn.g_proj": (2, 16)}
    shapes |= {f"{layer}mlp.{name}_proj": (24, 16) for name in ("gate", "up")} | {f"{layer}mlp.down_proj": (16, 24)}
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "hf" / "model.safetensors")

    assert main(["convert", str(tmp_path / "hf"), "--to", "forge", "--out", str(tmp_path / "ours")]) == 0
    source, back = str(tmp_path / "ours" / "checkpoint"), str(tmp_path / "back")
    assert main(["convert", source, "--to", "huggingface", "--out", back]) == 0

    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], one) for name, one in weights.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["memory"] == 5.0


def test_context_parallelism_is_refused(tmp_path):
    from forge_plugins_dense.attention import Attention
    from forge_plugins_dense.block import Block

    block = Block.__new__(Block)
    torch.nn.Module.__init__(block)
    block.attention = torch.nn.Identity()
    with pytest.raises(Exception, match="the mixer Identity has no context_plan"):
        block.context_plan()
    assert Attention.context_plan(block) == ["core"]
