"""What follows from a few blocks is what all of them do: plans of shortened models against those of whole ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining.stage import _PipelineStageBase

from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_parallel import pipeline_stage
from forge_plugins_plan import chunks, microbatches, repeated, simulation
from forge_plugins_plan.alike import alike
from forge_plugins_plan.simulation import simulate
from forge_plugins_plan.timeline import Change, Repeat, Tally
from forge_plugins_plan.work import Work

JOB = """
[model]
name = "transformer"
dim = 32
n_layers = 8
n_heads = 4
max_seq_len = 64
vocab_size = 300
[data]
name = "text_files"
path = "unused"
[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "bf16"
[optimizer]
name = "adamw"
lr = 1e-3
"""
FULL = "parallel.passes.activation_checkpointing.mode=full"
SELECTIVE = "parallel.passes.activation_checkpointing.mode=selective"
SPARSE = (
    "model.feed_forward.name=moe",
    "model.feed_forward.n_experts=8",
    "model.feed_forward.router.name=sigmoid_topk",
    "model.feed_forward.first_dense=2",
)
MUON = (
    'optimizer={name="grouped", groups=[{roles=["matrix"], optimizer={name="muon", lr=1e-3}}, '
    '{optimizer={name="adamw", lr=1e-3}}]}'
)
ENCODER = (
    "model.name=vision_language",
    "model.connector.name=mlp",
    *("model.dim=32", "model.n_layers=10", "model.n_heads=4"),
    "model.encoder.name=siglip",
    *(f"model.encoder.architecture.{key}" for key in ("hidden_size=16", "intermediate_size=32", "image_size=28")),
    *(f"model.encoder.architecture.{key}" for key in ("num_hidden_layers=8", "num_attention_heads=2", "patch_size=14")),
)
TWICE = "train.grad_accumulation=2"


@pytest.fixture(scope="module")
def catalog():
    return discover()


@pytest.fixture(scope="module")
def job_of(catalog, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")

    def load(world_size, *settings):
        file = folder / "job.toml"
        file.write_text(JOB)
        return load_job(file, settings, catalog=catalog, world_size=world_size)

    return load


@pytest.fixture
def left_out(monkeypatch):
    """How many blocks the simulations so far have left out, those that had to be run again whole not counted."""
    counts = []
    lengthened = simulation.lengthened

    def noted(log, found, *given):
        timeline = lengthened(log, found, *given)
        counts.append(sum(len(turn) for one in found for turn in one.left_out))
        return timeline

    monkeypatch.setattr(simulation, "lengthened", noted)
    return counts


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (4, [TWICE, "parallel.passes.fsdp.accumulate=sharded", "model.tie_embeddings=true"]),
        (8, ["parallel.tp=2", "parallel.dp_replicate=2", SELECTIVE]),
        (4, ["parallel.ep=2", *SPARSE]),
        (4, [TWICE, "parallel.dp_replicate=2"]),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)  # other options of the same passes, and what takes longest
            for case in [
                (1, [TWICE, FULL, "model.tie_embeddings=true"]),
                (4, [TWICE, "parallel.passes.fsdp.accumulate=sharded"]),
                (1, ["train.precision=fp32"]),
                (4, [SELECTIVE, "parallel.passes.fsdp.reshard_after_forward=never"]),
                (4, [TWICE, "parallel.passes.fsdp.keep_gathered=true", "loss.name=chunked_cross_entropy"]),
                (4, ["parallel.cp=2", FULL]),
                (4, ENCODER),
                (4, ["model.n_layers=17", "model.window=8", 'model.layers=[{at="2::3", window=0}]', FULL]),
                (1, ["model.n_layers=20", FULL, "parallel.passes.activation_checkpointing.every=2"]),
                (4, [TWICE, FULL, *SPARSE]),
                (4, ["train.grad_accumulation=3", "parallel.dp_replicate=2", "parallel.ep=2", FULL, *SPARSE]),
                (4, ["parallel.passes.lora.rank=4"]),
                (4, ["parallel.passes.compile=true", MUON]),
                (4, ["parallel.pp=2", "train.grad_accumulation=4", "model.n_layers=22"]),
                (2, ["parallel.pp=2", "train.grad_accumulation=4", "model.n_layers=22", FULL, "train.precision=fp32"]),
            ]
        ),
    ],
)
def test_a_shortened_model_does_what_the_whole_one_does(catalog, job_of, left_out, world_size, settings):
    job = job_of(world_size, *settings)
    for stage in range(job.parallel.pp):
        short = simulate(job, catalog, 300, world_size, stage, timed=True)
        assert short.reason == ""
        assert left_out.pop() > 0
        whole = simulate(job, catalog, 300, world_size, stage, shorten=False, timed=True)

        assert short.memory == whole.memory
        assert short.parameter_bytes == whole.parameter_bytes
        assert played(short.run) == list(whole.run)


def played(timeline):
    """Without ``Repeat``."""
    each = [[*one.changes] * one.times if isinstance(one, Repeat) else [one] for one in timeline]
    return [one for some in each for one in some]


@pytest.fixture
def repeated_microbatches(monkeypatch):
    """The numbers of those that were not simulated."""
    numbers = set()
    forward = microbatches.Replay._forward

    def noted(self, stage, key):
        numbers.add(key[2])
        return forward(self, stage, key)

    monkeypatch.setattr(microbatches.Replay, "_forward", noted)
    return numbers


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("1F1B", ["parallel.tp=2", "model.n_layers=2"]),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("1F1B", [FULL, "train.precision=fp32"]),
                ("1F1B", SPARSE),
                ("GPipe", [SELECTIVE]),
                ("Interleaved1F1B", []),
                ("Interleaved1F1B", ["model.n_layers=24", FULL]),
            ]
        ),
    ],
)
def test_microbatches_of_a_pipeline_that_are_repeated_do_what_simulated_ones_do(
    catalog, job_of, repeated_microbatches, schedule, settings
):
    pipeline = ["parallel.pp=2", "train.grad_accumulation=8", f"parallel.passes.pipeline.schedule={schedule}"]
    job = job_of(4, "model.n_layers=6", *pipeline, *settings)
    for stage in range(2):
        short = simulate(job, catalog, 300, 4, stage, timed=True)
        assert repeated_microbatches >= {5, 6}
        whole = simulate(job, catalog, 300, 4, stage, shorten=False, timed=True)

        assert short.reason == ""
        assert short.memory == whole.memory
        if "model.n_layers=24" not in settings:  # no blocks are left out
            assert list(short.run) == list(whole.run)


@pytest.mark.parametrize(
    "schedule",
    [
        "ZBVZeroBubble",
        pytest.param("InterleavedZeroBubble", marks=pytest.mark.nightly),
        pytest.param("DualPipeV", marks=pytest.mark.nightly),
    ],
)
def test_all_microbatches_are_simulated_where_backwards_are_split(catalog, job_of, schedule):
    pipeline = ["parallel.pp=2", "train.grad_accumulation=6", f"parallel.passes.pipeline.schedule={schedule}"]
    job = job_of(4, "model.n_layers=4", *pipeline)
    for stage in range(2):
        short = simulate(job, catalog, 300, 4, stage, timed=True)
        whole = simulate(job, catalog, 300, 4, stage, shorten=False, timed=True)

        assert short.memory == whole.memory
        assert list(short.run) == list(whole.run)


def test_microbatches_that_hang_on_what_is_done_before_them_are_simulated(catalog, job_of):
    """A unit that forward frees is gathered by a backward after it, and not by a backward after a backward."""
    always = "parallel.passes.fsdp.reshard_after_forward=always"
    job = job_of(8, "model.n_layers=4", "parallel.pp=4", "train.grad_accumulation=12", always)

    short = simulate(job, catalog, 300, 8, 0, timed=True)
    whole = simulate(job, catalog, 300, 8, 0, shorten=False, timed=True)

    assert short.memory == whole.memory
    assert list(short.run) == list(whole.run)


def test_what_autograd_holds_of_what_is_sent_is_freed_by_backwards(catalog, job_of, repeated_microbatches, monkeypatch):
    monkeypatch.setattr(pipeline_stage, "_to_send", lambda output, _: output.exp())
    job = job_of(4, "model.n_layers=2", "parallel.pp=2", "train.grad_accumulation=6")

    short = simulate(job, catalog, 300, 4, 0)
    whole = simulate(job, catalog, 300, 4, 0, shorten=False)

    assert repeated_microbatches == {3, 4}
    assert list(short.run) == list(whole.run)


@pytest.mark.skipif(not hasattr(_PipelineStageBase, chunks.RELEASE), reason="torch before 2.15 drops none")
def test_outputs_without_memory_are_dropped_as_real_ones_once_they_have_been_sent():
    stage = SimpleNamespace(is_last=False, submod=nn.Linear(2, 2), dw_builder=None)
    with FakeTensorMode():
        output = torch.empty(2)

    method = _PipelineStageBase._output_slot_is_releasable

    assert method(stage, output)[0] is False
    assert chunks.releasable(method)(stage, output) == method(stage, torch.empty(2)) == (True, "")


@pytest.fixture(scope="module")
def recomputed(catalog, job_of):
    """A job, the simulation of one that recomputes nothing, and its own memory when all of it is simulated."""
    plain, recomputed = (job_of(4, TWICE, *more) for more in ([], [FULL]))
    return (
        recomputed,
        simulate(plain, catalog, 300, 4, 0),
        simulate(recomputed, catalog, 300, 4, 0, shorten=False).memory,
    )


@pytest.mark.parametrize(("is_seen", "expected"), [(False, 2), (True, 3)])
def test_the_optimizers_step_serves_other_ways_to_recompute(catalog, recomputed, left_out, is_seen, expected):
    job, plain, whole = recomputed

    short = simulate(job, catalog, 300, 4, 0, like=plain.optimizer, seen=plain.found if is_seen else ())

    assert left_out == [expected]
    assert short.memory == whole


def test_the_optimizers_step_serves_microbatches_of_another_size(catalog, job_of, left_out):
    small, large = (job_of(1, "model.n_layers=6", f"train.batch_size={size}") for size in (2, 4))
    known = simulate(small, catalog, 300, 1, 0)

    short = simulate(large, catalog, 300, 1, 0, like=known.optimizer, seen=known.found)
    whole = simulate(large, catalog, 300, 1, 0, shorten=False)

    assert left_out[-1] == 2
    assert short.memory == whole.memory


def test_one_turn_more_is_simulated_where_too_few_are_alike(catalog, recomputed, left_out, monkeypatch):
    job, plain, whole = recomputed
    middle = repeated._middle

    def strict(turns, like):
        if len(turns) < 4:
            raise repeated.TooFewTurnsError
        return middle(turns, like)

    monkeypatch.setattr(repeated, "_middle", strict)

    assert simulate(job, catalog, 300, 4, 0, like=plain.optimizer, seen=plain.found).memory == whole
    assert left_out == [1]


def test_an_optimizers_step_over_other_parameters_is_run_anew(catalog, job_of):
    optimizer = simulate(job_of(4, "model.n_layers=1"), catalog, 300, 4, 0).optimizer
    wider = job_of(4, "model.n_layers=1", "model.dim=64")

    assert simulate(wider, catalog, 300, 4, 0, like=optimizer).memory == simulate(wider, catalog, 300, 4, 0).memory


@pytest.mark.nightly
def test_a_schedule_in_which_blocks_leave_no_even_trace_is_simulated_whole(catalog, job_of, left_out):
    schedule = ["parallel.passes.pipeline.schedule=InterleavedZeroBubble", "model.n_layers=40"]
    job = job_of(2, "parallel.pp=2", "train.grad_accumulation=4", *schedule)

    short = simulate(job, catalog, 300, 2, 0)

    assert not left_out
    assert short.memory == simulate(job, catalog, 300, 2, 0, shorten=False).memory


class Deepening(nn.Module):
    """Keeps as much as its number says."""

    def __init__(self, number):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number

    def forward(self, hidden):
        return self.linear(hidden)


def model_of(numbers, **attributes):
    model = nn.Module()
    model.blocks = nn.ModuleDict({str(i): Deepening(number) for i, number in enumerate(numbers)})
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("numbers", "left_out"),
    [
        ([0] * 4, []),
        ([0] * 6, [["2"], ["3"]]),
        (range(30), []),
        ([1, 1, *[0] * 7], [["4"], ["5"], ["6"]]),
        ([0, 1] * 5, [["4", "5"]]),
        ([0, 0, 1] * 6, [["6", "7", "8"], ["9", "10", "11"], ["12", "13", "14"]]),
    ],
)
def test_blocks_that_are_alike_are_found_whether_or_not_they_take_turns(numbers, left_out):
    found = repeated.repetitions(model_of(numbers))

    assert [turn for one in found for turn in one.left_out] == left_out


def test_the_backward_of_a_turn_begins_with_its_last_block():
    model, log = model_of([0, 0, 1] * 6), []
    hidden = torch.ones(1, 4)
    with repeated.shortened(repeated.repetitions(model), log):
        for name, block in model.blocks.items():
            hidden = block(hidden)
            hidden.register_hook(lambda _, name=name: log.append(name))
        log.clear()
        hidden.sum().backward()

    marks = [repeated._Mark(0, "backward", turn) for turn in (2, 1, 0)]
    assert log == [marks[0], "17", "16", "15", marks[1], "5", "4", "3", marks[2], "2", "1", "0"]


def test_no_more_turns_are_simulated_than_there_are():
    model = model_of([0])
    model.encoder = nn.ModuleList(Deepening(0) for _ in range(5))
    model.units = lambda: [f"encoder.{i}" for i in range(5)]

    (found,) = repeated.repetitions(model, more=1)

    assert [name for (name,) in found.kept] == [*"01234"]
    assert not found.left_out


def test_layers_of_an_encoder_are_left_out_and_put_back_where_they_were():
    model = model_of([0] * 3)
    model.encoder, model.others = (nn.ModuleList(Deepening(0) for _ in range(12)) for _ in range(2))
    model.units = lambda: [f"encoder.{i}" for i in range(12)]

    found = repeated.repetitions(model)
    before = [*model.encoder]
    with repeated.shortened(found, []):
        within = [*model.encoder]

    assert [one.within for one in found] == ["encoder"]
    assert within == before[:3] + before[-2:]
    assert [*model.encoder] == before
    assert [name for name, _ in model.encoder.named_children()] == [str(i) for i in range(12)]


def test_what_a_model_holds_by_the_names_of_its_blocks_makes_them_differ():
    assert repeated.repetitions(model_of([0] * 20))
    assert not repeated.repetitions(model_of([0] * 20, kinds={str(i): i for i in range(20)}))


def test_a_block_may_hold_its_own_name_and_no_other():
    one, other = ({"name": f"blocks.{i}.attention", "size": [1, 2]} for i in (1, 12))

    assert alike(one, other, (["blocks.1"], ["blocks.12"]))
    assert not alike(one, other, (["blocks.2"], ["blocks.12"]))
    assert not alike({"size": [1, 2]}, {"size": [1, 3]}, ([""], [""]))


@pytest.mark.parametrize(
    ("kept", "order", "is_even"),
    [
        (5, [0, 1, 2, 3, 4], True),
        (5, [0, 2, 1, 3, 4], True),
        (5, [0, 1, 4], False),
        (4, [0, 1, 2, 3], True),
        (3, [0, 1, 2], True),
        (2, [0, 1], False),
    ],
)
def test_what_all_turns_hold_to_the_end_is_freed_as_often_as_there_are_turns(kept, order, is_even):
    """FSDP holds what copies of a shard sum until a backward ends. In doubt the whole model is simulated."""
    names = [[str(i)] for i in range(9)]
    seen = None if kept > 2 else [repeated._Pass(first=True, last=True, late=False)]
    found = [repeated.Repetition("blocks", None, names[:kept], names[kept:], seen)]
    turns = [
        [repeated._Mark(0, "backward", turn), Change("temporary", 0, "temporary", 8)] for turn in reversed(range(kept))
    ]
    log = [one for turn in turns for one in turn]
    freed = {1 + 2 * turn: len(log) + place for place, turn in enumerate(order)}
    log += [Change("temporary", 8, "temporary", 0)] * len(order)

    if not is_even:
        with pytest.raises(repeated.NotRepeatedError):
            repeated.lengthened(log, found, 0, freed)
        return
    tally = Tally()
    tally.play(repeated.lengthened(log, found, 0, freed))

    assert tally.peak == 9 * 8
    assert tally.current["temporary"] == 0


ALL, FIRST, LAST = (repeated._Pass(first, last, late=False) for first, last in ((1, 1), (1, 0), (0, 1)))


@pytest.mark.parametrize(
    ("turns", "seen", "whole"),
    [
        ("aab.", None, "aaaaab."),
        ("abb.", None, "abbbbb."),
        ("aaa.", None, "aaaaaa."),
        ("abbc.", None, "abbbbc."),
        ("abc.", LAST, "abbbbc."),
        ("aa.", None, "aaaaaa."),
        ("aa.", ALL, "aaaaaa."),
        ("ab.", FIRST, "aaaaab."),
        ("ab.", LAST, "abbbbb."),
        ("a.", ALL, "aaaaaa."),
        *(("abc.", None, ""), ("aba.", None, ""), ("ab.", None, ""), ("ab.", ALL, ""), ("aa.", LAST, "")),
    ],
)
def test_turns_in_the_middle_do_what_two_that_follow_on_each_other_have_done(turns, seen, whole):
    """Here or, with fewer turns, in a job that has been simulated: there the first or the last but one is as these."""
    names = [[str(i)] for i in range(7)]
    found = [
        repeated.Repetition("blocks", None, names[: len(turns)], names[len(turns) :], None if seen is None else [seen])
    ]
    log = [one for turn, kind in enumerate(turns) for one in (repeated._Mark(0, "forward", turn), Work(kind))]

    if not whole:
        with pytest.raises(repeated.TooFewTurnsError):
            repeated.lengthened(log, found, 0)
        return
    timeline = repeated.lengthened(log, found, 0)

    assert "".join(work.kind for work in played(timeline)) == whole


@pytest.mark.parametrize("freed", [0, 5, 7, 9])
def test_a_repeat_is_what_its_changes_are_one_after_the_other(freed):
    made = Change("a", 0, "a", 7)
    turn = [made, Change("b", 0, "b", 3, "c", 3, "b"), Change("a", freed, "a", 0), Change("b", 0, "b", 2)]
    tallies = []
    for timeline in ([made, Repeat(turn, 5), made], [made, *turn * 5, made]):
        tally = Tally()
        tally.restart()
        tally.play(timeline)
        tallies.append(tally)

    assert tallies[0] == tallies[1]
