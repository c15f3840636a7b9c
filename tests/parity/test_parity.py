"""Promises 1 to 4 for every layout: one process is the judge, and all cells are real runs over gloo, in one launch."""

import pytest

from parity_matrix.cells import CELLS, FAMILIES, TRAININGS
from parity_matrix.matrix import EXCHANGES
from parity_matrix.selection import by_day_or_night

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BY_NIGHT = {  # what puts together what other cells have apart, and graphs that take long to compile
    *("compiled", "moe-ac-selective-compiled", "tp2-ac-auto"),
    *("global-batch", "ac-none", "ac-every-second", "bf16-ac-full", "fp8-rowwise-exact-gradients"),
    *("ac-budget", "fsdp2-never-reshard", "fsdp2-auxiliary", "hsdp2x2-ac-every-second", "hsdp2x2-tp2", "pp2-fsdp2-tp2"),
    *("fsdp4-mixture", "hsdp2x2-mixture", "pp2-zero-bubble-v-fsdp2-mixture", "moe-ep2-mixture"),
    *("phases-accumulation4", "fsdp4-phases", "hsdp2x2-phases", "tp2-fsdp2-phases", "cp2-phases", "moe-ep2-phases"),
    *("tp2-copies2", "tp2-fsdp1-microbatches2", "tp2-fsdp2-even-vocabulary", "tp2-fsdp2-tied"),
    *("tp2-bf16", "tp2-fp8", "tp2-whole-whole-positions"),
    *("pp2-1f1b-auxiliary", "pp2-copies2-zero-bubble-v", "pp2-dualpipe-v-packed", "pp2-interleaved-bf16"),
    *("pp2-interleaved-zero-bubble-packed", "pp2-tp2-dualpipe-v-packed", "pp2-tp2-tied"),
    *("pp2-zero-bubble-v-ac-full", "pp2-zero-bubble-v-chunked"),
    *("cp2-ac-auto", "cp2-copies2", "cp2-fsdp2-packed", "cp2-tp2-packed"),
    *("cp2-ring-ac-auto", "cp2-ring-bf16", "cp2-ring-compiled", "cp2-ring-fsdp2", "cp2-ring-tp2"),
    *("cp2-ring-pp2-ac-full", "cp2-ring-pp2-zero-bubble-v"),
    *("latent-compiled-ac-selective", "cp2-latent", "pp2-latent", "tp2-fsdp2-latent", "tp2-latent-whole-positions"),
    *("moe-ep2-cp2-fsdp2", "moe-ep2-cp2-packed", "moe-ep2-fsdp2-ac-full-packed", "moe-ep2-hash", "moe-pp2-hash"),
    *("moe-ep2-overlap-compiled", "moe-ep2-sinkhorn-compiled", "moe-ep2-tp2-overlap-chunks3"),
    *("moe-ep4-hierarchical-chunks2-ac-full-packed", "moe-pp2-ep2-zero-bubble-v-overlap"),
    *("moe-tp2-expert-choice-ac-full", "moe-tp2-noisy-ac-full", "moe-pp2-sinkhorn"),
    *("moe-ep2-tp2-fp8", "moe-pp2-fp8"),
    *("moe-ac-selective-compiled-biased", "moe-tp2-fsdp2-whole-positions-biased", "moe-pp2-ep2-biased"),
    *("moe-ep2-copies2", "moe-pp2-ep2-capacity-ac-full", "moe-pp2-ep2-dualpipe-v-packed"),
    *("ahead-ac-auto", "ahead-ac-full", "ahead-chunked", "ahead-microbatches2-moe-packed"),
    *("ahead-compiled-ac-selective", "ahead-compiled-whole-model"),
    *("ahead-fsdp2-moe-packed", "ahead-tp2-chunked-packed", "ahead-cp2-ring"),
    *("ahead-pp2-dualpipe-v", "ahead-pp2-interleaved-zero-bubble-packed", "ahead-pp2-zero-bubble-v-chunked"),
    *("ahead-pp2-fsdp2", "ahead-pp2-cp2-moe-packed", "ahead-pp2-ep2-moe-packed"),
    *("ahead-pp2-tp2-packed", "ahead-pp2-tp2-whole-positions"),
    *(f"windows-{layout}" for layout in ("accumulation4", "chunked", "ac-selective-compiled", "fsdp2", "hsdp2x2")),
    *(f"windows-{layout}" for layout in ("tp2-whole-positions", "pp2", "cp2-tp2", "pp2-fsdp2-packed")),
    *(f"windows-and-sinks-{layout}" for layout in ("accumulation4", "chunked", "ac-selective-compiled", "fsdp2")),
    *(f"windows-and-sinks-{layout}" for layout in ("hsdp2x2", "tp2-whole-positions", "pp2", "cp2-tp2")),
    "windows-and-sinks-pp2-fsdp2-packed",
    *(f"biases-{layout}" for layout in ("accumulation4", "chunked", "ac-full", "ac-selective-compiled", "hsdp2x2")),
    *(f"biases-{layout}" for layout in ("tp2-chunked", "pp2", "cp2", "cp2-tp2")),
    *(f"lora-{layout}" for layout in ("accumulation4", "chunked", "ac-selective-compiled", "hsdp2x2", "tp2-chunked")),
    *(f"lora-{layout}" for layout in ("tp2-whole-positions", "pp2", "cp2-tp2", "fsdp2-bf16")),
    *(f"biases-and-dropout-{layout}" for layout in ("accumulation4", "chunked", "ac-selective-compiled", "fsdp2")),
    *(f"biases-and-dropout-{layout}" for layout in ("tp2-whole-positions", "pp2", "cp2", "tp2-fsdp2")),
    *("attention-dropout-compiled", "attention-dropout-ac-full", "attention-dropout-hsdp2x2"),
    *(f"muon-{layout}" for layout in ("fsdp4", "cp2", "pp2-fsdp2", "moe-ep2")),
    *(f"factored-{layout}" for layout in ("fsdp4", "hsdp2x2", "cp2", "pp2-fsdp2", "moe-ep2")),
    *(
        f"{optimizer}-{layout}"
        for optimizer in ("lion", "schedule-free")
        for layout in ("accumulation4", "fsdp4", "hsdp2x2", "tp2", "pp2", "pp2-fsdp2", "cp2", "moe-ep2")
    ),
}
LOOKING_BY_DAY = {
    *("joint-fsdp2", "joint-tp2", "joint-cp2", "joint-pp2-zero-bubble-v-fsdp2", "joint-packed-pp2"),
    *("crossed-tp2-fsdp2-ac-full", "crossed-pp2-interleaved-tp2", "crossed-cp2", "crossed-packed-hsdp2x2"),
    *("mixture-of-transformers-tp2-whole-positions", "mixture-of-transformers-pp2", "moma-ep2", "moma-tp2"),
    *("joint-frozen-then-thawed-fsdp2", "joint-frozen-then-thawed-pp2", "joint-fsdp2-bf16"),
    *("joint-mrope-pp2", "joint-padded-pp2", "joint-among-text-fsdp2", "joint-among-text-pp2"),
}
"""Of images among text; the other layouts of these are by night."""
BY_NIGHT |= {
    name
    for name in CELLS
    if name.startswith(("joint-", "crossed-", "mixture-of-transformers-", "moma-")) and name not in LOOKING_BY_DAY
}
assert CELLS.keys() >= BY_NIGHT | LOOKING_BY_DAY


