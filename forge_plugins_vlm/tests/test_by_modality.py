"""Products by groups of a modality, against each layer on all positions."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_vlm import EXPERTS, entries, images
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from forge_plugins_vlm.fusions import by_modality
from forge_plugins_vlm.fusions.by_modality import PRODUCTS, ByModality

LAYOUTS = {"both": ["tIttI", "ItttI"], "text": ["ttttt", "ttttt"], "images": ["II", "II"]}
"""Two rows of a batch each."""
MLP = {"name": "mlp", "hidden_dim": 32}
MODELS = {
    "plain": {},
    "normed and biased": {
        "attention_bias": "all",
        "qk_norm": True,
        "norm_placement": "both",
        "n_kv_heads": 1,
        "feed_forward": {**MLP, "bias": True, "activation": "gelu", "gated": True},
    },
    "not gated": {
        "qk_norm": True,
        "qk_norm_over": "all",
        "feed_forward": {**MLP, "activation": "relu", "gated": False},
    },
}
DENSE = {"fusion": {"name": "moma", "image": MLP}, "feed_forward": MLP}


@pytest.fixture
def call_layers(monkeypatch):
    """From here on, there are no products by groups."""
    return lambda: monkeypatch.setattr(by_modality, "takes_grouped", lambda weight: False)


def batch(rows):
    parts = [entries("moma", layout) for layout in rows]
    given = {name: torch.cat([one[name] for one in parts]) for name in parts[0]}
    shape = given["image_slots"].shape
    given["tokens"] = torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(3))
    if "I" in rows[0]:
        given["pixels"] = images(2, rows[0].count("I"))
    return given


def padded(given):
    length = given["tokens"].shape[1]
    return given | {"positions": torch.tensor([[*range(length - 2), -1, -1]]).expand(2, -1)}


def computed(model, given):
    """Logits, and gradients by name."""
    model.zero_grad()
    logits = model(**given)
    logits.square().sum().backward()
    return logits.detach(), {name: one.grad for name, one in model.named_parameters()}


def flops(model, given):
    """Of products with weights of blocks in a forward."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**given)
    named = counter.get_flop_counts()
    of_blocks = [named[f"VisionLanguageModel.blocks.{layer}"] for layer in model.blocks]
    names = ("aten.mm", "aten.addmm", "forge_moe.grouped_product")
    return sum(count for each in of_blocks for operation, count in each.items() if str(operation) in names)


