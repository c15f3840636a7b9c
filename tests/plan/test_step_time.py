"""The time of a step: what is recorded of it, and what a clock makes of that."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_plan.clock import FUSION, StuckError, step_time
from forge_plugins_plan.gpus import gpu_named
from forge_plugins_plan.machine import Links, link_seconds, published
from forge_plugins_plan.memory import MemoryLedger
from forge_plugins_plan.simulation import simulate
from forge_plugins_plan.timeline import Repeat
from forge_plugins_plan.work import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ATTENTION,
    MEMORY,
    PRODUCT,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
    Microbatch,
    Recorder,
    Work,
)
from forge_plugins_plan.world import rank_of

JOB = """
[model]
name = "transformer"
dim = 64
n_layers = 4
n_heads = 4
max_seq_len = 64
vocab_size = 256
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
seq_len = 64
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
"""
TOKENS, LAYERS, WIDTH = 2 * 64, 4, 64


@pytest.fixture(scope="module")
def catalog():
    return discover()


@pytest.fixture
def simulated(catalog, tmp_path):
    """A rank of the job with settings; stages of a pipeline one after the other."""

    def run(world_size, *settings, gpu=None, shorten=True, timed=True):
        file = tmp_path / "job.toml"
        file.write_text(JOB)
        job = load_job(file, settings, catalog=catalog, world_size=world_size)
        stages = [
            simulate(job, catalog, 256, world_size, stage, gpu, 8, shorten=shorten, timed=timed)
            for stage in range(job.parallel.pp)
        ]
        assert not any(one.reason for one in stages), stages[0].reason
        return stages

    return run


def sums(timeline, what):
    """By kind."""
    found = Counter()
    for one in timeline:
        if isinstance(one, Repeat):
            for kind, value in sums(one.changes, what).items():
                found[kind] += one.times * value
        elif isinstance(one, Work):
            found[one.kind] += what(one)
    return found


def flops(timeline):
    return sums(timeline, lambda one: one.flops)


def flops_of_products(rank):
    """6 a weight that is multiplied, and token: as the model says of sequences of no length."""
    return rank.built.parts[0].flops_per_token(0) * TOKENS


SPARSE = (
    "model.feed_forward.name=moe",
    "model.feed_forward.n_experts=8",
    "model.feed_forward.router.name=softmax_topk",
)


@pytest.mark.parametrize("settings", [(), ("model.n_layers=12",), SPARSE])
def test_products_and_attention_are_those_that_the_model_counts(simulated, settings):
    (rank,) = simulated(1, *settings)

    found = flops(rank.run)
    assert found[PRODUCT] == pytest.approx(flops_of_products(rank), rel=1e-9)
    layers = len(rank.built.parts[0].blocks)
    # forward two products over the square, flash attention's backward five
    assert found[ATTENTION] == (4 + 10) * layers * TOKENS * 64 * WIDTH


def test_recomputed_blocks_are_multiplied_once_more(simulated):
    (plain,), (full,) = simulated(1), simulated(1, "parallel.passes.activation_checkpointing.mode=full")

    head = 2 * TOKENS * WIDTH * 256
    last = 2 * TOKENS * 256 * WIDTH  # of each block, whose result nothing needs
    assert flops(full.run)[PRODUCT] - flops(plain.run)[PRODUCT] == flops_of_products(plain) / 3 - head - LAYERS * last


def test_gathers_and_reductions_of_fsdp_carry_each_parameter(simulated):
    (rank,) = simulated(8)

    sizes = sums(rank.run, lambda one: one.size)
    whole = 4 * rank.built.n_parameters
    assert sizes[REDUCE_SCATTER] == pytest.approx(whole, rel=0.01)  # shards are padded
    # forward all, backward the blocks again but the last, which is kept
    assert whole < sizes[ALL_GATHER] <= 2 * whole * 1.01
    assert all(one.overlaps for one in rank.run if isinstance(one, Work) and one.kind in (ALL_GATHER, REDUCE_SCATTER))
    assert {one.ranks_of_node for one in rank.run if isinstance(one, Work) and one.kind == ALL_GATHER} == {8}


def test_collectives_of_tensor_parallelism_carry_the_block_inputs_and_hide_behind_nothing(simulated):
    (rank,) = simulated(2, "parallel.tp=2")

    of_blocks = [
        one
        for one in rank.run
        if isinstance(one, Work) and one.kind in (ALL_GATHER, REDUCE_SCATTER) and one.size == 4 * TOKENS * WIDTH
    ]
    assert len(of_blocks) >= LAYERS * 8, "four gathers and four reductions a block, forward and backward"
    assert not any(one.overlaps for one in of_blocks)


@pytest.mark.parametrize(
    "settings",
    [
        ("train.precision=bf16",),
        ("parallel.passes.activation_checkpointing.mode=full",),
        pytest.param((), marks=pytest.mark.nightly),
    ],
)
def test_blocks_that_are_left_out_take_what_those_take_that_are_simulated(simulated, settings):
    h100 = gpu_named("h100")
    times = []
    for shorten in (True, False):
        (rank,) = simulated(4, "model.n_layers=12", *settings, gpu=h100, shorten=shorten)
        assert any(isinstance(one, Repeat) for one in rank.run) is shorten
        times.append(step_time([(rank.run, rank.optimizer.changes)], published(h100)))

    assert times[0].seconds == pytest.approx(times[1].seconds, rel=1e-9)
    assert times[0].parts == pytest.approx(times[1].parts, rel=1e-9)
    assert times[0].hidden == pytest.approx(times[1].hidden, rel=1e-9)


def test_recording_changes_nothing_of_the_memory(simulated):
    (plain,), (timed,) = simulated(4, "model.n_layers=12", timed=False), simulated(4, "model.n_layers=12")

    assert plain.memory == timed.memory


@attrs.frozen
class Made:
    """A machine that takes as many seconds as the work has bytes, and 0.25 to be asked."""

    runs_ahead: bool = True
    host_seconds: float = 0.0
    words: str = "made up"

    def peak_flops(self, dtype):
        return 1.0

    def seconds(self, work):
        return float(work.size)


def product(seconds):
    return Work(PRODUCT, "activations", size=seconds)


def gather(seconds):
    return Work(ALL_GATHER, "activations", size=seconds, ranks=2, overlaps=True)


def reduction(seconds):
    return Work(REDUCE_SCATTER, "activations", size=seconds, ranks=2, overlaps=True)


COPY_OUT = Work(MEMORY, "activations", size=0, overlaps=True)


def timed(run, changes=(), machine=None, microbatches=1, **given):
    return step_time([(run, changes)], machine or Made(), microbatches, **given)


def test_a_unit_is_gathered_while_the_one_before_it_is_computed():
    # gathered 0-2, computed 2-5; the next one gathered 2-6, a second of it exposed, computed 6-9
    time = timed([gather(2), COPY_OUT, product(3), gather(4), COPY_OUT, product(3)])

    assert time.seconds == 9
    assert time.parts["products"] == 6
    assert time.parts["communication"] == 3
    assert time.hidden == 3


def test_gradients_are_reduced_while_the_next_ones_are_computed_and_the_last_ones_after():
    time = timed([product(3), reduction(2), product(3), reduction(2)], [Work(MEMORY, "optimizer", size=1)])

    assert time.seconds == 3 + 3 + 2 + 1
    assert (time.parts["communication"], time.parts["optimizer"], time.hidden) == (2, 1, 2)


def test_on_a_cpu_everything_comes_after_the_other_and_each_operation_is_asked_for():
    machine = Made(runs_ahead=False, host_seconds=0.25)

    time = timed([gather(2), COPY_OUT, product(3), reduction(2)], machine=machine)

    assert time.seconds == 2 + 3 + 2 + 4 * 0.25
    assert (time.parts["communication"], time.parts["host"], time.hidden) == (4, 1, 0)


def test_a_device_that_is_faster_than_python_waits_for_it():
    time = timed([product(1)] * 4, machine=Made(host_seconds=3.0))

    assert time.seconds == 4 * 3 + 1
    assert time.parts["host"] == 9


def test_compiled_blocks_move_fewer_bytes_and_are_asked_for_at_once():
    run = [Work(MEMORY, "activations", size=26), product(1)]

    time = timed(run, [Work(MEMORY, "optimizer", size=26)], Made(host_seconds=0.0), compiled=True)

    assert time.parts["memory"] == pytest.approx(26 / FUSION)
    assert time.parts["optimizer"] == 26


def test_microbatches_in_the_middle_take_what_the_shorter_of_the_others_takes():
    run = [Microbatch(0), product(3), Microbatch(1), product(3), reduction(2)]

    assert timed(run).seconds == 3 + 5
    assert timed(run, microbatches=10).seconds == 8 * 3 + 3 + 5


def test_what_comes_again_takes_as_long_as_if_it_were_written_out():
    turn = [gather(4), COPY_OUT, product(3), reduction(2), product(1)]
    run = [product(2), gather(1), COPY_OUT]

    assert timed([*run, Repeat(turn, 9), product(5)]) == timed([*run, *(turn * 9), product(5)])


def send(to):
    return Work(SEND, "activations", size=0, ranks=2, ranks_of_node=2, peer=to)


def receive(of, number):
    return Work(RECEIVE, "activations", size=0, ranks=2, ranks_of_node=2, peer=of, number=number)


def test_what_is_received_is_waited_for_where_it_is_read():
    """Not by what has its memory after it, if it is freed before it is read."""
    with rank_of(2, 0, 8), FakeTensorMode(), MemoryLedger(Recorder(8)) as ledger:
        kept, dropped = torch.empty(4), torch.empty(4)
        dist.recv(kept, src=1)
        dist.recv(dropped, src=1)
        del dropped
        for _ in range(100):
            torch.empty(4).add_(1)
        assert RECEIVE not in kinds(ledger.log)
        kept.add_(1)

    assert kinds(ledger.log)[-2:] == [RECEIVE, MEMORY]
    assert kinds(ledger.log).count(RECEIVE) == 1


def kinds(log):
    return [one.kind for one in log if isinstance(one, Work)]


def test_stages_wait_for_each_other_as_long_as_the_schedule_has_them_wait():
    """All forwards before all backwards, of ``m`` microbatches on ``p`` stages: ``(m + p - 1)`` times both."""
    forward, backward, m = 1, 2, 4
    first, last = [product(forward), send(1)] * m, []
    for number in range(m):
        first += [receive(1, number), product(backward)]
        last += [receive(0, number), product(forward)]
    last += [product(backward), send(0)] * m

    time = step_time([(first, ()), (last, ())], Made())

    assert time.seconds == (m + 1) * (forward + backward)
    assert time.parts["bubble"] == forward + backward


def test_stages_that_wait_for_ever_are_found():
    with pytest.raises(StuckError):
        step_time([([receive(1, 0), product(1)], ()), ([receive(0, 0), product(1)], ())], Made())


@pytest.mark.parametrize(
    "schedule",
    ["1F1B", "Interleaved1F1B", pytest.param("GPipe", marks=pytest.mark.nightly)],  # of 1F1B's formula
)
def test_the_bubble_of_a_real_schedule_is_that_of_its_formula(simulated, schedule):
    """``(p - 1) / v`` microbatches of ``m``, of which each takes as long on all stages: here they have no head."""
    pp, m = 2, 4
    v = 2 if schedule.startswith("Interleaved") else 1
    stages = simulated(
        *(pp, f"parallel.pp={pp}", f"train.grad_accumulation={m}", f"parallel.passes.pipeline.schedule={schedule}")
    )

    class OfBlocks(Made):
        def seconds(self, work):
            return float(work.kind == ATTENTION)

    time = step_time([(one.run, one.optimizer.changes) for one in stages], OfBlocks())

    busy = time.parts["attention"]
    assert busy == 2 * m * LAYERS / pp
    assert time.parts["bubble"] == pytest.approx(busy / m * (pp - 1) / v)


WITHIN, BETWEEN = Links(1.0, 10.0), Links(2.0, 4.0)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(ALL_GATHER, size=80, ranks=4, ranks_of_node=4), 1 + 80 * 3 / 4 / 10),
        (Work(ALL_REDUCE, size=80, ranks=4, ranks_of_node=4), 1 + 2 * 80 * 3 / 4 / 10),
        # 3 of 4 nodes' parts come over the cards of both ranks of a node
        (Work(REDUCE_SCATTER, size=80, ranks=8, ranks_of_node=2), 2 + 80 * 6 / 8 / (2 * 4)),
        (Work(ALL_TO_ALL, size=80, ranks=8, ranks_of_node=2), 2 + 80 * 6 / 8 / 4),
        (Work(SEND, size=80, ranks=8, ranks_of_node=8), 1 + 80 / 10),
        (Work(SEND, size=80, ranks=8, ranks_of_node=2), 2 + 80 / 4),
    ],
)
def test_a_collective_is_as_slow_as_its_slowest_links(work, seconds):
    assert link_seconds(work, WITHIN, BETWEEN) == pytest.approx(seconds)


def test_published_figures_are_of_the_slower_of_flops_and_bytes():
    h100 = published(gpu_named("h100"))

    large = Work(PRODUCT, dtype="bfloat16", flops=1e12, size=10**6)
    thin = Work(PRODUCT, dtype="bfloat16", flops=1e6, size=10**9)
    assert h100.seconds(large) == pytest.approx(1e12 / (989e12 * 0.77))
    assert h100.seconds(thin) == pytest.approx(1e9 / (3.35e12 * 0.83))
    assert h100.seconds(large._replace(dtype="float32")) == pytest.approx(1e12 / (67e12 * 0.77))
    assert h100.seconds(large._replace(dtype="float8_e4m3fn")) == pytest.approx(1e12 / (2 * 989e12 * 0.77))
    whole, causal = (h100.seconds(large._replace(kind=ATTENTION, form=form)) for form in ("whole", "causal"))
    assert whole == 2 * causal == pytest.approx(1e12 / (989e12 * 0.5))
