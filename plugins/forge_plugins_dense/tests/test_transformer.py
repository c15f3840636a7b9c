from __future__ import annotations

import copy
import fnmatch
import math
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from forge_core.contracts.loss import LossSum
from forge_core.errors import ConfigError
from forge_core.train.initialisation import initialise
from forge_plugins_dense.attention import BlockInputs
from forge_plugins_dense.config import Llama3Scaling, TransformerConfig
from forge_plugins_dense.mask import document_block_mask, document_mask
from forge_plugins_dense.norm import NormOverHeads
from forge_plugins_dense.rope import rotary_tables
from forge_plugins_dense.transformer import Transformer

PRESETS = Path(__file__).parents[3] / "configs" / "model"
VARIANTS = [
    {},
    {"norm": "layernorm"},
    {"qk_norm": True, "head_dim": 10},
    {"tie_embeddings": True},
    {"n_kv_heads": 1},
    {"n_kv_heads": None, "rope_scaling": Llama3Scaling(original_max_seq_len=16)},
]


def summed_cross_entropy(hidden, head, targets):
    total = F.cross_entropy(head(hidden).float().flatten(0, 1), targets.flatten(), reduction="sum")
    return LossSum(total, (targets != -100).sum())


@pytest.mark.parametrize(
    ("preset", "parameters", "seq_len", "flops"),
    [
        ("debug_20m", 19_794_176, 512, 75_890_688),
        ("transformer_125m", 134_105_856, 2048, None),
        ("transformer_350m", 373_867_520, 2048, None),
        ("qwen3_600m", 596_049_920, 4096, None),
        ("llama_1b", 1_235_814_400, 4096, None),
        ("llama_3b", 3_212_749_824, 4096, None),
        ("llama_7b", 8_030_261_248, 4096, 51_470_401_536),
        ("llama_13b", 14_840_386_560, 4096, 95_166_136_320),
        ("llama_29b", 28_705_462_272, 4096, 184_412_012_544),
        ("llama_70b", 70_553_706_496, 4096, 449_222_541_312),
    ],
)
def test_presets_have_the_published_sizes(build, mlp, preset, parameters, seq_len, flops):
    with (PRESETS / f"{preset}.toml").open("rb") as file:
        table = tomllib.load(file)["model"]
    assert table.pop("name") == "transformer"
    assert table["feed_forward"].pop("name") == "mlp"
    table["feed_forward"] = mlp(**table["feed_forward"])
    if "rope_scaling" in table:
        table["rope_scaling"] = Llama3Scaling(**table["rope_scaling"])
    config = TransformerConfig(**table)

    with torch.device("meta"):
        model = Transformer(config, vocab_size=config.vocab_size, build=build)

    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    if flops is not None:
        assert model.flops_per_token(seq_len) == flops


def test_flops_count_a_tied_head_and_the_width_that_attention_works_on(tiny_model):
    model = tiny_model(tie_embeddings=True, head_dim=10)
    matrices = 2 * (2 * 40 * 32 + 2 * 20 * 32 + 3 * 48 * 32) + 50 * 32
    assert model.flops_per_token(16) == 6 * matrices + 12 * 2 * 40 * 16


@pytest.mark.parametrize("keys", VARIANTS, ids=str)
def test_every_variant_learns_and_declares_all_of_itself(tiny_model, tokens, keys):
    model = tiny_model(**keys)

    result = model(tokens, targets=tokens.roll(-1, 1), loss=summed_cross_entropy)
    result.total.backward()

    assert result.total.isfinite()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert set(model.parameter_roles()) == {name for name, _ in model.named_parameters()}
    modules = dict(model.named_modules())
    for pattern in model.parallel_plan():
        assert fnmatch.filter(modules, pattern), pattern
    planned = {name for pattern in model.parallel_plan() for name in fnmatch.filter(modules, pattern)}
    assert planned == {name for name, module in modules.items() if list(module.parameters(recurse=False))}


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_two_matrix_feed_forward_plugs_in(tiny_model, mlp, tokens, activation):
    model = tiny_model(feed_forward=mlp(hidden_dim=48, activation=activation))
    assert model(tokens).isfinite().all()
    assert "blocks.0.feed_forward.gate.weight" not in model.parameter_roles()


