"""The pass kit passes a pass that keeps the contract, and has a sentence for each way to break it."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from forge_core.distributed.mesh import join_process_group
from forge_testing.parallel_pass import ParallelPassConformance


class Checkpointing:
    def apply(self, model, context):
        for name, block in model.blocks.items():
            model.blocks[name] = checkpoint_wrapper(block)
        return model, [f"blocks.{name}" for name in model.blocks]


class Case(ParallelPassConformance):
    transform = Checkpointing

    def make(self):
        return self.transform()


class TestCheckpointing(Case):
    pass


class TestFullyShard(ParallelPassConformance):
    component = "forge-plugins-parallel:fsdp"


class TestFullyShardInBf16(ParallelPassConformance):
    component = "forge-plugins-parallel:fsdp"
    precision = "bf16"
    tolerance = 3e-2


def faulty(apply):
    return type("Faulty", (), {"apply": lambda self, model, context: apply(model)})


def touched(*names):
    return faulty(lambda model: (model, names))


class Scaled(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 1.01


def swap(cls):
    def apply(model):
        for block in model.blocks.values():
            block.up.__class__ = cls
        return model, ["blocks.0.up"]

    return faulty(apply)


class Noisy(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * (1.01 if not self.training else 1.0)


class Detached(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden).detach()


class Reweighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class WrongBackward(nn.Linear):
    def forward(self, hidden):
        return Reweighted.apply(super().forward(hidden))


def drop_a_block(model):
    del model.blocks["1"]
    return model, ["blocks"]


def wrap_whole(model):
    return nn.Sequential(model), [""]


def wrap_block(model):
    model.blocks["0"].up = nn.Sequential(model.blocks["0"].up)
    return model, ["blocks.0.up"]


def narrow(model):
    model.head = nn.Linear(16, 8, bias=False, device="meta")
    return model, ["head"]


def other_values(model):
    initial = model.init_weights
    model.init_weights = lambda rng: (initial(rng), model.head.weight.detach().mul_(2))
    return model, ["head"]


def other_roles(model):
    roles = model.parameter_roles()
    model.parameter_roles = lambda: {name: role for name, role in roles.items() if name != "head.weight"}
    return model, ["head"]


FAULTS = [
    (touched(), "test_names_what_it_touched", "the pass touched nothing"),
    (touched("blocks.9"), "test_names_what_it_touched", "touched 'blocks.9', which is not a module of the model"),
    (faulty(drop_a_block), "test_the_model_keeps_its_declarations", r"are \['0', '2'\] after the pass"),
    (faulty(other_roles), "test_the_model_keeps_its_declarations", "differ in head.weight"),
    (
        faulty(wrap_block),
        "test_parameters_keep_their_names_and_shapes",
        "renames, adds or removes blocks.0.up.0.weight",
    ),
    (faulty(narrow), "test_parameters_keep_their_names_and_shapes", r"head.weight has the global shape \(8, 16\)"),
    (faulty(other_values), "test_parameters_keep_their_initial_values", "head.weight starts with other values"),
    (swap(Scaled), "test_computes_the_same", "the loss is .* with the pass and .* without; tolerance says 1e-05"),
    (swap(Detached), "test_computes_the_same", "no gradient reaches blocks.0.up_norm.weight with the pass"),
    (swap(WrongBackward), "test_computes_the_same", "the gradient of .* is off by"),
    (swap(Noisy), "test_evaluates_as_it_trains", "in training and .* in evaluation"),
]


@pytest.mark.parametrize(("transform", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(one_rank, transform, check, sentence):
    case = Case()
    case.transform = transform

    with pytest.raises(AssertionError, match=sentence):
        getattr(case, check)()


@pytest.fixture
def one_rank():
    join_process_group(torch.device("cpu"))
    yield
    torch.distributed.destroy_process_group()


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(ParallelPassConformance) if name.startswith("test_")}

    assert {check for _, check, _ in FAULTS} == checks