def assert_equal(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert {name for name, one in found[1].items() if one is None} == {
        name for name, one in expected[1].items() if one is None
    }
    for name, one in expected[1].items():
        if one is not None:
            scale = one.abs().max().item()
            torch.testing.assert_close(found[1][name], one, rtol=1e-4, atol=1e-5 * scale + 1e-7, msg=name)


@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_values_and_gradients_of_a_mixture_are_those_of_layers_that_see_all_positions(
    make_model, call_layers, keys, rows
):
    model, given = make_model("mixture_of_transformers", init_std=0.3, **keys), padded(batch(rows))
    for name, one in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(one)
    fewer, found = flops(model, given), computed(model, given)
    call_layers()
    more, expected = flops(model, given), computed(model, given)

    assert 0 < 2 * fewer == more
    assert_equal(found, expected)


@pytest.mark.parametrize("rows", LAYOUTS.values(), ids=LAYOUTS)
def test_values_and_gradients_of_dense_layers_in_moma_are_too(make_model, call_layers, rows):
    """The activation of images is another one."""
    image = {**MLP, "activation": "gelu", "gated": True}
    model = make_model(fusion={"name": "moma", "image": image}, feed_forward=MLP, init_std=0.3)
    given = padded(batch(rows))
    fewer, found = flops(model, given), computed(model, given)
    call_layers()
    more, expected = flops(model, given), computed(model, given)

    of_attention = fewer - (more - fewer)
    assert fewer > of_attention > 0, "feed-forward layers alone are of a modality"
    assert_equal(found, expected)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_product_and_its_gradients_are_those_of_a_formula_in_float64(share):
    generator = torch.Generator().manual_seed(0)
    text, image = nn.Linear(8, 12), nn.Linear(8, 12)
    hidden = torch.randn(3, 7, 8, generator=generator).requires_grad_()
    is_image = torch.rand(3, 7, generator=generator) < share
    order = ByModality.of_linear(is_image, (text, image))
    inputs = [hidden, *text.parameters(), *image.parameters()]

    found = order.positions(order.multiplied(order.rows(hidden, hidden), text, image))
    gradients = torch.autograd.grad(found.square().sum(), inputs)

    exact = [one.detach().double().requires_grad_() for one in inputs]
    x, text_weight, text_bias, image_weight, image_bias = exact
    both = F.linear(x, text_weight, text_bias), F.linear(x, image_weight, image_bias)
    expected = torch.where(is_image[..., None], both[1], both[0])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(expected.square().sum(), exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


class Adapted(nn.Linear):
    """As an adapter, float8 or a cut layer is: a linear layer of another class."""

    def forward(self, hidden):
        return 2 * super().forward(hidden)


def watched(model):
    read = []
    for part in ("attention.q", "image.feed_forward.down"):
        model.blocks["0"].get_submodule(part).register_forward_hook(lambda *args: read.append(args[-1]))
    return lambda: [one.shape[:2] for one in read] == [(2, 11), (2, 11)]


def changed_before(model):
    for part in ("image.attention.v", "feed_forward.up"):
        model.blocks["0"].get_submodule(part).register_forward_pre_hook(lambda _, args: (2 * args[0],))


def adapted(model):
    for part in ("image.attention.o", "feed_forward.gate"):
        model.blocks["0"].get_submodule(part).__class__ = Adapted


def hooked_layer(model):
    model.blocks["0"].image.feed_forward.register_forward_hook(lambda *args: 2 * args[-1])
    model.blocks["0"].attention.k.forward = lambda hidden: F.linear(hidden, model.blocks["0"].attention.v.weight)


@pytest.mark.parametrize("touch", [watched, changed_before, adapted, hooked_layer])
def test_a_layer_that_is_watched_or_another_one_is_called_with_all_positions(make_model, call_layers, touch):
    model, given = make_model("mixture_of_transformers", init_std=0.3, n_layers=1), batch(LAYOUTS["both"])
    untouched = computed(model, given)
    has_read = touch(model) or (lambda: not torch.allclose(model(**given), untouched[0], atol=1e-3))
    found = computed(model, given)
    assert has_read()
    call_layers()

    assert_equal(found, computed(model, given))


@pytest.mark.parametrize(
    ("dtype", "features", "length"), [(torch.float64, 8, 4), (torch.float32, 6, 4), (torch.float32, 8, 1)]
)
def test_there_are_no_groups_of_a_dtype_or_a_size_without_them_nor_for_one_token(dtype, features, length):
    def order(dtype=torch.float32, features=8, length=4):
        pair = nn.Linear(features, 8, dtype=dtype), nn.Linear(features, 8, dtype=dtype)
        return ByModality.of_linear(torch.zeros(2, length, dtype=torch.bool), pair)

    assert order() is not None
    assert order(dtype, features, length) is None


@pytest.mark.parametrize(
    ("capability", "dtype", "has_kernel"),
    [
        ((9, 0), torch.bfloat16, True),
        ((10, 0), torch.bfloat16, True),
        ((9, 0), torch.float32, False),
        ((8, 0), torch.bfloat16, False),
        ((12, 0), torch.bfloat16, False),
    ],
)
def test_a_gpu_has_groups_where_one_kernel_multiplies_all(monkeypatch, capability, dtype, has_kernel):
    """Elsewhere torch copies the counts to the host."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        pair = [nn.Linear(8, 8, bias=False, device="meta") for _ in range(2)]
        for layer in pair:
            layer.weight = nn.Parameter(torch.empty(8, 8, dtype=dtype, device="cuda:0"))
        order = ByModality.of_linear(torch.zeros(2, 4, dtype=torch.bool), pair)

    assert (order is not None) == has_kernel


@pytest.mark.parametrize(
    ("capability", "dtype", "has_kernel"),
    [((9, 0), torch.bfloat16, True), ((9, 0), torch.float32, False), ((8, 0), torch.bfloat16, False)],
)
def test_a_plan_has_groups_where_its_gpu_has_them(capability, dtype, has_kernel):
    with FakeTensorMode() as plan:
        plan.gpu = SimpleNamespace(capability=capability)
        pair = [nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(2)]
        order = ByModality.of_linear(torch.zeros(2, 4, dtype=torch.bool), pair)

    assert (order is not None) == has_kernel


@pytest.mark.parametrize("when", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("part", ["image_feed_forward", "image_feed_forward.down", "feed_forward", "feed_forward.up"])
def test_there_are_no_groups_while_a_layer_has_a_hook(make_model, when, part):
    block, is_image = make_model(**DENSE, n_layers=1).blocks["0"], torch.zeros(2, 4, dtype=torch.bool)
    layers = block.feed_forward, block.image_feed_forward

    hook = getattr(block.get_submodule(part), f"register_{when}_hook")(lambda *_: None)
    assert ByModality.of_dense(is_image, *layers) is None
    hook.remove()
    assert ByModality.of_dense(is_image, *layers) is not None


def test_dense_layers_of_two_shapes_and_experts_are_called(make_model):
    is_image = torch.zeros(2, 4, dtype=torch.bool)

    def order(text, image):
        block = make_model(fusion={"name": "moma", "image": image}, feed_forward=text).blocks["0"]
        return ByModality.of_dense(is_image, block.feed_forward, block.image_feed_forward)

    assert order(MLP, MLP) is not None
    for image in ({**MLP, "hidden_dim": 16}, {**MLP, "activation": "gelu", "gated": False}, {**MLP, "bias": True}):
        assert order(MLP, image) is None
    assert order({**MLP, "activation": "gelu", "gated": False}, MLP) is None
    assert order(MLP, EXPERTS) is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # as dynamo does
@pytest.mark.parametrize(
    "keys", [{"of": "mixture_of_transformers", **MODELS["normed and biased"]}, DENSE], ids=["mixture", "moma"]
)
def test_one_compiled_graph_is_for_any_number_of_images(make_model, keys):
    model = make_model(init_std=0.3, n_layers=1, **keys)
    given = [batch(["tItIt", "ItItt"])]
    given += [given[0] | {"image_slots": torch.full_like(given[0]["image_slots"], slot)} for slot in (-1, 0)]
    expected = [computed(model, one) for one in given]
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks.values():
        block.compile(backend=counter, fullgraph=True)

    for one, of_one in zip(given, expected, strict=True):
        assert_equal(computed(model, one), of_one)

    assert counter.frame_count == 1


def test_backward_is_left_no_stack_of_weights(make_model):
    model, given, shapes = make_model("mixture_of_transformers"), batch(LAYOUTS["both"]), []

    def keep(tensor):
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**given)

    weights = {tuple(one.shape) for name, one in model.blocks.named_parameters() if one.ndim == 2}
    assert weights <= {tuple(shape) for shape in shapes}
    assert not {(2, *shape) for shape in weights} & {tuple(shape) for shape in shapes}


class Count(TorchDispatchMode):
    """Of operations, in their order."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.called.append(operation)
        return operation(*args, **(kwargs or {}))


PRODUCT, OUTER_PRODUCT = (getattr(torch.ops.forge_moe, f"grouped_{name}product").default for name in ("", "outer_"))


@pytest.mark.parametrize(("keys", "products"), [({"of": "mixture_of_transformers"}, 7), (DENSE, 3)])
def test_selective_checkpointing_does_not_multiply_again(make_model, keys, products):
    """Per block q, k, v, o, gate, up and down, or the last three: once in forward, and for the gradient of rows."""
    model, given = make_model(**keys), batch(LAYOUTS["both"])
    assert model.recompute_plan().items() >= PRODUCTS.items()
    context = functools.partial(create_selective_checkpoint_contexts, [PRODUCT])
    for block in model.blocks.values():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=context)

    with Count() as count:
        computed(model, given)

    assert count.called.count(PRODUCT) == 2 * products * len(model.blocks)
    assert count.called.count(OUTER_PRODUCT) == products * len(model.blocks)


@pytest.mark.parametrize("trained", ["image", "vision"])
def test_frozen_weights_have_no_gradient_and_no_product_for_it(make_model, trained):
    model, given = make_model("mixture_of_transformers", n_layers=1), batch(LAYOUTS["both"])
    expected = computed(model, given)[1]
    for name, one in model.named_parameters():
        one.requires_grad_(trained in name.split("."))

    with Count() as count:
        found = computed(model, given)[1]

    assert count.called.count(OUTER_PRODUCT) == (7 if trained == "image" else 0)
    assert {name for name, one in found.items() if one is not None} == {
        name for name in found if trained in name.split(".") and expected[name] is not None
    }
    for name, one in found.items():
        if one is not None:
            torch.testing.assert_close(one, expected[name])
