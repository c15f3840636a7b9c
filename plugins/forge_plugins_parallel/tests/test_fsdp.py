"""When parameters are gathered and freed."""

import attrs
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard

from forge_core.contracts.gpu import Gpu
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import PluginError
from forge_core.train.build import materialise
from forge_core.train.executor import PlainExecutor
from forge_plugins_parallel.config import FullyShardConfig
from forge_plugins_parallel.fsdp import _placement
from forge_plugins_parallel.gradient_sums import sums_whole, whole_gradient_bytes
from forge_plugins_parallel.recompute_choice import _states
from forge_testing.component_case import builder
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.small_model import SmallModel, cross_entropy, small_job

CPU = torch.device("cpu")


class TestNeverReshard(ParallelPassConformance):
    component = "forge-plugins-parallel:fsdp"
    config = {"reshard_after_forward": "never"}


@pytest.fixture
def context():
    join_process_group(CPU)
    job = small_job()
    yield PassContext(build_mesh(job, CPU), job, CPU)
    torch.distributed.destroy_process_group()


def sharded(context, **config):
    with torch.device("meta"):
        model = SmallModel()
    model, _ = builder()(builder().resolve("parallel_pass", {"name": "fsdp", **config})).apply(model, context)
    materialise(model, CPU, seed=0)
    return model


def gatherings(model, microbatches):
    """How often blocks gather their parameters in one step: calls that find them sharded and not on their way."""
    counts = dict.fromkeys(model.blocks, 0)
    for name, block in model.blocks.items():
        group = block._get_fsdp_state()._fsdp_param_group
        unshard = group.unshard

        def counted(*args, name=name, group=group, unshard=unshard, **kwargs):
            counts[name] += group.is_sharded and group._all_gather_result is None
            return unshard(*args, **kwargs)

        group.unshard = counted
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    PlainExecutor(model, cross_entropy).run([batch] * microbatches, torch.tensor(1.0))
    return set(counts.values())


@pytest.mark.parametrize(
    ("config", "microbatches", "expected"),
    [
        ({}, 3, {1}),
        ({"reshard_after_forward": "always"}, 2, {4}),
        ({"reshard_after_forward": "never"}, 1, {1}),
        ({"reshard_after_forward": "never"}, 2, {2}),
        ({"keep_gathered": True}, 3, {1}),
    ],
)
def test_a_block_is_gathered_as_often_as_the_policy_says(context, config, microbatches, expected):
    assert gatherings(sharded(context, **config), microbatches) == expected


def test_what_was_kept_is_freed_with_the_last_microbatch(context):
    model = sharded(context, keep_gathered=True)

    gatherings(model, 2)

    groups = [
        module._get_fsdp_state()._fsdp_param_group
        for module in model.modules()
        if isinstance(module, FSDPModule) and module is not model  # which has nothing of its own
    ]
    assert len(groups) == 6
    assert all(group.is_sharded for group in groups)


@pytest.mark.parametrize("accumulate", ["sharded", "whole"])
def test_before_the_last_microbatch_gradients_are_as_the_key_says(context, accumulate):
    model = sharded(_accumulating(context), accumulate=accumulate)
    group = model.blocks["0"]._get_fsdp_state()._fsdp_param_group
    seen = []

    def look(*_):
        whole = sum(
            one._unsharded_param.grad is not None for one in group.fsdp_params if hasattr(one, "_unsharded_param")
        )
        seen.append((whole, sum(one.sharded_param.grad is not None for one in group.fsdp_params)))

    model.register_forward_pre_hook(look)

    gatherings(model, 2)

    n = len(group.fsdp_params)
    assert seen == [(0, 0), (0, n) if accumulate == "sharded" else (n, 0)]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("accumulate", "gib", "degrees", "expected"),
    [
        ("auto", None, {}, True),  # no GPU, no telling
        ("auto", 16.0, {}, True),
        ("auto", 15.9, {}, False),
        ("auto", 15.9, {"pp": 2}, True),
        ("whole", 15.9, {}, True),
        ("sharded", None, {}, False),
    ],
)
def test_whole_gradients_are_kept_where_they_are_a_small_part_of_the_memory(
    context, accumulate, gib, degrees, expected
):
    gpu = gib and Gpu("small", memory_gib=gib, peak_flops=1.0, capability=(9, 0))
    mesh = attrs.evolve(context.mesh, degrees={**context.mesh.degrees, **degrees})
    context = attrs.evolve(_accumulating(context), planned_gpu=gpu, mesh=mesh)

    assert sums_whole(2**30, accumulate, context) == expected


