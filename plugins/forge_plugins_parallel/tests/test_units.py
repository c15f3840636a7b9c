"""Units beside blocks, and parts beside the four: the layers of an encoder in every pass, and where it is cut."""

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

from forge_core.contracts.model import canonical_name
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh, join_process_group
from forge_core.errors import ConfigError, PluginError
from forge_core.train.build import materialise
from forge_plugins_parallel import compile as compile_pass
from forge_plugins_parallel.activations import measure_activations
from forge_plugins_parallel.kept_operations import KeptOperations
from forge_plugins_parallel.pipeline_cut import cut_model, held, part_of, shared_tensors
from forge_plugins_parallel.tensor_parallel import matched_plan
from forge_plugins_parallel.units import units_of
from forge_testing.component_case import builder
from forge_testing.module_state import build_on_meta
from forge_testing.small_model import cross_entropy, small_job
from forge_testing.small_tower import SmallTower

CPU = torch.device("cpu")
LAYERS = ["memory.layers.0", "memory.layers.1"]
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]

# dynamo looks at the gradients of what it traces
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def context(monkeypatch):
    """Graphs are traced as ever and then run as they are, as in test_compile."""
    compiled = nn.Module.compile
    monkeypatch.setattr(
        nn.Module,
        "compile",
        lambda self, *, backend, mode, fullgraph: compiled(self, backend="aot_eager", fullgraph=fullgraph),
    )
    torch.compiler.reset()
    join_process_group(CPU)
    job = small_job()
    yield PassContext(build_mesh(job, CPU), job, CPU)
    torch.distributed.destroy_process_group()
    torch.compiler.reset()


def passed_through(context, *tables):
    model = build_on_meta(SmallTower)
    touched = []
    for table in tables:
        model, names = builder()(builder().resolve("parallel_pass", table)).apply(model, context)
        touched.append(names)
    materialise(model, CPU, seed=0)
    return model, touched


def gradients(model):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (2, 8), generator=generator)
    features = torch.randn(2, 5, 6, generator=generator)
    model.train()(tokens, targets=tokens, loss=cross_entropy, features=features).total.backward()
    return {canonical_name(name): p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_units_are_recomputed_compiled_and_gathered_as_blocks_are(context, mode):
    tables = [{"name": "activation_checkpointing", "mode": mode, "every": 2}, {"name": "compile"}, {"name": "fsdp"}]
    model, touched = passed_through(context, *tables)
    plain, _ = passed_through(context)

    recomputed, compiled, gathered = touched
    assert recomputed == [*LAYERS, "blocks.0", "blocks.2"], "every second block, and all other units"
    assert compiled == [*LAYERS, *BLOCKS]
    assert gathered == [*LAYERS, *BLOCKS, "embed", "head", ""]
    for name in LAYERS:
        unit = model.get_submodule(name)
        assert isinstance(unit, FSDPModule)
        assert unit._compiled_call_impl is not None
        assert isinstance(unit, CheckpointWrapper)
    expected = gradients(plain)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient.full_tensor(), expected[name], rtol=1e-5, atol=1e-6)


def test_each_kind_of_unit_has_a_number_of_graphs_to_itself(context, monkeypatch):
    """torch counts those of a function, and recomputed units share the one of their wrapper."""
    monkeypatch.setattr(compile_pass, "_GRAPHS", 2)
    with dynamo_config.patch(recompile_limit=2):
        model, _ = passed_through(context, {"name": "activation_checkpointing"}, {"name": "compile"})
        assert dynamo_config.recompile_limit == 4

        gradients(model)
        with torch.no_grad():
            model.eval()(torch.zeros(2, 8, dtype=torch.int64), features=torch.zeros(2, 5, 6))


def test_units_of_a_part_at_the_end_run_after_blocks():
    model = build_on_meta(SmallTower)
    model.stage_of = lambda: {"memory": "last"}

    assert list(units_of(model)) == [*BLOCKS, *LAYERS]


def test_a_unit_that_is_not_there_is_an_error_of_the_plugin():
    model = build_on_meta(SmallTower)
    model.units = lambda: ["memory.layers.7"]

    with pytest.raises(PluginError, match=r"SmallTower\.units names 'memory\.layers\.7', which is no module"):
        units_of(model)


def test_what_units_keep_is_measured_by_their_names():
    model = build_on_meta(SmallTower)
    model.memory.register_forward_pre_hook(lambda *_: (torch.zeros(2, 5, 6),))

    kept = KeptOperations(frozenset({"aten.mm"}))

    measured = measure_activations(model, cross_entropy, (2, 8), CPU, torch.float32, kept)

    assert list(measured.blocks) == [*LAYERS, *BLOCKS]
    assert measured.blocks["memory.layers.0"].whole > measured.blocks["memory.layers.0"].inputs > 0


def test_a_further_part_is_on_its_stage_only():
    model = build_on_meta(lambda: SmallTower(n_layers=4))
    cut = cut_model(model, 2, 8)
    first, last = part_of(model, cut, 0), part_of(model, cut, 1)

    assert shared_tensors(model, cut, splits_backward=True) == {}
    assert held(model, cut, 0) == ["embed", "memory", "blocks.0", "blocks.1"]
    assert held(model, cut, 1) == ["blocks.2", "blocks.3", "norm", "head"]
    assert first.memory is not None
    assert last.memory is None
    names = [name for part in (first, last) for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_tensor_parallelism_looks_for_the_layers_of_a_part_where_it_is():
    model = build_on_meta(lambda: SmallTower(n_layers=4))
    model.parallel_plan = lambda: {"memory": "whole", "head": "vocab"}
    cut = cut_model(model, 2, 8)

    assert [matched_plan(part_of(model, cut, stage)) for stage in (0, 1)] == [{"memory": "whole"}, {"head": "vocab"}]


def test_the_cut_counts_what_the_model_says_of_its_parts():
    model = build_on_meta(lambda: SmallTower(n_layers=8))
    costs = {"embed": 0.0, "memory": 4.0 * 6 * model.head.weight.numel()}
    model.flops_of = lambda unit: costs.get(unit, 6.0 * model.head.weight.numel())

    assert cut_model(model, 2, 8) == [["0", "1"], ["2", "3", "4", "5", "6", "7"]]


@pytest.mark.parametrize("parts", [{"memory": "middle"}, {"norm": "first"}, {"memroy": "first"}])
def test_a_part_without_a_stage_is_an_error_of_the_plugin(parts):
    model = build_on_meta(SmallTower)
    model.stage_of = lambda: parts

    with pytest.raises(PluginError, match=r"SmallTower\.stage_of has .*; it names attributes of the model beside"):
        cut_model(model, 2, 8)


def test_tensors_that_parts_on_other_stages_share_are_refused():
    model = build_on_meta(SmallTower)
    model.stage_of = lambda: {"memory": "last"}
    model.memory.layers["0"].up.weight = model.blocks["0"].up.weight

    with pytest.raises(ConfigError, match=r"memory\.layers\.0\.up\.weight"):
        shared_tensors(model, cut_model(model, 2, 8), splits_backward=False)
