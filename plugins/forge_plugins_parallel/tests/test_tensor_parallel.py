"""Logits of a model in parts, what cannot be cut, and plans. Ten steps against one process are in tests/parity."""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.config.builder import ComponentBuilder
from forge_core.config.sections import ParallelSection
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh
from forge_core.errors import ConfigError, PluginError
from forge_core.job import load_job
from forge_core.ops.partial_gradients import PartialGradients
from forge_core.registry.discovery import discover
from forge_core.train.build import materialise
from forge_plugins_parallel.config import TensorParallelConfig
from forge_plugins_parallel.tensor_parallel import TensorParallel, matched_plan
from forge_testing.component_case import builder
from forge_testing.parallel_pass import ParallelPassConformance
from forge_testing.small_model import SmallModel, small_job
from parity_matrix.launch import JOB, Launcher, Work
from parity_matrix.logits import logits_and_gradients

CPU = torch.device("cpu")
TP = "parallel.tp=2"
HALF = "train.batch_size=2"
ONE_STEP = ['callbacks=[{name="logits_probe"}]', "train.steps=1", "scheduler.warmup_steps=0", "eval.interval=0"]
POSITIONS = ["model.learned_positions=true", "model.norm=layernorm"]  # given once for all rows
EVEN = "model.vocab_size=264"  # the vocabulary of bytes has 257 tokens, which no number of ranks divides


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    launcher = Launcher(tmp_path_factory.mktemp("tensor_parallel"))
    works = [
        Work("alone", 1),
        Work("tp2", 2, [TP]),
        Work("tp2-fsdp2", 4, [TP, HALF]),
        Work("even-alone", 1, [EVEN]),
        Work("even-tp2-fsdp2", 4, [EVEN, TP, HALF]),
    ]
    launcher.launch([attrs.evolve(work, settings=[*work.settings, *POSITIONS, *ONE_STEP]) for work in works])
    assert launcher.failures == {}
    return launcher