every_cell = pytest.mark.parametrize("cell", by_day_or_night(CELLS, BY_NIGHT))


@every_cell
def test_ten_steps_and_their_evaluation_equal_one_process(matrix, cell):
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


NEXT = dict(zip(FAMILIES, [*FAMILIES[1:], FAMILIES[0]], strict=True))


def _exchange(writer, reader):
    """By day each family is read by the next one and by one process, and reads what one process has written."""
    by_day = "one process" in (writer, reader) or NEXT.get(writer) in (reader, None)
    return pytest.param(writer, reader, marks=[] if by_day else [pytest.mark.nightly])


@pytest.mark.parametrize(("writer", "reader"), [_exchange(*pair) for pair in EXCHANGES])
def test_a_checkpoint_of_one_layout_is_held_by_another_bit_for_bit_and_goes_on(matrix, writer, reader):
    assert list(matrix.exchange_problems(writer, reader)) == []


@pytest.mark.parametrize("training", [name for name in TRAININGS if name != "plain"])
def test_what_is_trained_makes_a_difference(matrix, training):
    """Its cells would also equal one process if the setting had been lost on the way."""
    assert matrix.distance(training) > 1e-4


@pytest.mark.parametrize("cell", by_day_or_night([name for name in CELLS if "fp8" in name], BY_NIGHT))
def test_float8_is_not_bf16(matrix, cell):
    """Its cells are compared with bf16, and would also be near it if no layer had been converted."""
    assert matrix.difference(cell, "loss") > 1e-4
