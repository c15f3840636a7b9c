"""Routers of a model that is frozen, by a pass or in a phase: what they have learned from data stays, bit for bit."""

import pytest
import torch

from forge_core.checkpoint.store import open_checkpoint
from forge_core.train.trainer import Trainer

ROUTER = '{name="sigmoid_topk", top_k=2, bias_rate=0.01, balance=0.01, balance_scope="global_batch"}'
MOE = f'{{name="moe", n_experts=4, hidden_dim=16, scale_gradients=true, router={ROUTER}}}'
SPARSE = [
    *(f"model.feed_forward={MOE}", "model.init_std=0.2"),  # tokens differ in their experts
    *("checkpoint.interval=1", "scheduler.name=constant"),
]
TWO = ("--nproc", "2", "train.batch_size=2", "train.grad_accumulation=2")
LEARNED = ("router.bias", "router.load_share", "experts.gradient_scale")
"""Buffers of a layer."""


def tensors(run, step):
    checkpoint = open_checkpoint(run / "checkpoints" / f"step_{step:08}")
    return {key: checkpoint.read(key) for key in checkpoint.saved_tensors() if key.startswith("model.")}


@pytest.fixture
def changed(shared_tiny):
    """The tensors of the model of a run that differ between two of its checkpoints."""

    def changed(run, before, after):
        old, new = (tensors(shared_tiny.path(run), step) for step in (before, after))
        return {key for key in new if not torch.equal(old[key], new[key])}

    return changed


def learned(layers=(0, 1)):
    return {f"model.blocks.{layer}.feed_forward.{name}" for layer in layers for name in LEARNED}


def test_adapters_leave_routing_as_it_is_so_that_they_are_all_of_the_difference(shared_tiny):
    shared_tiny.completed(*SPARSE, "run.name=base", "train.steps=2")
    base = shared_tiny.path("base")
    load = [f"checkpoint.load.path={base}", "parallel.passes.lora.rank=2"]

    lines = shared_tiny.completed(*SPARSE, *load, "run.name=adapted", "train.steps=3")

    before, after = tensors(base, 2), tensors(shared_tiny.path("adapted"), 3)
    assert before.keys() > learned()
    assert all(before[key].unique().numel() > 1 for key in learned()), "the run before it has moved them"
    assert {key for key, one in before.items() if not torch.equal(after[key], one)} == set()
    assert all(after[key].any() for key in after.keys() - before.keys()), "adapters are trained"
    violations = {line["load_violation/blocks.0.feed_forward"] for line in lines if "loss" in line}
    assert len(violations) > 1, "and what is reported is that of the step"


def test_a_step_that_is_left_out_leaves_routers_as_they_are_and_says_how_they_routed(shared_tiny, changed, monkeypatch):
    monkeypatch.setattr(Trainer, "_skip_asked", lambda self, _: self.step in (1, 3))  # as a callback asks

    lines = shared_tiny.completed(*SPARSE, "run.name=left_out", "train.steps=3")

    assert changed("left_out", 2, 3) == set()
    losses = {line["step"]: line for line in lines if "loss" in line}
    assert losses[1]["load_violation/blocks.0.feed_forward"] is not None, "as before any that counts"
    assert len({losses[step]["router_entropy/blocks.0.feed_forward.router"] for step in (1, 2, 3)}) == 3


def test_a_phase_that_freezes_a_router_holds_its_bias_and_the_next_one_moves_it_again(shared_tiny, changed):
    phases = 'phases=[{at=2, train=["*.attention.*", "blocks.1.*.experts.*"]}, {at=4}]'
    shared_tiny.completed(*SPARSE, "run.name=staged", "train.steps=4", phases)

    while_frozen = changed("staged", 1, 3)
    assert {key for key in while_frozen if ".feed_forward." in key and "blocks.1." not in key} == set()
    assert {key for key in while_frozen if ".router." in key} == set()
    assert "model.blocks.1.feed_forward.experts.gradient_scale" in while_frozen, "it is of what is trained"
    assert learned() <= changed("staged", 3, 4)


def test_what_comes_before_a_frozen_router_is_not_pushed_by_loads_of_the_past(shared_tiny):
    """It is trained as without the loss."""
    shared_tiny.completed(*SPARSE, "run.name=unbalanced", "train.steps=2")
    base = shared_tiny.path("unbalanced")
    begin = [f"checkpoint.load.path={base}", 'phases=[{at=1, train=["*.attention.*"]}]', "train.steps=2"]

    trained, lines = {}, {}
    for name, balance in (("balanced", 1.0), ("free", 0.0)):
        of_balance = f'balance={balance}, balance_scope="global_batch"' if balance else "balance=0.0"
        given = [one.replace('balance=0.01, balance_scope="global_batch"', of_balance) for one in SPARSE]
        lines[name] = shared_tiny.completed(*given, *begin, f"run.name={name}")
        trained[name] = tensors(shared_tiny.path(name), 2)

    assert tensors(base, 2)["model.blocks.0.feed_forward.router.load_share"].unique().numel() > 1
    assert all(torch.equal(trained["balanced"][key], one) for key, one in trained["free"].items())
    assert lines["balanced"][0]["auxiliary/load_balance"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["parallel.ep=2", "parallel.tp=2", "parallel.pp=2"])
def test_all_ranks_hold_it_alike(shared_tiny, changed, layout):
    """By day, cells of ``tests/parity`` compare steps of such runs."""
    name, phases = layout.replace("=", ""), 'phases=[{at=2, train=["*.attention.*"]}, {at=4}]'
    shared_tiny.completed(*SPARSE, f"run.name={name}", "train.steps=4", phases, layout, *TWO)

    assert changed(name, 1, 3)
    assert {key for key in changed(name, 1, 3) if ".attention." not in key} == set()
    assert learned() <= changed(name, 3, 4)


def test_a_run_resumed_within_the_phase_holds_it_too(shared_tiny, changed):
    phases = 'phases=[{at=2, train=["*.attention.*"]}]'
    shared_tiny.completed(*SPARSE, "run.name=resumed", "train.steps=2", phases)
    shared_tiny.completed(*SPARSE, "run.name=resumed", "train.steps=3", phases)

    assert changed("resumed", 2, 3)
    assert all(".attention." in key for key in changed("resumed", 2, 3))
