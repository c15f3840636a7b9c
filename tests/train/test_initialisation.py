import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from forge_core.contracts.model import canonical_name
from forge_core.errors import PluginError
from forge_core.train.initialisation import SeededInitializer, initialise


class Small(nn.Module):
    def __init__(self, order=1):
        super().__init__()
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(5, 2, bias=False)
        self.register_buffer("scale", torch.empty(4), persistent=False)
        self.order = order

    def init_weights(self, rng):
        tensors = [*self.named_parameters(), *self.named_buffers()][:: self.order]
        for name, tensor in tensors:
            rng.fill(name, tensor, lambda full, generator: full.normal_(generator=generator))


def test_values_depend_on_seed_and_name_and_not_on_order():
    one, other, reseeded = Small(), Small(order=-1), Small()
    initialise(one, 1)
    initialise(other, 1)
    initialise(reseeded, 2)

    for (name, tensor), again, different in zip(
        one.state_dict().items(), other.state_dict().values(), reseeded.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, again), name
        assert not torch.equal(tensor, different), name
    assert not torch.equal(one.a.weight.flatten()[:5], one.b.weight.flatten()[:5])


def test_each_layer_of_a_stack_has_values_of_its_own_and_a_rank_those_of_its_part():
    def fill(like):
        SeededInitializer(1).fill_each("up", like, lambda full, generator: full.normal_(generator=generator))
        return like

    whole = fill(torch.empty(6, 4, 5))
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        mesh, cuts = init_device_mesh("cpu", (2, 2)), [Shard(0), Shard(2)]
        part = DTensor.from_local(
            torch.empty(3, 4, 2), mesh, cuts, run_check=False, shape=whole.shape, stride=whole.stride()
        )

        assert torch.equal(fill(part).to_local(), whole[3:, :, 3:])
    finally:
        dist.destroy_process_group()
    assert len({layer[0, 0].item() for layer in whole}) == 6


def test_a_forgotten_tensor_is_refused_by_name():
    class Forgetful(Small):
        def init_weights(self, rng):
            for name, tensor in self.named_parameters():
                rng.fill(name, tensor, lambda full, generator: full.zero_())

    with pytest.raises(PluginError, match=r"Forgetful.init_weights leaves scale uninitialised"):
        initialise(Forgetful(), 1)


def test_and_so_is_the_module_that_it_is_in():
    class Forgetful(Small):
        def init_weights(self, rng):
            rng.fill("scale", self.scale, lambda full, generator: full.zero_())

    with pytest.raises(PluginError, match=r"leaves a\.bias, .* bug in the model or in Linear, whose a\.bias is\."):
        initialise(Forgetful(), 1)


def test_a_name_that_is_not_in_the_model_is_refused():
    class Misnaming(Small):
        def init_weights(self, rng):
            super().init_weights(rng)
            rng.fill("a.wieght", self.a.weight, lambda full, generator: full.zero_())

    with pytest.raises(PluginError, match=r"fills unknown a\.wieght"):
        initialise(Misnaming(), 1)


def test_names_are_those_of_the_model_as_it_was_built():
    assert canonical_name("blocks.0._orig_mod.a._checkpoint_wrapped_module.weight") == "blocks.0.a.weight"


def test_values_drawn_on_a_device_arrive_in_memory_elsewhere():
    """``cpu:0`` is the CPU, and unequal to ``cpu``: a second device that every machine has."""
    here, elsewhere = Small(), Small()
    drawn = []

    def init_weights(rng):
        for name, tensor in [*elsewhere.named_parameters(), *elsewhere.named_buffers()]:
            rng.fill(name, tensor, lambda full, generator: drawn.append(full.normal_(generator=generator)))

    elsewhere.init_weights = init_weights
    initialise(here, 1)
    initialise(elsewhere, 1, torch.device("cpu", 0))

    memory = {tensor.data_ptr() for tensor in [*elsewhere.parameters(), *elsewhere.buffers()]}
    assert not memory & {full.data_ptr() for full in drawn}
    assert len(drawn) == len(memory)
    for (name, tensor), other in zip(here.named_parameters(), elsewhere.parameters(), strict=True):
        assert torch.equal(tensor, other), name
