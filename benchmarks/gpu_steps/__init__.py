"""The steps of ``gpu.py``, the most telling first."""

from gpu_steps import kernels, machine, speed, training, unit_tests
from gpu_steps.step import Step

STEPS = (
    Step(name="device", asks="names, TFLOP/s, GB/s", seconds=15, run=machine.device_facts),
    Step(name="demo", asks="does `make demo` work here", seconds=45, run=training.demo),
    Step(
        name="documents",
        asks="packed documents: FlexAttention against plain products",
        seconds=60,
        run=training.documents,
    ),
    Step(name="tests", asks="tests that need a GPU", seconds=75, run=unit_tests.marked_tests),
    Step(name="dense", asks="20 steps here against the CPU, dense", seconds=30, run=training.parity_dense),
    Step(name="sparse", asks="20 steps here against the CPU, sparse", seconds=30, run=training.parity_sparse),
    Step(name="experts", asks="experts with 0, 1 and 7 rows", seconds=10, run=kernels.experts),
    Step(name="attention", asks="which kernel each shape gets, and what each takes", seconds=20, run=kernels.attention),
    Step(
        name="projections",
        asks="matrices of one input, apart against fused",
        seconds=30,
        run=kernels.projections,
        gib=10,
    ),
    Step(name="losses", asks="loss in chunks: kernels of Triton against torch", seconds=20, run=kernels.losses, gib=10),
    Step(name="graphs", asks="graph breaks and recompiles of 50 steps", seconds=60, run=training.recompiles),
    Step(name="waits", asks="does the host wait in a step that logs nothing", seconds=30, run=training.host_waits),
    Step(name="recomputation", asks="modes of recomputation: losses, memory", seconds=60, run=training.recomputation),
    Step(name="precisions", asks="bf16_pure against bf16", seconds=15, run=training.precisions),
    Step(name="saving", asks="is a resumed run the same; what a save costs", seconds=30, run=training.saving),
    Step(name="float8", asks="float8 against bf16, dense and sparse", seconds=60, run=training.float8),
    Step(name="planned", asks="the peak of `forge plan` against a run's", seconds=20, run=speed.planned_memory),
    Step(name="1b", asks="1B: tokens/s, MFU", seconds=40, run=speed.one_billion, gib=46),
    Step(
        name="1b_resharded",
        asks="1B, bf16 copies made for each pass",
        seconds=35,
        run=speed.one_billion_resharded,
        gib=44,
    ),
    Step(name="1b_pure", asks="1B with bf16 states", seconds=35, run=speed.one_billion_pure, gib=35),
    Step(name="8b", asks="8B, nothing recomputed", seconds=60, run=speed.eight_billion, gib=105),
    Step(
        name="8b_segments",
        asks="8B, with expandable segments of memory",
        seconds=60,
        run=speed.eight_billion_in_segments,
        gib=105,
    ),
    Step(name="8b_recomputed", asks="8B, all recomputed", seconds=90, run=speed.eight_billion_recomputed, gib=76),
    Step(name="8b_float8", asks="8B in float8", seconds=120, run=speed.eight_billion_float8, gib=105),
    Step(name="9b_sparse", asks="9.2B with 2.9B at work", seconds=60, run=speed.sparse, gib=103),
    Step(name="124m", asks="124M", seconds=60, run=speed.small_model),
    Step(name="optimizers", asks="a step of each optimizer at 8B", seconds=60, run=speed.optimizers, gib=76),
    Step(name="kernels", asks="1B: kernels by time", seconds=40, run=speed.kernels_by_time, gib=46),
)