@pytest.mark.parametrize("layout", ["tp2", "tp2-fsdp2", "even-tp2-fsdp2"])
def test_without_a_loss_logits_and_gradients_are_those_of_one_process(launcher: Launcher, layout: str) -> None:
    """As for a loss of one's own, which knows nothing of a vocabulary in parts."""
    expected = logits_and_gradients(launcher.run_dir("even-alone" if "even" in layout else "alone"))

    found = logits_and_gradients(launcher.run_dir(layout))

    assert found.keys() == expected.keys()
    assert len(found) > 40
    for name, tensor in found.items():
        error = (tensor - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, (name, error)  # of the whole tensor: single elements round as the processor adds up


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["parallel.tp=3"], "8 heads cannot be shared out evenly to parallel.tp = 3 ranks"),
        (["parallel.tp=8"], "4 key-value heads cannot be shared out evenly to parallel.tp = 8 ranks"),
        ([TP, "train.seq_len=31"], "train.seq_len = 31 cannot be shared out evenly to parallel.tp = 2 ranks"),
        (["parallel.passes.tensor_parallel=true"], "nothing to share layers with, as parallel.tp = 1"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_at_validation(settings: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_job(JOB, ["callbacks=[]", *settings], catalog=discover(), world_size=1 if "=true" in settings[0] else None)


class TestConformance(ParallelPassConformance):
    """On one rank, with a model whose plan has no ``sequence`` modules."""

    component = "tensor_parallel"


def test_a_star_in_a_plan_stands_for_one_part_of_a_name() -> None:
    plan = matched_plan(SmallModel(n_layers=2))

    assert plan["blocks.1.query"] == "column"
    assert plan["head"] == "vocab"
    assert len(plan) == 2 + 2 * 6


def test_a_plan_that_names_no_module_is_refused() -> None:
    class Misnaming(SmallModel):
        def parallel_plan(self):
            return {"blocks.*.querry": "column"}

    with pytest.raises(PluginError, match=r"Misnaming.parallel_plan names 'blocks.\*.querry', which is no module"):
        matched_plan(Misnaming())


def test_a_role_that_the_pass_does_not_know_is_refused() -> None:
    """It was left alone before, and its gradients were those of one rank's features."""

    class Inventing(SmallModel):
        def parallel_plan(self):
            return {**super().parallel_plan(), "blocks.*.query": "columns"}

    with pytest.raises(
        PluginError, match=r"'columns', which tensor_parallel does not know; did you mean 'column'\?; it"
    ):
        matched_plan(Inventing())


def stage(**changes):
    """A model without its first part, as a pipeline stage has it."""
    model = SmallModel(n_layers=3)
    model.embed = None
    del model.blocks["0"]
    model.parallel_plan = lambda: {**SmallModel.parallel_plan(model), **changes}
    return model


def test_the_plan_of_a_stage_may_name_what_other_stages_hold() -> None:
    plan = matched_plan(stage(**{"blocks.0.query": "column"}))

    assert plan["blocks.1.query"] == "column"
    assert {name.split(".")[0] for name in plan} == {"blocks", "head"}


@pytest.mark.parametrize("pattern", ["blocks.1.querry", "blocks.*.querry", "haed", "head.proj", "blocks.first.query"])
def test_the_plan_of_a_stage_may_not_name_what_no_stage_holds(pattern: str) -> None:
    with pytest.raises(PluginError, match="which is no module"):
        matched_plan(stage(**{pattern: "column"}))


def test_the_plan_of_a_whole_model_may_not_name_a_block_that_it_lacks() -> None:
    model = SmallModel(n_layers=3)
    model.parallel_plan = lambda: {"blocks.3.query": "column"}

    with pytest.raises(PluginError, match=r"names 'blocks\.3\.query', which is no module"):
        matched_plan(model)


class Collectives(TorchDispatchMode):
    """Counts those of activations along ``tp``, and copies of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scatters = self.gathers = self.sums = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.scatters += func is torch.ops._c10d_functional.reduce_scatter_tensor.default
        self.gathers += func is torch.ops._c10d_functional.all_gather_into_tensor.default
        self.sums += func is torch.ops._c10d_functional.all_reduce.default
        self.copies += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def rank_of_two() -> Iterator[PassContext]:
    """One rank of two; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    job = attrs.evolve(small_job(), parallel=ParallelSection(tp=2, dp_shard=1))
    yield PassContext(build_mesh(job, CPU), job, CPU)
    dist.destroy_process_group()


LOSS = builder()(builder().resolve("loss", "cross_entropy"))


def decoder(context: PassContext, *passes: dict[str, Any], **keys: Any) -> Any:
    build = ComponentBuilder(discover())
    shape = {"name": "transformer", "dim": 16, "n_layers": 4, "n_heads": 2}
    with torch.device("meta"):
        model: Any = build(build.resolve("model", shape | keys), vocab_size=32)
    for table in passes:
        model, _ = build(build.resolve("parallel_pass", table)).apply(model, context)
    materialise(model, CPU, seed=0)
    return model


@pytest.mark.parametrize(
    ("checkpointing", "scatters", "gathers"),
    [
        ({"mode": "none"}, 18, 18),
        ({"mode": "selective"}, 18, 18 + 2 * 4),  # what is gathered is not kept: it is as large as the whole stream
        ({"mode": "selective", "keep": ["aten.mm", "*attention*", "_c10d_functional.*"]}, 18, 18),
        ({"mode": "full"}, 18 + 4, 18 + 2 * 4),
    ],
    ids=["none", "selective", "selective with gathers", "full"],
)
def test_selective_recomputation_sums_nothing_over_ranks_again(
    rank_of_two: PassContext, checkpointing: dict[str, Any], scatters: int, gathers: int
) -> None:
    """Two of each a layer in forward and in backward, and one for embedding and head."""
    passes = {"name": "tensor_parallel"}, {"name": "activation_checkpointing", **checkpointing}
    model, tokens = decoder(rank_of_two, *passes), torch.zeros(2, 8, dtype=torch.int64)

    with Collectives() as made:
        model(tokens, targets=tokens, loss=LOSS).total.backward()

    assert (made.scatters, made.gathers) == (scatters, gathers)


def test_nothing_is_copied_for_a_collective_of_several_sequences(rank_of_two: PassContext) -> None:
    model, tokens = decoder(rank_of_two, {"name": "tensor_parallel"}), torch.zeros(3, 8, dtype=torch.int64)

    with Collectives() as made:
        model(tokens, targets=tokens, loss=LOSS).total.backward()

    assert (made.scatters, made.gathers, made.copies) == (18, 18, 0)


def test_sequences_that_ranks_cannot_share_out_are_refused(rank_of_two: PassContext) -> None:
    model, tokens = decoder(rank_of_two, {"name": "tensor_parallel"}), torch.zeros(2, 7, dtype=torch.int64)

    with pytest.raises(ConfigError, match=r"tp = 2: sequences of 7 positions cannot be shared out evenly; give"):
        model(tokens)


def test_gradients_of_norms_and_biases_are_not_summed_in_backward(rank_of_two: PassContext) -> None:
    """But once per step: the loss alone sums something over ranks."""
    keys = {"norm": "layernorm", "attention_bias": "all", "qk_norm": True}
    model, tokens = decoder(rank_of_two, {"name": "tensor_parallel"}, **keys), torch.zeros(3, 8, dtype=torch.int64)
    with Collectives() as of_loss, torch.no_grad():
        model(tokens, targets=tokens, loss=LOSS)

    with Collectives() as made:
        model(tokens, targets=tokens, loss=LOSS).total.backward()

    assert made.sums == of_loss.sums
    found = PartialGradients.of([model], rank_of_two.mesh, CPU).by_axis["tp"]
    whole = {name for name, one in model.named_parameters() if not isinstance(one, DTensor)}
    assert {name for name, one in model.named_parameters() if any(one is other for other in found)} == whole
    assert "blocks.3.feed_forward_norm.bias" in whole


def test_an_embedding_looks_up_what_is_given_once_for_all_rows_and_tokens_further_ahead(
    rank_of_two: PassContext,
) -> None:
    model = decoder(rank_of_two, {"name": "tensor_parallel"}, multi_token={"depths": 2})
    tokens, given = torch.zeros(3, 8, dtype=torch.int64), []
    model.embed.register_forward_hook(lambda _, __, output: given.append(output.shape))

    model(tokens, targets=tokens, loss=LOSS)
    model.embed(tokens[:1]), model.embed(tokens[0])

    assert given == [(3, 4, 16), (3, 4, 2, 16), (3, 4, 16), (3, 4, 16)]


def test_a_parameter_of_two_modules_one_of_which_sees_all_activations_is_refused(rank_of_two: PassContext) -> None:
    model = decoder(rank_of_two)
    plan = {name: role for name, role in model.parallel_plan().items() if role != "sequence"}
    model.parallel_plan = lambda: plan | {"norm": "router"}
    model.norm.weight = model.blocks["0"].attention_norm.weight

    with pytest.raises(PluginError, match=r"blocks\.0\.attention_norm and norm share the parameter weight"):
        TensorParallel(TensorParallelConfig(sequence_parallel=False)).apply(model, rank_of_two)


def test_a_layer_that_is_cut_within_a_module_that_is_whole_is_refused(rank_of_two: PassContext) -> None:
    """The engine would add up the gradients of different parts."""
    model = decoder(rank_of_two)
    plan = model.parallel_plan()
    model.parallel_plan = lambda: plan | {"blocks.1.feed_forward": "whole"}

    with pytest.raises(PluginError, match=r"cuts blocks\.1\.feed_forward\.\w+, and gives a role to a module"):
        TensorParallel(TensorParallelConfig()).apply(model, rank_of_two)


def test_a_norm_over_all_heads_reads_and_gives_the_features_of_a_rank(rank_of_two: PassContext) -> None:
    model = decoder(rank_of_two, qk_norm=True, qk_norm_over="all")
    ends = TensorParallel(TensorParallelConfig()).layout(model)

    assert ends["blocks.0.attention.q_norm"].inputs[0] == ends["blocks.0.attention.q_norm"].output
    assert ends["blocks.0.attention.q_norm"].output == ends["blocks.0.attention.q"].output != ()
    assert ends["blocks.0.attention.q"].inputs == {}


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch before 2.13 cannot compile blocks that are recomputed under tensor parallelism",
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")  # torch.compile does
@pytest.mark.parametrize(
    "checkpointing", [{"mode": "selective"}, {"mode": "full"}, {"mode": "selective", "keep": ["aten.mm"]}], ids=str
)
def test_a_compiled_block_is_one_graph(rank_of_two: PassContext, checkpointing: dict[str, Any]) -> None:
    passes = {"name": "tensor_parallel"}, {"name": "activation_checkpointing", **checkpointing}
    model = decoder(rank_of_two, *passes, qk_norm=True, qk_norm_over="all", attention_dropout=0.1)
    torch.compiler.reset()
    counters.clear()
    for block in model.blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    tokens = torch.zeros(2, 8, dtype=torch.int64)

    model.train()(tokens, targets=tokens, loss=LOSS, noise=tokens).total.backward()

    assert counters["stats"]["unique_graphs"] == 1