def test_roles_and_plan_name_what_each_tensor_is(tiny_model):
    model = tiny_model(norm="layernorm", qk_norm=True)
    roles, plan = model.parameter_roles(), model.parallel_plan()

    assert roles["embed.weight"] == "embedding"
    assert roles["head.weight"] == "head"
    assert roles["blocks.1.attention.q.weight"] == roles["blocks.1.feed_forward.down.weight"] == "matrix"
    assert roles["blocks.0.attention.k_norm.weight"] == roles["norm.weight"] == "norm"
    assert roles["norm.bias"] == "bias"
    assert "head.weight" not in tiny_model(tie_embeddings=True).parameter_roles()
    assert plan["blocks.1.attention.q"] == plan["blocks.0.feed_forward.up"] == "column"
    assert plan["blocks.1.attention.o"] == plan["blocks.0.feed_forward.down"] == "row"
    assert (plan["embed"], plan["head"], plan["norm"]) == ("embedding", "vocab", "sequence")
    assert plan["blocks.0.attention.q_norm"] == "replicate"
    assert tiny_model(qk_norm=True, qk_norm_over="all").parallel_plan()["blocks.0.attention.q_norm"] == "column"


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_over_all_heads_of_which_some_are_elsewhere_is_the_same_part_of_the_whole(zero_centered):
    rng = torch.Generator().manual_seed(0)
    norm = NormOverHeads(12, 1e-3, zero_centered=zero_centered)
    norm.weight.data = torch.randn(12, generator=rng)
    part = NormOverHeads(12, 1e-3, zero_centered=zero_centered)
    part.weight.data = norm.weight.data[8:]
    hidden = torch.randn(2, 5, 12, generator=rng)

    found = part(hidden[..., 8:], mean_square=hidden.square().mean(-1, keepdim=True))

    torch.testing.assert_close(found, norm(hidden)[..., 8:])
    wide, weight = hidden.double(), norm.weight.double() + zero_centered
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(norm(hidden).double(), expected, atol=1e-6, rtol=1e-5)


def test_operations_of_the_recompute_plan_exist(tiny_model):
    for name, decision in tiny_model().recompute_plan().items():
        namespace, operation = name.split(".")
        assert decision == "keep"
        assert hasattr(getattr(torch.ops, namespace), operation), name


def test_initial_weights_have_the_published_distribution(tiny_model):
    model = tiny_model(dim=256, n_layers=8, n_heads=8, init_std=0.02)
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters()}

    residual = 0.02 / math.sqrt(16)
    assert deviations["embed.weight"] == pytest.approx(0.02, rel=0.03)
    assert deviations["head.weight"] == pytest.approx(0.02, rel=0.03)
    assert deviations["blocks.7.attention.v.weight"] == pytest.approx(0.02, rel=0.03)
    assert deviations["blocks.7.attention.o.weight"] == pytest.approx(residual, rel=0.03)
    assert deviations["blocks.0.feed_forward.down.weight"] == pytest.approx(residual, rel=0.03)
    assert torch.equal(model.blocks["3"].attention_norm.weight, torch.ones(256))


def test_initial_weights_by_layer_have_the_published_distribution_on_every_stage(tiny_model):
    keys = {"dim": 256, "n_layers": 4, "n_heads": 8, "init_std": 0.02}
    usual, by_layer = tiny_model(**keys), tiny_model(**keys, init_depth="layer")
    drawn = {name: one.clone() for name, one in by_layer.named_parameters()}

    for name, parameter in usual.named_parameters():
        writes = name.endswith(("attention.o.weight", "feed_forward.down.weight"))
        layer = int(name.split(".")[1]) if writes else 3
        torch.testing.assert_close(drawn[name], parameter * math.sqrt(4 / (layer + 1)), msg=name)
    assert drawn["blocks.2.attention.o.weight"].std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.03)

    for layer in ("0", "1"):  # as the last stage of a pipeline
        del by_layer.blocks[layer]
    initialise(by_layer, seed=0)
    assert all(torch.equal(one, drawn[name]) for name, one in by_layer.named_parameters())


