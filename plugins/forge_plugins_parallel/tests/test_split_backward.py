"""A compiled backward runs the part that is asked for: gradients of inputs, of parameters, or both."""

import copy
import importlib
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from forge_core.distributed.mesh import join_process_group
from forge_core.ops.local_tensor import local_tensor
from forge_plugins_parallel.split_backward import nothing_like, split_backward

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # dynamo looks at the gradients of what it traces
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch 2.11 uses it where it tunes
]
INNER = "torch._inductor.compile_fx.compile_fx_inner"
ROWS, WIDTH, HIDDEN = 6, 8, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        gate, value = self.up(self.norm(x)).split([HIDDEN, HIDDEN], dim=-1)
        return x + self.down(nn.functional.silu(gate) * value)


class Sorting(nn.Module):
    """Its backward has an operation with several outputs, and sizes that change from batch to batch."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        highest, places = (x @ self.weight).flatten().topk(x.shape[0])
        return x + highest[:, None] * places.sum().remainder(3) + x.shape[0] * self.weight.sum(0)


class Counted(torch.autograd.Function):
    """The same, and backward counts."""

    @staticmethod
    def forward(ctx, x, backwards):
        ctx.backwards = backwards
        return x.clone()

    @staticmethod
    def backward(ctx, towards):
        ctx.backwards.add_(1)
        return towards.clone(), None


class Watching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("backwards", torch.zeros(()))

    def forward(self, x):
        return self.linear(Counted.apply(x, self.backwards))


class Lengthening(nn.Module):
    """What it saves has sizes from which that of its input does not follow."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        half = x.shape[1] // 2
        return x + self.linear(torch.cat([x, x[:, :half]], dim=1))[:, half:]


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Log:
    """What compiled graphs have done, which are run operation by operation here."""

    def __init__(self):
        self.results = []
        self._products = 0

    def products(self):
        """Matrix products since the last call."""
        done, self._products = self._products, 0
        return done

    def compile(self, graph, inputs, **options):
        def run(given):
            results = graph(*given)
            self.results += [weakref.ref(one) for one in results if isinstance(one, torch.Tensor)]
            self._products += sum("mm" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return results

        run._boxed_call = True
        return run


@pytest.fixture
def log(monkeypatch):
    log = Log()
    monkeypatch.setattr(INNER, log.compile)
    return log


def compiled(model):
    if torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 cannot compute gradients of a compiled block's weights by themselves")
    for block in model:
        block.compile(backend=split_backward, fullgraph=True)
    return model


def blocks(kind=Block):
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind(), kind())


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [Block, Sorting])
def test_gradients_of_inputs_and_then_of_parameters_are_those_of_one_backward(kind):
    plain = blocks(kind)
    model = compiled(copy.deepcopy(plain))
    for rows in (ROWS, ROWS + 3, ROWS + 4):  # compiled again for any number of rows
        x = torch.randn(rows, WIDTH, requires_grad=True)
        expected_x = x.detach().clone().requires_grad_()
        towards = torch.randn(rows, WIDTH)
        plain.zero_grad()
        plain(expected_x).backward(towards)

        model.zero_grad()
        (of_x,), groups = stage_backward_input([model(x)], [towards], [x], model.parameters())
        assert gradients(model) == [None] * len(list(model.parameters()))
        stage_backward_weight(model.parameters(), groups)

        torch.testing.assert_close(of_x, expected_x.grad)
        torch.testing.assert_close(gradients(model), gradients(plain))


def test_each_part_does_its_own_products_and_no_others(log):
    model = compiled(blocks())
    x, towards = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
    output = model(x)
    assert log.products() == 2 * len(model)

    _, groups = stage_backward_input([output], [towards], [x], model.parameters())
    assert log.products() == 2 * len(model)
    stage_backward_weight(model.parameters(), groups)
    assert log.products() == 2 * len(model)
    model(x).backward(towards)
    assert log.products() == 6 * len(model)


def test_each_part_does_its_own_products_where_sizes_vary(log):
    model = compiled(blocks())
    for rows in (ROWS, ROWS + 3, ROWS + 4):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        output = model(x)
        log.products()

        _, groups = stage_backward_input([output.sum()], None, [x], model.parameters())
        assert log.products() == 2 * len(model)
        stage_backward_weight(model.parameters(), groups)
        assert log.products() == 2 * len(model)