@pytest.mark.parametrize(("accumulate", "copies"), [("sharded", 0), ("whole", 1)])
def test_recomputation_by_memory_counts_whole_gradients_where_they_are_kept(context, accumulate, copies):
    with torch.device("meta"):
        model = SmallModel()
    fsdp = {"fsdp": builder().resolve("parallel_pass", {"name": "fsdp", "accumulate": accumulate})}
    alone = attrs.evolve(context, mesh=attrs.evolve(context.mesh, degrees={**context.mesh.degrees, "dp_shard": 2}))
    several = _accumulating(alone)
    parallel = attrs.evolve(several.job.parallel, passes=fsdp)
    several = attrs.evolve(several, job=attrs.evolve(several.job, parallel=parallel))

    assert _states(model, several) - _states(model, alone) == copies * whole_gradient_bytes(model)


@pytest.mark.parametrize(
    ("config", "degrees", "are_freed"),
    [({}, {}, True), ({"reshard_after_forward": "never"}, {}, False), ({}, {"pp": 2}, False)],
)
def test_recomputation_by_memory_counts_an_embedding_that_is_kept_gathered(context, config, degrees, are_freed):
    with torch.device("meta"):
        model = SmallModel()
    fsdp = {"fsdp": builder().resolve("parallel_pass", {"name": "fsdp", **config})}
    parallel = attrs.evolve(context.job.parallel, passes=fsdp)
    mesh = attrs.evolve(context.mesh, degrees={**context.mesh.degrees, "dp_shard": 2, **degrees})
    context = attrs.evolve(context, mesh=mesh, job=attrs.evolve(context.job, parallel=parallel))

    own, block = (4 * sum(p.numel() for p in part.parameters()) for part in (model, model.blocks["0"]))
    table = 4 * model.embed.weight.numel()
    assert _states(model, context) == 4 * own / 2 + own - block - table * are_freed


def test_one_microbatch_leaves_nothing_to_sum(context):
    assert not sums_whole(1.0, "whole", context)


def _accumulating(context):
    job = context.job
    return attrs.evolve(context, job=attrs.evolve(job, train=attrs.evolve(job.train, grad_accumulation=2)))


def test_a_parameter_that_cannot_be_sharded_is_named(context):
    model = SmallModel()
    model.temperature = torch.nn.Parameter(torch.ones(()))

    with pytest.raises(PluginError, match=r"the parameter temperature has no dimension .* the shape \(1,\)"):
        builder()(builder().resolve("parallel_pass", {"name": "fsdp"})).apply(model, context)


def test_a_pipeline_keeps_parameters_gathered(context):
    piped = attrs.evolve(context, mesh=attrs.evolve(context.mesh, degrees={**context.mesh.degrees, "pp": 2}))

    assert gatherings(sharded(piped), 1) == {1}


@pytest.mark.parametrize(
    ("config", "accumulation", "sentence"),
    [
        ({"keep_gathered": True, "reshard_after_forward": "always"}, 2, "contradicts"),
        ({"keep_gathered": True}, 1, "one microbatch a step"),
        ({"accumulate": "sharded"}, 1, "one microbatch a step"),
    ],
)
def test_keys_without_effect_are_refused(config, accumulation, sentence):
    job = small_job()
    job = attrs.evolve(job, train=attrs.evolve(job.train, grad_accumulation=accumulation))

    ((key, found),) = FullyShardConfig(**config).check(job)

    assert key == next(iter(config))
    assert sentence in found


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 6, 12), None),  # by experts, which is how FSDP shards if it is not told
        ((2, 6, 12), Shard(2)),  # two of four ranks would have nothing
        ((2, 8, 12), Shard(1)),
        ((2, 3, 5), None),
        ((2, 12), None),  # no stack
    ],
)
def test_a_stack_of_fewer_experts_than_ranks_is_sharded_within_experts(shape, expected):
    assert _placement(torch.nn.Parameter(torch.empty(shape)), ranks=4) == expected