def test_the_seed_and_the_name_alone_decide_initial_weights(tiny_model):
    model, deeper, other = tiny_model(), tiny_model(norm="layernorm", qk_norm=True), tiny_model(seed=1)
    shared = dict(deeper.named_parameters())

    assert torch.equal(model.blocks["1"].attention.q.weight, shared["blocks.1.attention.q.weight"])
    assert torch.equal(model.head.weight, shared["head.weight"])
    assert not torch.equal(model.head.weight, other.head.weight)
    assert not torch.equal(model.blocks["0"].attention.q.weight, model.blocks["1"].attention.q.weight)


def test_the_loss_inside_forward_is_the_loss_of_the_logits(tiny_model, tokens):
    model = tiny_model()
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100

    result = model(tokens, targets=targets, loss=summed_cross_entropy)

    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(result.total, expected)
    assert result.count == 46


def test_a_pipeline_of_stages_is_the_whole_model(tiny_model, tokens):
    whole = tiny_model(n_layers=3)
    first, middle, last = (copy.deepcopy(whole) for _ in range(3))
    first.norm = first.head = middle.embed = middle.norm = middle.head = last.embed = None
    for stage, kept in ((first, "0"), (middle, "1"), (last, "2")):
        for layer in {"0", "1", "2"} - {kept}:
            del stage.blocks[layer]
    document = torch.tensor([[0] * 10 + [1] * 14] * 2)
    inputs = {"document": document, "positions": torch.arange(24).expand(2, 24)}

    hidden = middle(first(tokens, **inputs), **inputs)
    result = last(hidden, targets=tokens, loss=summed_cross_entropy, **inputs)

    assert hidden.shape == (2, 24, 32)
    expected = whole(tokens, targets=tokens, loss=summed_cross_entropy, **inputs)
    torch.testing.assert_close(result.total, expected.total, rtol=0, atol=0)
    names = [name for stage in (first, middle, last) for name in stage.parameter_roles()]
    assert sorted(names) == sorted(whole.parameter_roles())
    assert sum(stage.flops_per_token(24) for stage in (first, middle, last)) == whole.flops_per_token(24)


def test_sequences_beyond_the_limit_are_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"65 tokens is longer than model\.max_seq_len = 64"):
        tiny_model()(torch.zeros(1, 65, dtype=torch.int64))


@pytest.mark.parametrize("mask", [None, document_mask, document_block_mask])
def test_a_compiled_block_has_no_graph_breaks_and_is_compiled_once(tiny_model, mask):
    block = tiny_model().blocks["0"]
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()

    for seed, document in enumerate(torch.tensor([[[0] * 10 + [1] * 14] * 2, [[4] * 20 + [1] * 4] * 2])):
        cos, sin = rotary_tables(document, 8, 10_000.0)
        surroundings = BlockInputs(cos, sin, mask and mask(document), causal=mask is None)
        hidden = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(seed))
        hidden.requires_grad_(mask is not document_block_mask)  # FlexAttention has no backward on the CPU
        with (
            torch._dynamo.config.patch(error_on_recompile=seed > 0),
            torch.set_grad_enabled(hidden.requires_grad),
        ):
            result = compiled(hidden, surroundings)
        if hidden.requires_grad:
            result.sum().backward()

        plain = BlockInputs(cos, sin, mask and document_mask(document), causal=mask is None)
        torch.testing.assert_close(result, block(hidden, plain), atol=1e-4, rtol=1e-4)


@pytest.fixture
def one_rank_mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_angles_stay_in_fp32_when_fsdp_casts_a_blocks_inputs(tiny_model, tokens, one_rank_mesh):
    model = tiny_model()
    seen = {}

    def look(_, arguments):
        hidden, surroundings, _ = arguments
        seen.update(hidden=hidden.dtype, cos=surroundings.cos.dtype, sin=surroundings.sin.dtype)

    model.blocks["0"].attention.register_forward_pre_hook(look)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=one_rank_mesh, mp_policy=policy)

    result = model(tokens, targets=tokens, loss=summed_cross_entropy)
    result.total.backward()

    assert seen == {"hidden": torch.bfloat16, "cos": torch.float32, "sin": torch.float32}
    assert model.head.weight.grad.to_local().dtype == torch.float32
