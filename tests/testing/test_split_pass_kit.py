"""The split-pass kit passes a pass that keeps the contract, and has a sentence for each way to break it.

The passes here cut the model into two parts that one rank runs, so that no processes need to be started.
"""

import copy

import pytest
import torch

from forge_core.contracts.loss import LossSum
from forge_core.errors import ConfigError
from forge_testing.several_ranks import on_ranks
from forge_testing.split_pass import SplitPassConformance


class Halves:
    """Cuts after the first half of the blocks."""

    def split(self, model, context):
        if model.head.weight is model.embed.weight:
            raise ConfigError("the head is tied to the embedding, which is in another part")
        if len(model.blocks) < 2:
            raise ConfigError("one block cannot be halved")
        first, last = copy.deepcopy(model), copy.deepcopy(model)
        keys = list(model.blocks)
        for part, others in ((first, keys[len(keys) // 2 :]), (last, keys[: len(keys) // 2])):
            for key in others:
                del part.blocks[key]
        last.embed = first.norm = first.head = None
        return [first, last], ["embed", *(f"blocks.{key}" for key in keys), "norm", "head"]

    def executor(self, parts, loss, context):
        return Chain(parts, loss)


class Chain:
    def __init__(self, parts, loss):
        self.parts, self.loss = parts, loss

    def run(self, microbatches, scale):
        totals = []
        for batch in microbatches:
            total = self.forward(batch).total
            (total * scale).backward()
            totals.append(total.detach())
        return torch.stack(totals).sum()

    @torch.no_grad()
    def evaluate(self, batch):
        summed = self.forward(batch)
        return summed.total, summed.count

    def forward(self, batch):
        inputs = {**batch}
        hidden = inputs.pop("tokens")
        for part in self.parts:
            hidden = part(hidden, loss=self.loss, **inputs)
        return hidden


class Case(SplitPassConformance):
    degrees = {"pp": 1}
    split_pass = Halves

    def make(self):
        return self.split_pass()


class TestHalves(Case):
    pass


def cut(change):
    """``Halves``, with something done to what it gives."""

    def split(self, model, context):
        parts, touched = Halves.split(self, model, context)
        return change(parts, touched)

    return type("Faulty", (Halves,), {"split": split})


def run(**methods):
    """``Halves``, with another executor."""
    chain = type("FaultyChain", (Chain,), methods)
    return type("Faulty", (Halves,), {"executor": lambda self, parts, loss, context: chain(parts, loss)})


def forget_a_block(parts, touched):
    del parts[0].blocks["1"]
    return parts, touched


def hold_a_block_twice(parts, touched):
    parts[1].blocks.update({"1": copy.deepcopy(parts[0].blocks["1"])})
    return parts, touched


def rename_blocks(parts, touched):
    for part in parts:
        part.blocks = torch.nn.ModuleDict({str(int(key) % 2): block for key, block in part.blocks.items()})
    return parts, touched


def norm_in_the_first(parts, touched):
    parts[0].norm, parts[1].norm = parts[1].norm, None
    return parts, touched


def declare_too_much(parts, touched):
    roles = parts[0].parameter_roles()
    parts[0].parameter_roles = lambda: {**roles, "head.weight": "head"}
    return parts, touched


def start_elsewhere(parts, touched):
    initial = parts[1].init_weights
    parts[1].init_weights = lambda rng: (initial(rng), parts[1].head.weight.detach().mul_(2))
    return parts, touched


class Backwards(Halves):
    """Gives the last part first."""

    def split(self, model, context):
        parts, touched = super().split(model, context)
        return parts[::-1], touched

    def executor(self, parts, loss, context):
        return Chain(parts[::-1], loss)


class Trusting(Halves):
    """Cuts whatever it is given."""

    def split(self, model, context):
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        return super().split(model, context)


class Brittle(Halves):
    def split(self, model, context):
        list(model.blocks)[1]
        return super().split(model, context)


def the_mean(self, microbatches, scale):
    return Chain.run(self, microbatches, scale) / len(microbatches)


def in_double(self, microbatches, scale):
    return Chain.run(self, microbatches, scale).double()


def scaled_by_microbatches(self, microbatches, scale):
    return Chain.run(self, microbatches, scale / len(microbatches))


def afresh(self, microbatches, scale):
    for part in self.parts:
        part.zero_grad()
    return Chain.run(self, microbatches, scale)


def without_documents(self, batch):
    return Chain.evaluate(self, {key: value for key, value in batch.items() if key != "document"})


def count_in_float(self, batch):
    total, count = Chain.evaluate(self, batch)
    return total, count.float()


def count_all(self, batch):
    total, _ = Chain.evaluate(self, batch)
    return LossSum(total, torch.tensor(batch["targets"].numel()))


def evaluate_and_learn(self, batch):
    result = Chain.forward(self, batch)
    result.total.backward()
    return result.total.detach(), result.count


FAULTS = [
    (cut(lambda parts, _: (parts, ["blocks.9"])), "test_names_what_each_rank_holds", "'blocks.9', which is not a mod"),
    (cut(lambda parts, _: (parts, ["embed"])), "test_names_what_each_rank_holds", "holds blocks.0.*, in no module"),
    (cut(forget_a_block), "test_each_tensor_is_in_one_part_under_its_name", "differ in blocks.1.attention_norm"),
    (cut(hold_a_block_twice), "test_each_tensor_is_in_one_part_under_its_name", "blocks.1.*: held twice"),
    (Backwards, "test_parts_are_pieces_of_the_sequence", r"parts in the order of blocks \[2, 0\]"),
    (
        cut(rename_blocks),
        "test_parts_are_pieces_of_the_sequence",
        "are embed, blocks.0, blocks.1, blocks.0, blocks.1, ",
    ),
    (cut(norm_in_the_first), "test_parts_are_pieces_of_the_sequence", "blocks.1, norm, blocks.2, blocks.3, head; the"),
    (cut(declare_too_much), "test_parts_keep_the_model_contract", "of a part differ in head.weight"),
    (cut(start_elsewhere), "test_parts_start_with_the_values_of_the_whole", "head.weight starts with other values"),
    (Trusting, "test_tied_tensors_stay_together_or_are_refused", "has (embed|head).weight of a model that ties"),
    (Brittle, "test_a_model_of_one_block_is_cut_or_refused", "raises IndexError: list index out of range instead of"),
    (
        run(run=the_mean),
        "test_a_step_has_the_loss_of_the_whole",
        "the losses of all ranks sum to .* summed over tokens",
    ),
    (run(run=in_double), "test_a_step_has_the_loss_of_the_whole", "must give an fp32 scalar, got torch.float64"),
    (run(run=scaled_by_microbatches), "test_a_step_has_the_gradients_of_the_whole", "after one step is off by 0.75"),
    (run(run=afresh), "test_gradients_are_added_up", "after two steps without clearing it is off by 0.5"),
    (run(evaluate=without_documents), "test_evaluates_the_loss_of_the_whole", "evaluate gives .* and the whole model"),
    (run(evaluate=count_in_float), "test_evaluates_the_loss_of_the_whole", "an int64 count, got .* torch.float32"),
    (
        run(evaluate=count_all),
        "test_evaluates_the_loss_of_the_whole",
        "counts 24 valid tokens on all ranks together, and there are 21",
    ),
    (
        run(evaluate=evaluate_and_learn),
        "test_evaluation_leaves_gradients_alone",
        "changes the gradient of embed.weight",
    ),
]


@pytest.mark.parametrize(("split_pass", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(split_pass, check, sentence):
    case = type("FaultyCase", (Case,), {"split_pass": split_pass})()

    with pytest.raises(AssertionError, match=sentence):
        getattr(case, check)()


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(SplitPassConformance) if name.startswith("test_")}

    assert {check for _, check, _ in FAULTS} == checks


class Places:
    def rank(self):
        return torch.distributed.get_rank(), torch.distributed.get_world_size()

    def fail_on_one(self):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("the second stage is lost")
        torch.distributed.barrier()


def test_a_method_runs_on_each_rank():
    assert on_ranks(Places, "rank", 1) == [(0, 1)]
    assert on_ranks(Places, "rank", 2) == [(0, 2), (1, 2)]


@pytest.mark.usefixtures("aborting_teardown")
def test_a_rank_that_would_abort_as_torch_is_unloaded_has_not_failed():
    assert on_ranks(Places, "rank", 2) == [(0, 2), (1, 2)]


def test_what_a_rank_says_before_it_fails_is_shown():
    with pytest.raises(AssertionError, match=r"(?s)of 2 ranks fail\n.*rank 1: .*the second stage is lost"):
        on_ranks(Places, "fail_on_one", 2)


def test_a_class_that_no_other_process_can_find_is_refused():
    class Hidden(Places):
        pass

    with pytest.raises(AssertionError, match="must be defined at the top level"):
        on_ranks(Hidden, "rank", 2)
