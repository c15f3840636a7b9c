"""Where a model is cut, and which pipelines are refused before anything is built; runs are in tests/parity."""

import attrs
import pytest
import torch
import torch._functorch.config as functorch

from forge_core.checkpoint.state_dict import named_parameters
from forge_core.config.sections import ParallelSection
from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext
from forge_core.errors import ConfigError
from forge_plugins_parallel.config import PipelineConfig
from forge_plugins_parallel.pipeline import Pipeline, explained, stages_of_rank
from forge_plugins_parallel.pipeline_cut import cut_blocks
from forge_testing.module_state import build_on_meta
from forge_testing.small_model import SmallModel, small_job


def counts(n_blocks, n_stages, head, **more):
    costs = dict.fromkeys(map(str, range(n_blocks)), 1.0)
    return [len(stage) for stage in cut_blocks(costs, n_stages, last=head, **more)]


def test_blocks_stay_in_order_and_none_is_lost():
    assert cut_blocks(dict.fromkeys("abcde", 1.0), 2) == [["a", "b"], ["c", "d", "e"]]


@pytest.mark.parametrize(
    ("n_blocks", "n_stages", "head", "expected"),
    [
        (8, 4, 0.0, [2, 2, 2, 2]),
        (8, 2, 2.0, [5, 3]),
        (8, 4, 10.0, [2, 2, 3, 1]),
        (10, 4, 0.5, [2, 3, 3, 2]),
        (4, 4, 3.0, [1, 1, 1, 1]),
    ],
)
def test_the_dearest_stage_is_as_cheap_as_it_can_be(n_blocks, n_stages, head, expected):
    assert counts(n_blocks, n_stages, head) == expected


def test_blocks_that_belong_to_the_head_are_in_its_stage():
    assert counts(8, 4, 10.0, at_head=3) == [1, 2, 2, 3]
    assert counts(8, 2, 0.0, at_head=2) == [4, 4]
    with pytest.raises(ConfigError, match="has 4 layers, the last 3 of them in one stage, and each of 3 stages needs"):
        counts(4, 3, 0.0, at_head=3)


