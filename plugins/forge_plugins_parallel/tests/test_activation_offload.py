"""Activations in the host's memory. Here both memories are one, and copies of a pretended GPU are as late as may be."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from forge_core.config.sections import ParallelSection
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError
from forge_core.train.build import materialise
from forge_plugins_parallel import activation_offload
from forge_plugins_parallel.activation_checkpointing import ActivationCheckpointing
from forge_plugins_parallel.activation_offload import _Kept as Kept
from forge_plugins_parallel.activation_offload import offload
from forge_plugins_parallel.compile import Compile
from forge_plugins_parallel.config import ActivationCheckpointingConfig, CompileConfig, FullyShardConfig
from forge_plugins_parallel.fsdp import FullyShard
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import SmallModel, cross_entropy, small_job

CPU = torch.device("cpu")
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


class TestOffload(ParallelPassConformance):
    component = "forge-plugins-parallel:activation_checkpointing"
    config = {"mode": "offload"}

    @pytest.fixture(autouse=True)
    def every_size(self, monkeypatch):
        monkeypatch.setattr(activation_offload, "SMALLEST", 1)


@pytest.fixture
def copies(monkeypatch):
    """Those that have been made."""
    monkeypatch.setattr(activation_offload, "SMALLEST", 1)
    made = []

    class Counted(Kept):
        def __init__(self, tensor, streams):
            super().__init__(tensor, streams)
            self.of = tensor.untyped_storage()._cdata
            made.append(weakref.ref(self))

    monkeypatch.setattr(activation_offload, "_Kept", Counted)
    return made


def model_on(device, n_layers=3, dim=16):
    with torch.device("meta"):
        model = SmallModel(n_layers=n_layers, dim=dim)
    materialise(model, torch.device(device), seed=0)
    return model


def step(model, device="cpu", length=8, keep=False):
    tokens = torch.arange(2 * length, device=device).reshape(2, length) % 32
    total = model(tokens, targets=tokens, loss=cross_entropy).total
    total.backward(retain_graph=keep)
    return total, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_losses_and_gradients_are_what_they_are_without(copies, device):
    expected, gradients = step(model_on(device, dim=256), device, length=64)
    model = model_on(device, dim=256)
    offload(model.blocks.values(), torch.device(device))

    for _ in range(3):  # memory of the steps before is used again
        model.zero_grad()
        found, own = step(model, device, length=64)

        assert torch.equal(found, expected)
        assert all(torch.equal(got, want) for got, want in zip(own, gradients, strict=True))
    assert len(copies) > 30


def test_nothing_stays_after_a_step(copies):
    model = model_on("cpu")
    offload(model.blocks.values(), CPU)

    step(model)

    assert [one for one in copies if one() is not None] == []


def alive_after_forward(model):
    """Of each block, whether what its wide layer has made is in the memory of the device until backward."""
    made = saved_storages(model)
    tokens = torch.arange(16).reshape(2, 8)
    loss = model(tokens, targets=tokens, loss=cross_entropy).total
    return [not storage.expired() for storage in made], loss


def saved_storages(model):
    """Of what the wide layer of each block makes, once it has."""
    made = []
    for block in model.blocks.values():
        block.up.register_forward_hook(lambda *call: made.append(StorageWeakRef(call[-1].untyped_storage())))
    return made


def test_activations_leave_the_device_during_forward(copies):
    plain, offloaded = model_on("cpu"), model_on("cpu")
    *blocks, last = offloaded.blocks.values()
    offload(blocks, CPU, last=last)

    assert alive_after_forward(plain)[0] == [True, True, True]
    assert alive_after_forward(offloaded)[0] == [False, False, True]


def test_a_tensor_that_is_saved_often_is_copied_once(copies):
    """By the products for query, key and value."""
    model = model_on("cpu", n_layers=1)
    offload(model.blocks.values(), CPU)

    kept = alive_after_forward(model)[1]

    storages = sum(one() is not None for one in copies)
    packed = sum(isinstance(saved, activation_offload._Packed) for saved in packed_by(kept))
    assert 0 < storages < packed


def packed_by(loss):
    """What the graph of a loss holds in place of tensors."""
    found, seen, open_ = [], set(), [loss.grad_fn]
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        open_ += [following for following, _ in node.next_functions]
        found += [getattr(node, name).data for name in dir(node) if name.startswith("_raw_saved") and packs(node, name)]
    return found


def packs(node, name):
    saved = getattr(node, name)
    return hasattr(saved, "data") and isinstance(getattr(saved, "data", None), activation_offload._Packed)


def test_parameters_stay(copies):
    model = model_on("cpu")
    offload(model.blocks.values(), CPU)

    loss = alive_after_forward(model)[1]

    assert loss.requires_grad
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    assert parameters.isdisjoint(one().of for one in copies)


def test_small_tensors_stay(copies, monkeypatch):
    model = model_on("cpu")
    offload(model.blocks.values(), CPU)
    monkeypatch.setattr(activation_offload, "SMALLEST", 2**20)

    step(model)

    assert copies == []


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(32))

    def forward(self, hidden):
        return hidden * self.mask


def test_buffers_stay(copies):
    block = Masked()
    offload([block], CPU)

    loss = block(torch.randn(32, requires_grad=True)).sum()

    assert loss.requires_grad
    assert copies == []


def test_what_is_in_the_memory_of_the_host_stays(copies):
    block = nn.Linear(16, 16)
    offload([block], torch.device("meta"))

    block(torch.randn(4, 16, requires_grad=True)).sum().backward()

    assert copies == []


class Conjugated(nn.Module):
    def forward(self, hidden, by):
        conjugated = torch.view_as_complex(hidden).conj()
        return torch.view_as_real(conjugated * by).square() * conjugated.imag[:, None]


def test_a_conjugate_stays_one(copies):
    """torch keeps the bytes of the tensor, and notes that it is conjugated."""
    torch.manual_seed(0)
    gradients = []
    for prepare in (lambda block: None, lambda block: offload([block], CPU)):
        torch.manual_seed(0)
        block, hidden, by = Conjugated(), torch.randn(8, 2), torch.randn(8, dtype=torch.complex64)
        prepare(block)
        block(hidden.requires_grad_() * 1, by.requires_grad_() * 1).sum().backward()
        gradients.append((hidden.grad, by.grad))

    assert len(copies) > 0
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("smallest", [1, 2**20])
def test_a_graph_that_is_not_walked_is_freed(copies, monkeypatch, smallest):
    monkeypatch.setattr(activation_offload, "SMALLEST", smallest)
    model = model_on("cpu")
    *blocks, last = model.blocks.values()
    offload(blocks, CPU, last=last)
    made = saved_storages(model)
    tokens = torch.arange(16).reshape(2, 8)

    model(tokens, targets=tokens, loss=cross_entropy)

    assert [storage.expired() for storage in made] == [True, True, True]


def test_what_several_blocks_save_stays(copies):
    """A table of positions would otherwise be copied for each."""

    class Turned(nn.Module):
        def forward(self, hidden, table):
            return hidden * table

    blocks, table = [Turned() for _ in range(4)], torch.randn(32)
    offload(blocks, CPU)
    hidden = torch.randn(32, requires_grad=True)
    for block in blocks:
        hidden = block(hidden, table)

    assert len([one for one in copies if one() is not None and one()._size == table.nbytes]) == 1


def test_activations_come_back_a_block_ahead(copies, monkeypatch):
    model = model_on("cpu")
    offload(model.blocks.values(), CPU)
    order = []
    copy_back = activation_offload._Visit._copy_back

    def noted(visit):
        if not visit._is_coming_back:
            order.append(visit)
        copy_back(visit)

    monkeypatch.setattr(activation_offload._Visit, "_copy_back", noted)
    for name, block in model.blocks.items():
        block.up.register_full_backward_hook(lambda *_, name=name: order.append(name))

    step(model)

    assert [one if isinstance(one, str) else "visit" for one in order] == ["visit", "visit", "2", "visit", "1", "0"]


def test_the_last_block_has_those_of_the_block_before_it_brought_back(copies):
    model = model_on("cpu")
    *blocks, last = model.blocks.values()
    offload(blocks, CPU, last=last)
    back = []
    last.up.register_full_backward_hook(lambda *_: back.append(sum(is_on_device(one()) for one in copies if one())))

    step(model)

    assert 0 < back[0] < len(copies)


def is_on_device(kept):
    return kept._bytes is not None


def test_the_last_that_was_saved_comes_back_first(copies, monkeypatch):
    model, order = model_on("cpu", n_layers=2), []
    *blocks, last = model.blocks.values()
    offload(blocks, CPU, last=last)
    copy_back = Kept.copy_back
    monkeypatch.setattr(Kept, "copy_back", lambda kept: (order.append(weakref.ref(kept)), copy_back(kept)))

    step(model)

    assert len(order) > 3
    assert order == [one for one in reversed(copies) if one in order]


class LateGpu:
    """Streams whose copies happen when the computation waits for them, and no earlier.

    Memory that is freed belongs to somebody else at once: what is copied out of it then is not what was there, and to
    copy into it is an error.
    """

    def __init__(self, monkeypatch):
        self.computing, self.out, self.back = LateStream(), LateStream(is_out=True), LateStream()
        self._current = self.computing
        copy, empty = torch.Tensor.copy_, torch.empty

        def copy_late(target, source, non_blocking=False):
            if not non_blocking:
                return copy(target, source)
            assert self._current.has_waited, "it may not begin before what has been asked of the GPU until here"
            return self._current.add(target, source)

        def filled(*size, pin_memory=False, **options):
            made = empty(*size, **options)
            return made.fill_(255) if made.dtype == torch.uint8 else made  # nothing of use until it is written

        monkeypatch.setattr(torch.Tensor, "copy_", copy_late)
        monkeypatch.setattr(torch, "empty", filled)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        streams = activation_offload._Streams(self.out, self.back)
        monkeypatch.setattr(activation_offload._Streams, "of", lambda device: streams)

    @contextmanager
    def _on(self, stream):
        self._current = stream
        yield
        self._current, stream.has_waited = self.computing, False


class LateStream:
    def __init__(self, *, is_out=False):
        self._is_out = is_out
        self.has_waited, self.n_copies = False, 0
        self._late = []

    def wait_stream(self, stream):
        self.has_waited = True

    def wait_event(self, event):
        event()

    def record_event(self):
        until = self.n_copies
        return lambda: self.catch_up(until)

    def add(self, target, source):
        self.n_copies += 1
        ends = [StorageWeakRef(one.untyped_storage()) for one in (target, source)]
        self._late.append((self.n_copies, *ends))

    def catch_up(self, until):
        while self._late and self._late[0][0] <= until:
            _, *ends = self._late.pop(0)
            target, source = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in ends)
            if target is None:
                assert self._is_out, "somebody else's memory is written to"  # torch keeps page-locked memory until then
            elif source is None:
                target.fill_(255)
            else:
                target.copy_(source)


@pytest.fixture
def gpu(monkeypatch, copies):
    return LateGpu(monkeypatch)


@pytest.mark.parametrize("keeps_last", [True, False])
def test_copies_may_be_late(gpu, keeps_last):
    expected, gradients = step(model_on("cpu"))
    model = model_on("cpu")
    *blocks, last = model.blocks.values()
    offload(blocks if keeps_last else [*blocks, last], CPU, last=last if keeps_last else None)

    for _ in range(3):
        model.zero_grad()
        found, own = step(model)

        assert torch.equal(found, expected)
        assert all(torch.equal(got, want) for got, want in zip(own, gradients, strict=True))
    assert gpu.out.n_copies > 30
    # what backward comes to before it is freed does not come back
    assert (gpu.back.n_copies == gpu.out.n_copies) == keeps_last


def test_microbatches_of_a_pipeline_may_be_late(gpu):
    """Two are on their way at a time, and a backward in two halves comes back to its graph."""
    tokens = torch.arange(16).reshape(2, 8)
    expected, model = model_on("cpu"), model_on("cpu")
    offload(model.blocks.values(), CPU)
    for one in (expected, model):
        losses = []
        for order in range(4):
            losses.append(one((tokens + order) % 32, targets=tokens, loss=cross_entropy).total)
            if order:
                losses[order - 1].backward()
                losses[order].backward(retain_graph=True)
        losses[-1].backward()

    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(got.grad, want.grad) for got, want in pairs)


def test_memory_that_nothing_reads_waits_for_the_copy_into_it(gpu):
    model = model_on("cpu")
    *blocks, last = model.blocks.values()
    offload(blocks, CPU, last=last)
    tokens = torch.arange(16).reshape(2, 8)
    loss = model(tokens, targets=tokens, loss=cross_entropy).total

    torch.autograd.grad(loss, [last.up.weight])
    del loss

    assert gpu.back.n_copies > 0
    gpu.back.catch_up(gpu.back.n_copies)


def test_a_plan_sees_what_is_freed(copies):
    with FakeTensorMode():
        model = SmallModel(dim=16)
        *blocks, last = model.blocks.values()
        offload(blocks, CPU, last=last)

        alive, loss = alive_after_forward(model)
        loss.backward()

    assert alive == [False, False, True]
    assert [one for one in copies if one() is not None] == []


def test_a_graph_can_be_walked_twice(copies):
    """As zero-bubble schedules do."""
    model = model_on("cpu")
    offload(model.blocks.values(), CPU)
    total, gradients = step(model, keep=True)
    once = [gradient.clone() for gradient in gradients]

    total.backward()

    assert all(torch.equal(parameter.grad, 2 * g) for parameter, g in zip(model.parameters(), once, strict=True))


def test_an_error_in_a_block_leaves_no_hook_behind(copies):
    block = nn.Linear(4, 4)
    offload([block], CPU)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        block(torch.randn(2, 5))
    del copies[:]

    (torch.randn(4, requires_grad=True).exp()).sum().backward()

    assert copies == []


@pytest.fixture
def context():
    join_process_group(CPU)
    job = small_job()
    yield PassContext(build_mesh(job, CPU), job, CPU)
    torch.distributed.destroy_process_group()


def touched(context, n_layers=5, pp=1, **config):
    with torch.device("meta"):
        model = SmallModel(n_layers=n_layers)
    mesh = SimpleNamespace(degrees={**context.mesh.degrees, "pp": pp})
    config = ActivationCheckpointingConfig(mode="offload", **config)
    return list(ActivationCheckpointing(config).apply(model, attrs.evolve(context, mesh=mesh))[1])


def test_the_last_block_keeps_its_own(context):
    assert touched(context) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    assert touched(context, every=2) == ["blocks.0", "blocks.2"]


def test_every_block_of_a_stage_is_meant(context):
    """Other microbatches come before the backward of one."""
    assert touched(context, n_layers=2, pp=2) == ["blocks.0", "blocks.1"]


def test_a_model_of_one_block_has_nothing_to_offload(context):
    with pytest.raises(ConfigError, match="keeps the activations of the last block on the GPU, and no other is meant"):
        touched(context, n_layers=1)


class OnTwoRanks:
    """Losses and gradients under fsdp, compiled, with and without; of the latter, copies and graphs of each step."""

    def rank(self):
        plain = self.train([])
        activation_offload.SMALLEST, self.copies = 1, 0
        make = Kept.__init__

        def counted(*arguments):
            self.copies += 1
            make(*arguments)

        with mock.patch.object(Kept, "__init__", counted):
            offloading = ActivationCheckpointing(ActivationCheckpointingConfig(mode="offload"))
            return plain, self.train([offloading]), self.seen

    copies = 0

    def train(self, passes):
        job = attrs.evolve(small_job(), parallel=ParallelSection(dp_shard=2))
        context = PassContext(build_mesh(job, CPU), job, CPU)
        with torch.device("meta"):
            model = SmallModel()
        sharded = FullyShard(FullyShardConfig(reshard_after_forward="always"))
        for one in (*passes, Compile(CompileConfig()), sharded):
            one.apply(model, context)
        materialise(model, CPU, seed=0)
        steps, self.seen = [], []
        for _ in range(3):
            model.zero_grad()
            total, gradients = step(model)
            steps.append([total.detach(), *(gradient.full_tensor() for gradient in gradients)])
            self.seen.append((self.copies, counters["stats"]["unique_graphs"]))
        return steps


def test_compiled_blocks_that_ranks_share_are_what_they_are_without():
    for plain, offloaded, seen in on_ranks(OnTwoRanks, "rank", 2):
        copies, graphs = zip(*seen, strict=True)
        assert copies[0] > 10
        assert copies == (copies[0], 2 * copies[0], 3 * copies[0])
        assert len({*graphs}) == 1, "compiled once"
        for expected, found in zip(plain, offloaded, strict=True):
            assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_a_gpu_has_the_memory_for_itself():
    """The peak of a model of many blocks is nearer to that of recomputation than to that of keeping. What is freed but
    waits for a stream counts: it cannot be used."""

    def peak(prepare):
        model = model_on("cuda", n_layers=12, dim=512)
        *blocks, last = model.blocks.values()
        prepare(blocks, last)
        step(model, "cuda", length=512)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        step(model, "cuda", length=512)
        return torch.cuda.memory_stats()["active_bytes.all.peak"] - before

    offloaded = peak(lambda blocks, last: offload(blocks, torch.device("cuda"), last=last))
    assert offloaded < 0.6 * peak(lambda blocks, last: None)
