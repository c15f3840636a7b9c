"""Promises 1 to 4 for every layout: one process is the judge, and all cells are real runs over gloo, in one launch."""

import pytest

from parity_matrix.cells import CELLS, FAMILIES, TRAININGS
from parity_matrix.matrix import EXCHANGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BY_DAY = {
    *("microbatches2", "accumulation4", "chunked", "fsdp1", "ac-full", "ac-selective", "ac-auto", "bf16"),
    *("fp16-auxiliary", "pp2-zero-bubble-v-fp16-biases", "moe-ep2-fp16-hash"),
    *("fsdp2", "fsdp2-keep-gathered-ac-full", "fsdp2-compiled-ac-selective", "copies2", "hsdp2x2"),
    *("fsdp2-sums-shards", "tp2", "tp2-fsdp2", "tp2-tied", "tp2-latent"),
    *("pp2-gpipe", "pp2-1f1b", "pp2-interleaved", "pp2-interleaved-zero-bubble", "pp2-zero-bubble-v"),
    *("pp2-dualpipe-v", "pp2-zero-bubble-v-compiled-ac-selective", "pp4", "pp2-fsdp2", "cp2", "cp2-ring"),
    *("pp2-custom-uneven", "pp2-custom-reversed-tied"),
    *("fp8-tensorwise", "fsdp2-fp8-gathered-ac-full", "moe-ep2-fp8-ac-selective"),
    *("packed-accumulation4", "pp2-zero-bubble-v-tied", "pp2-zero-bubble-v-penalised"),
    *("mixture-accumulation4", "fsdp2-phases-bf16", "pp2-phases"),
    *("moe-accumulation4", "moe-ac-full", "moe-tp2", "moe-ep2", "moe-pp2"),
    *("moe-ep2-expert-choice-chunks2", "moe-pp2-expert-choice"),
    *("ahead-accumulation4", "ahead-tp2-whole-positions", "ahead-pp2-1f1b", "ahead-cp2-moe-packed"),
    *("windows-ac-full", "windows-cp2-packed", "windows-and-sinks-tp2-chunked"),
    *("long-rope-packed-cp2", "attention-dropout-cp2", "lora-ac-full", "chat-cp2", "complete-p-pp2"),
    *("muon-accumulation4", "muon-tp2", "muon-pp2", "factored-tp2", "factored-pp2"),
    *("eight-bit-fsdp2", "lion-fsdp2", "split-tp2"),
    *("joint-cp2", "joint-packed-pp2", "joint-mrope-pp2", "joint-padded-pp2", "joint-among-text-pp2"),
    *("crossed-tp2", "crossed-of-two-sizes-pp2", "crossed-bf16-pp2"),
    *("mixture-of-transformers-tp2-whole-positions", "moma-ep2"),
}
"""Each pass, schedule, axis of the mesh and kind of training, and of two together those that meet in code of
their own: a window and an axis that cuts sequences, say. Cells that put together what is here already are by night."""
assert CELLS.keys() >= BY_DAY
FEW, MANY = 5, 10
"""Steps of a run by day, in which the rate of learning, phases and weights of a mixture change; and by night, as
promised."""


def by_day_and_night(day, night):
    """For ``parametrize``, with a number of steps: what is there by day is there by night too, for longer."""
    by_day = [pytest.param(*one, FEW, id="-".join([*one, "few"])) for one in night if one in day]
    return by_day + [pytest.param(*one, MANY, marks=pytest.mark.nightly, id="-".join([*one, "many"])) for one in night]


def by_name(day, night):
    return by_day_and_night({(name,) for name in day}, [(name,) for name in night])


every_cell = pytest.mark.parametrize(("cell", "steps"), by_name(BY_DAY, CELLS))


@every_cell
def test_steps_and_their_evaluation_equal_one_process(matrix, cell):
    assert list(matrix.curve_problems(cell)) == []


@every_cell
def test_the_first_loss_is_not_that_of_a_model_that_knows_nothing(matrix, cell):
    assert list(matrix.first_loss_problems(cell)) == []


@every_cell
def test_all_ranks_have_one_gradient_norm_and_one_copy_of_what_they_share(matrix, cell):
    assert list(matrix.rank_problems(cell)) == []


@every_cell
def test_the_initial_weights_are_those_of_one_process_bit_for_bit(matrix, cell):
    assert list(matrix.initial_problems(cell)) == []


@every_cell
def test_each_gradient_is_that_of_one_process(matrix, cell):
    assert list(matrix.gradient_problems(cell)) == []


@every_cell
def test_a_checkpoint_has_what_the_ranks_held_bit_for_bit(matrix, cell):
    assert list(matrix.saved_problems(cell)) == []


EXCHANGED_BY_DAY = {
    *(("fsdp2", "one process"), ("hsdp2x2", "tp2"), ("tp2-fsdp2", "pp2-interleaved"), ("pp2-fsdp2", "cp2")),
    *(("moe-ep2", "moe-accumulation4"), ("muon-pp2", "muon-tp2"), ("fsdp2-fp8-gathered-ac-full", "bf16")),
}
"""Each family writes or reads one, and so does what keeps its state in a way of its own; ``test_resumes.py`` has every
optimizer."""
assert {*EXCHANGES} >= EXCHANGED_BY_DAY
assert {*FAMILIES} <= {family for pair in EXCHANGED_BY_DAY for family in pair}


@pytest.mark.parametrize(("writer", "reader", "steps"), by_day_and_night(EXCHANGED_BY_DAY, EXCHANGES))
def test_a_checkpoint_of_one_layout_is_held_by_another_bit_for_bit_and_goes_on(matrix, writer, reader):
    assert list(matrix.exchange_problems(writer, reader)) == []


TRAINED_BY_DAY = {CELLS[cell].training for cell in BY_DAY}
NOT_PLAIN = [training for training in TRAININGS if training != "plain"]


@pytest.mark.parametrize(("training", "steps"), by_name(TRAINED_BY_DAY, NOT_PLAIN))
def test_what_is_trained_makes_a_difference(matrix, training):
    """Its cells would also equal one process if the setting had been lost on the way."""
    assert matrix.distance(training) > 1e-4


@pytest.mark.parametrize(("cell", "steps"), by_name(BY_DAY, [name for name in CELLS if "fp8" in name]))
def test_float8_is_not_bf16(matrix, cell):
    """Its cells are compared with bf16, and would also be near it if no layer had been converted."""
    assert matrix.difference(cell, "loss") > 1e-4
