"""Sequences shared out over ranks train as whole ones do, packed documents and evaluation included."""

import pytest

from forge_core.config.job import load_job
from forge_core.discovery import discover
from forge_core.errors import ConfigError

CUTS = {
    "cp 2, packed, two microbatches": ["2", "parallel.cp=2", "train.batch_size=2", "train.grad_accumulation=2"],
    "cp 4, packed": ["4", "parallel.cp=4"],
    "cp 2 × fsdp 2, packed": ["4", "parallel.cp=2", "train.batch_size=2"],
    "cp 2 × two copies": ["4", "parallel.cp=2", "parallel.dp_replicate=2", "train.batch_size=2"],
    "cp 2 × tp 2, packed": ["4", "parallel.cp=2", "parallel.tp=2"],
    "cp 2 × pp 2, packed": [
        "4",
        "parallel.cp=2",
        "parallel.pp=2",
        "train.batch_size=2",
        "train.grad_accumulation=2",
        "parallel.passes.activation_checkpointing=true",
    ],
}
FIRST = "cp-2--packed--two-microbatches"


@pytest.fixture(scope="module")
def job(shared_tiny):
    """Documents of 5 to 45 tokens, of which a sample of 32 has several."""
    folder = shared_tiny.folder / "short"
    folder.mkdir()
    for i in range(240):
        (folder / f"{i}.txt").write_text(" ".join(str(j * 7919 % 97 + i) for j in range(2 + i * 31 % 13)))
    return shared_tiny


def settings(packed: bool) -> list[str]:
    return ["eval.interval=10", *(["data.path={folder}/short", "data.document_mask=true"] if packed else [])]


@pytest.fixture(scope="module")
def one_process(job):
    return {packed: completed(job, packed, f"run.name=whole-{packed}") for packed in (True, False)}


def completed(job, packed, *overrides):
    return job.completed(*overrides, *(one.format(folder=job.folder) for one in settings(packed)))


def test_documents_matter_to_the_reference(one_process):
    assert one_process[True][0]["loss"] != pytest.approx(one_process[False][0]["loss"], rel=1e-3)


@pytest.mark.parametrize("cut", CUTS)
def test_ten_steps_and_their_evaluation_equal_one_process(job, one_process, cut):
    packed = "packed" in cut
    name = "".join(letter if letter.isalnum() else "-" for letter in cut)

    lines = completed(job, packed, "--nproc", *CUTS[cut], f"run.name={name}")

    assert len(lines) == len(one_process[packed]) == 11
    for line, reference in zip(lines, one_process[packed], strict=True):
        for key in ("loss", "grad_norm", "tokens", "eval/loss", "eval/tokens"):
            assert (key in line) == (key in reference)
            if key in reference:
                assert line[key] == pytest.approx(reference[key], rel=1e-5), (key, line["step"])


def test_a_checkpoint_of_shared_sequences_goes_on_in_one_process(job, one_process):
    cut = "train.batch_size=4", "train.grad_accumulation=1"
    assert job.path(FIRST).exists(), "the run of the first cut"

    resumed = completed(job, True, f"run.name={FIRST}", "train.steps=11", *cut)[-2:]
    whole = completed(job, True, "run.name=whole-True", "train.steps=11", *cut)[-2:]

    assert resumed[0]["step"] == 11
    assert resumed[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
    assert resumed[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.seq_len=30"], "train.seq_len = 30 does not divide into them; 28 or 32 does"),
        (["parallel.passes.fsdp=false"], "parallel.passes.context_parallel: it needs the pass 'fsdp'"),
        (["parallel.passes.context_parallel=false"], "switches off every installed pass that serves the axis 'cp'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_built(job, overrides, sentence):
    with pytest.raises(ConfigError) as refused:
        load_job(job.config, ["parallel.cp=2", *overrides], catalog=discover(), world_size=2)

    assert sentence in str(refused.value)
