"""Frozen parameters that fsdp leaves whole on every rank."""

import shutil
import tempfile

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from forge_core.checkpoint.state_dict import model_tensors, named_parameters
from forge_core.config.sections import ParallelSection
from forge_core.contracts.parallel_pass import PassContext
from forge_core.distributed.mesh import build_mesh
from forge_core.errors import ConfigError
from forge_core.train.build import materialise
from forge_plugins_parallel.config import FullyShardConfig
from forge_plugins_parallel.fsdp import FullyShard
from forge_plugins_parallel.kept_whole import kept_whole
from forge_testing.module_state import build_on_meta
from forge_testing.several_ranks import on_ranks
from forge_testing.small_model import cross_entropy, small_job
from forge_testing.small_tower import SmallTower

CPU = torch.device("cpu")
KEPT = ("memory.*",)


def frozen():
    model = build_on_meta(SmallTower)
    model.memory.requires_grad_(False)
    return model


class OnTwoRanks:
    """Trains with and without, in both precisions; and reads what the other has saved."""

    def rank(self):
        found = {
            (precision, kept): self.train(precision, kept) for precision in ("fp32", "bf16") for kept in ((), KEPT)
        }
        touched, _, tensors = found["bf16", KEPT]
        whole = {name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
        dtypes = {tensor.dtype for tensor in tensors.values()}
        seen = {key: seen for key, (_, seen, _) in found.items()}
        plain = found["bf16", ()][2]
        return seen, touched, whole, dtypes, [*same_when_read(plain, tensors), *same_when_read(tensors, plain)]

    def train(self, precision, kept):
        job = attrs.evolve(small_job(), parallel=ParallelSection(dp_shard=2))
        job = attrs.evolve(job, train=attrs.evolve(job.train, precision=precision))
        context = PassContext(build_mesh(job, CPU), job, CPU)
        model, touched = FullyShard(FullyShardConfig(keep_whole=kept)).apply(frozen(), context)
        materialise(model, CPU, seed=0)
        parameters = named_parameters([model])  # as the engine asks for them: once, before the first forward
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(32, (2, 8), generator=generator)
        batch = {"tokens": tokens, "targets": tokens, "features": torch.randn(2, 5, 6, generator=generator)}
        total = model(**batch, loss=cross_entropy).total
        total.backward()
        gradients = {name: p.grad.full_tensor() for name, p in parameters.items() if p.grad is not None}
        with torch.no_grad():
            parameters["memory.read.weight"].mul_(2)
            doubled = model(**batch, loss=cross_entropy).total
        return touched, (total.item(), gradients, doubled.item()), model_tensors(parameters, [model])


def same_when_read(saved, read):
    """Whether each tensor, saved from a run of one kind, is read into one of the other."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(dict(saved), checkpoint_id=folder[0])
    with torch.no_grad():
        for tensor in read.values():
            tensor.zero_()
    dcp.load(dict(read), checkpoint_id=folder[0])
    same = [torch.equal(full(read[name]), full(saved[name])) for name in saved]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return same


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(OnTwoRanks, "rank", 2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_is_that_of_sharded_parameters(ranks, precision):
    for losses, *_ in ranks:
        (total, gradients, doubled), (loss, others, again) = losses[precision, ()], losses[precision, KEPT]
        assert loss == pytest.approx(total, rel=1e-6)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-6, atol=1e-7)
        assert again == pytest.approx(doubled, rel=1e-6), "a value that is loaded later counts"
        assert again != pytest.approx(loss, rel=1e-4)


def test_what_is_kept_is_whole_in_its_own_dtype_and_no_unit(ranks):
    memory = {f"model.memory.{name}" for name, _ in frozen().memory.named_parameters()}
    for _, touched, whole, dtypes, _ in ranks:
        assert touched == ["blocks.0", "blocks.1", "blocks.2", "embed", "head", ""]
        assert whole == memory
        assert dtypes == {torch.float32}


def test_checkpoints_are_the_same_with_and_without(ranks):
    for *_, same in ranks:
        assert all(same)
        assert len(same) > 20


def test_what_is_trained_is_not_kept_whole():
    with pytest.raises(ConfigError, match=r"'memory\.\*' means memory\.read\.weight, which is trained, at least in a"):
        kept_whole(build_on_meta(SmallTower), KEPT, is_stage=False)


def test_a_pattern_that_means_nothing_is_refused_unless_another_stage_has_it():
    model = frozen()

    with pytest.raises(ConfigError, match=r"keep_whole: 'memroy\.\*' means no parameter of the model"):
        kept_whole(model, ["memroy.*"], is_stage=True)
    model.memory = None
    with pytest.raises(ConfigError, match=r"keep_whole: 'memory\.\*' means no parameter of the model"):
        kept_whole(model, KEPT, is_stage=False)
    assert kept_whole(model, KEPT, is_stage=True) == {}


def test_with_parameters_in_the_hosts_memory_it_is_refused():
    problems = dict(FullyShardConfig(keep_whole=KEPT, cpu_offload=True).check(small_job()))

    assert "cpu_offload has all parameters in the host's memory" in problems["keep_whole"]