@pytest.fixture
def mesh():
    join_process_group(torch.device("cpu"))
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Cut(nn.Module):
    """As tensor parallelism cuts it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize("frozen", [None, "up"])
def test_parameters_that_are_distributed_tensors_have_parts_of_their_own(frozen, mesh, log):
    """One of them is two inputs to the compiler, a tensor and a mesh, and its gradient none, or two."""
    plain = blocks(Cut)
    for block in plain if frozen else ():
        block.get_submodule(frozen).requires_grad_(False)
    model = copy.deepcopy(plain)
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled(model)
    for rows in (ROWS, ROWS + 3):
        x = torch.randn(rows, WIDTH, requires_grad=True)
        plain.zero_grad()
        (expected,) = torch.autograd.grad(plain(x).sum(), x, retain_graph=True)
        plain(x).sum().backward(inputs=[one for one in plain.parameters() if one.requires_grad])

        model.zero_grad()
        output = model(x).sum()
        log.products()
        (of_x,), groups = stage_backward_input([output], None, [x], model.parameters())
        assert log.products() == 2 * len(model)
        stage_backward_weight(model.parameters(), groups)
        assert log.products() == (1 if frozen else 2) * len(model)

        torch.testing.assert_close(of_x, expected)
        assert [one is None for one in gradients(model)] == [one is None for one in gradients(plain)]
        for one, other in zip(gradients(model), gradients(plain), strict=True):
            if one is not None:
                torch.testing.assert_close(local_tensor(one), other)


def test_inputs_that_are_distributed_tensors_have_parts_of_their_own(mesh):
    """Autograd checks the shape of their gradients with those of parameters too, where it drops them."""
    plain = blocks(Cut)
    model = copy.deepcopy(plain)
    for block in model:
        distribute_module(block, mesh)
    compiled(model)
    for rows in (ROWS, ROWS + 3, ROWS + 4):
        x = torch.randn(rows, WIDTH)
        given = x.clone().requires_grad_()
        plain.zero_grad()
        plain(given).square().sum().backward()

        model.zero_grad()
        shared = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
        output = model(shared).square().sum()
        (of_x,), groups = stage_backward_input([output], None, [shared], model.parameters())
        stage_backward_weight(model.parameters(), groups)

        torch.testing.assert_close(local_tensor(of_x), given.grad)
        torch.testing.assert_close([local_tensor(one) for one in gradients(model)], gradients(plain))


def test_what_stands_in_for_a_gradient_has_its_shape_and_no_memory():
    gradient = torch.ones(300, 400, dtype=torch.bfloat16)

    made = nothing_like(gradient)

    assert (made.shape, made.dtype) == (gradient.shape, gradient.dtype)
    assert made.untyped_storage().nbytes() == gradient.itemsize
    assert nothing_like(7) == 7


def test_the_second_part_knows_sizes_that_only_the_first_one_reads():
    plain = blocks(Lengthening)
    model = compiled(copy.deepcopy(plain))
    for rows, length in ((3, 6), (4, 8), (2, 10)):
        x = torch.randn(rows, length, WIDTH, requires_grad=True)
        plain.zero_grad()
        plain(x).sum().backward()

        model.zero_grad()
        _, groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)

        torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_block_whose_input_has_no_gradient_gives_those_of_parameters():
    plain = blocks()
    model = compiled(copy.deepcopy(plain))
    x = torch.randn(ROWS, WIDTH)

    plain(x).sum().backward()
    model(x).sum().backward()

    torch.testing.assert_close(gradients(model), gradients(plain))


def test_a_block_whose_parameters_are_frozen_gives_the_gradient_of_its_input():
    plain = blocks()
    plain[1].requires_grad_(False)
    model = compiled(copy.deepcopy(plain))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)

    (of_x,), groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)

    torch.testing.assert_close(of_x, expected)
    assert [grad is None for grad in gradients(model)] == [not one.requires_grad for one in model.parameters()]


def test_gradients_of_inputs_may_be_asked_for_again():
    model = compiled(blocks())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    output = model(x).sum()

    (first,) = torch.autograd.grad(output, x, retain_graph=True)
    again, *of_parameters = torch.autograd.grad(output, [x, *model.parameters()])

    torch.testing.assert_close(first, again)
    model(x).sum().backward()
    torch.testing.assert_close(of_parameters, gradients(model))


def test_what_backward_changes_in_place_is_changed_once():
    model = compiled(nn.Sequential(Watching(), Watching()))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    _, groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)

    assert [block.backwards.item() for block in model] == [1, 1]


def test_gradients_are_summed_over_microbatches_that_overlap():
    plain = blocks()
    model = compiled(copy.deepcopy(plain))
    batches = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(3)]
    for x in batches:
        plain(x).sum().backward()

    outputs = [model(x).sum() for x in batches]
    asked = [
        stage_backward_input([one], None, [x], model.parameters()) for one, x in zip(outputs, batches, strict=True)
    ]
    for _, groups in reversed(asked):
        stage_backward_weight(model.parameters(), groups)

    torch.testing.assert_close(gradients(model), gradients(plain))


def test_nothing_but_gradients_is_left_after_the_second_part(log):
    model = compiled(blocks())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    (of_x,), groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
    between = [one for one in log.results if one() is not None]
    stage_backward_weight(model.parameters(), groups)
    after = {one().data_ptr() for one in log.results if one() is not None}

    assert len(between) > len(model)
    assert after <= {one.data_ptr() for one in [x, of_x, *model.parameters(), *gradients(model)]}


@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs"])
def test_a_mode_of_the_compiler_reaches_both_parts(mode, monkeypatch):
    seen = []
    inner = importlib.import_module(INNER.rpartition(".")[0]).compile_fx_inner

    def noted(*args, **options):
        seen.append((options.get("is_backward", False), torch._inductor.config.max_autotune))
        return inner(*args, **options)

    monkeypatch.setattr(INNER, noted)
    block = Block()
    block.compile(backend=split_backward, mode=mode)
    block(torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()

    assert seen == [(False, True), (True, True), (True, True)]
