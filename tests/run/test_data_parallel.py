"""Promises 1 to 3 for the axes that there are: the loss curve does not depend on how a step is cut."""

import pytest

CUTS = {
    "two microbatches": ["train.batch_size=2", "train.grad_accumulation=2"],
    "global batch": ["train.batch_size=1", "train.global_batch_size=4"],
    "fsdp on one rank": ["parallel.passes.fsdp=true"],
    "fsdp on two ranks": ["--nproc", "2", "train.batch_size=2"],
    "fsdp on two ranks, two microbatches": ["--nproc", "2", "train.batch_size=1", "train.grad_accumulation=2"],
    "two copies": ["--nproc", "2", "train.batch_size=2", "parallel.dp_replicate=2"],
    "hsdp on four ranks": ["--nproc", "4", "train.batch_size=1", "parallel.dp_replicate=2"],
    "compiled": ["--nproc", "1", "parallel.passes.compile=true"],
    "chunked loss": ["loss.name=chunked_cross_entropy", "loss.chunk_size=48"],
    "tied embeddings on two ranks": ["--nproc", "2", "train.batch_size=2", "model.tie_embeddings=true"],
}


@pytest.fixture(scope="module")
def one_process(shared_tiny):
    return {
        tied: shared_tiny.completed(f"run.name=whole-{tied}", f"model.tie_embeddings={tied}")
        for tied in ("true", "false")
    }


@pytest.mark.parametrize("cut", CUTS)
def test_ten_steps_have_the_loss_and_gradient_norm_of_one_process(shared_tiny, one_process, cut):
    expected = one_process["true" if "tied" in cut else "false"]

    lines = shared_tiny.completed(*CUTS[cut], f"run.name={cut.replace(' ', '-').replace(',', '')}")

    assert len(lines) == 10
    for line, reference in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
        assert line["tokens"] == reference["tokens"]