def test_stages_with_dear_blocks_or_an_encoder_have_fewer_blocks():
    assert cut_blocks({"a": 4.0, "b": 1.0, "c": 1.0, "d": 3.0}, 2) == [["a"], ["b", "c", "d"]]
    assert counts(8, 2, 0.0, first=4.0) == [2, 6]
    assert counts(6, 3, 2.0, first=100.0) == [1, 3, 2]


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ConfigError, match=r"the model has 3 layers, and each of 4 stages needs at least one"):
        counts(3, 4, 0.0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1F1B", [[0], [1], [2]]),
        ("Interleaved1F1B", [[0, 3], [1, 4], [2, 5]]),
        ("ZBVZeroBubble", [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_ranks_hold_the_stages_that_the_schedule_expects(schedule, expected):
    config = PipelineConfig(schedule=schedule)
    assert [stages_of_rank(config, 3, rank) for rank in range(3)] == expected


class OneOf:
    """The mesh as seen by one of two ranks along ``pp``."""

    def __init__(self, rank):
        self.rank = rank
        self.degrees = {"pp": 2}
        self.device_mesh = self

    def __getitem__(self, axis):
        return self

    def size(self):
        return 2

    def get_local_rank(self, axis):
        return self.rank


def split(rank, model=None, schedule="ZBVZeroBubble"):
    model = model or build_on_meta(lambda: SmallModel(n_layers=4))
    context = PassContext(OneOf(rank), small_job(), torch.device("cpu"))
    return Pipeline(PipelineConfig(schedule=schedule)).split(model, context)


def test_parts_hold_each_tensor_of_the_model_once_and_by_its_name():
    held = [name for rank in (0, 1) for part in split(rank)[0] for name, _ in part.named_parameters()]

    whole = [canonical_name(name) for name, _ in build_on_meta(lambda: SmallModel(n_layers=4)).named_parameters()]
    assert sorted(held) == sorted(whole)


def test_parts_say_what_they_hold_and_are_none_where_they_hold_nothing():
    (first, last), touched = split(0)

    assert touched == ["embed", "blocks.0", "blocks.3", "norm", "head"]
    assert first.embed is not None
    assert first.norm is None
    assert first.head is None
    assert last.embed is None
    assert last.head is not None
    assert split(1)[1] == ["blocks.1", "blocks.2"]


def test_the_first_stage_lends_the_table_of_a_tied_head_to_the_last():
    model = build_on_meta(lambda: SmallModel(n_layers=4))
    model.head.weight = model.embed.weight

    (first, last), _ = split(0, model)

    assert (first.borrowed, last.borrowed) == ({}, {"head.weight": "embed.weight"})
    assert [name for name in named_parameters([first, last]) if "embed" in name or "head" in name] == ["embed.weight"]


def test_a_stage_that_ties_tensors_is_refused_where_backward_is_split():
    model = build_on_meta(lambda: SmallModel(n_layers=4))
    last = model.blocks["3"]
    name = next(name for name, one in last.named_parameters() if one.ndim == 1)
    model.norm.weight = last.get_parameter(name)

    with pytest.raises(ConfigError, match=rf"norm\.weight is tied to blocks\.3\.{name}, .* take \"1F1B\""):
        split(1, model)
    split(1, model, schedule="1F1B")


def test_a_model_that_ties_other_tensors_of_different_stages_is_refused():
    model = build_on_meta(lambda: SmallModel(n_layers=4))
    first, *_, last = model.blocks.values()
    name = next(name for name, _ in first.named_parameters())
    module, _, leaf = name.rpartition(".")
    setattr(last.get_submodule(module), leaf, first.get_parameter(name))

    with pytest.raises(ConfigError, match=rf"blocks\.3\.{name} is tied to blocks\.0\.{name}, which is in another"):
        split(1, model)


def test_a_parameter_that_no_stage_owns_is_refused():
    """Every stage would have a copy, and whichever is saved last would win."""
    model = build_on_meta(lambda: SmallModel(n_layers=4))
    model.places = torch.nn.Embedding(8, 4, device="meta")

    with pytest.raises(ConfigError, match=r"places\.weight is neither in embed, blocks, norm nor head, nor in a part"):
        split(0, model)


def problems(microbatches=4, pp=2, **keys):
    job = small_job()
    train = attrs.evolve(job.train, grad_accumulation=microbatches)
    job = attrs.evolve(job, train=train, parallel=ParallelSection(pp=pp))
    return [sentence for _, sentence in PipelineConfig(**keys).check(job)]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_enough_microbatches_are_fine(schedule):
    assert problems(schedule=schedule) == []


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"microbatches": 1}, "train.grad_accumulation = 1 gives a step fewer microbatches than"),
        ({"microbatches": 3, "schedule": "DualPipeV"}, "set it to at least 4"),
        ({"microbatches": 5, "schedule": "Interleaved1F1B"}, "take a multiple of parallel.pp = 2"),
        ({"pp": 1}, "there is one stage only, as parallel.pp = 1"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(keys, sentence):
    (said,) = problems(**keys)
    assert sentence in said


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"schedule": "1F1B", "stages_per_rank": 2}, "1F1B has one stage a rank"),
        ({"schedule": "DualPipeV", "stages_per_rank": 3}, "DualPipeV has two stages a rank"),
        ({"schedule": "Interleaved1F1B", "stages_per_rank": 1}, "at least two stages a rank"),
        ({"schedule": "InterleavedZeroBubble", "stages_per_rank": 0}, "must be at least 1"),
    ],
)
def test_stages_that_a_schedule_does_not_have_are_refused(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        PipelineConfig(**keys)


def test_a_torch_that_cannot_split_a_backward_of_a_models_own_is_named():
    of_torch = RuntimeError("Attribute '_input_metadata' is invalid for this instance of _C._FunctionBase.")

    reason = explained(of_torch)

    assert isinstance(reason, ConfigError)
    assert str(reason).startswith(
        f"parallel.passes.pipeline.schedule: torch {torch.__version__} cannot compute gradients"
    )
    assert explained(RuntimeError("something else")) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, at their import
def test_what_a_model_compiles_itself_has_its_backward_in_parts_after_a_whole_one():
    """As the kernel of FlexAttention on a GPU, in blocks that are not compiled."""

    def two_products(x, weight):
        return ((x @ weight).relu() @ weight).square().sum()

    x, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    with functorch.patch(donated_buffer=True):
        split(0, schedule="DualPipeV")
        compiled = torch.compile(two_products, backend="aot_eager")
        whole = torch.autograd.grad(compiled(x, weight), (x, weight))

        total = compiled(x, weight)
        parts = *torch.autograd.grad(total, x, retain_graph=True), *torch.autograd.grad(total, weight)

    torch.testing.assert_close(parts, whole)
