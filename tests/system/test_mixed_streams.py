"""Runs on a mixture with streams: killed, or moved to other ranks, they have the samples of a straight one."""

import json
import random
import re

import numpy as np
import pytest

from forge_core.cli import main

datasets = pytest.importorskip("datasets")

ONE, TWO = ["train.batch_size=4"], ["train.batch_size=2", "--nproc", "2"]


def mixture(folder, streams=4, **keys):
    corpus = {"name": "huggingface_streaming", "path": str(folder / "corpus"), "streams": streams, "shuffle_buffer": 5}
    other = {**corpus, "path": str(folder / "other"), "streams": 2}
    text = {"name": "text_files", "path": str(folder / "text"), "pattern": "1*.txt", "validation": 0.3}
    sources = [
        {"name": "corpus", "weight": 0.5, "source": corpus},
        {"name": "other", "weight": 0.2, "loss_weight": 2.0, "source": other},
        {"name": "text", "weight": 0.3, "source": text},
    ]
    return "data=" + toml({"name": "mixture", "sources": sources, **keys})


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}={toml(one)}" for key, one in value.items()) + "}"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


@pytest.fixture(scope="module")
def settings(shared_tiny):
    """Of a run that reads several epochs of its streams, with other weights from step 4 on."""
    texts = [file.read_text()[:200] for file in sorted((shared_tiny.folder / "text").iterdir())]
    for name, part in (("corpus", texts[:8]), ("other", texts[8:])):
        datasets.Dataset.from_dict({"text": part}).save_to_disk(str(shared_tiny.folder / name))
    keys = ["train.global_batch_size=4", "checkpoint.interval=0", "eval.interval=4"]
    phases = "phases=[{at=4, data={weights={corpus=0.1, other=0.6}}}]"
    return [mixture(shared_tiny.folder), *keys, phases, "scheduler={name='constant'}"]


@pytest.fixture(scope="module")
def straight(shared_tiny, settings):
    return shared_tiny.completed(*settings, *ONE, "train.steps=12", "run.name=straight")


def of_sources(lines):
    """What is logged of each source: losses, and tokens so far."""
    return [
        {key: value for key, value in line.items() if key.partition("/")[0] in ("loss", "tokens")}
        for line in lines
        if "loss" in line
    ]


def test_losses_and_tokens_of_each_source_are_logged_and_what_others_hold_out_is_evaluated(straight):
    tokens = [[line[f"tokens/{name}"] for name in ("corpus", "other", "text")] for line in straight if "loss" in line]

    assert all(sum(of_step) == step * 4 * 32 for step, of_step in enumerate(tokens, 1))
    for first, last, shares in ((0, 3, (0.5, 0.2, 0.3)), (3, 12, (0.1, 0.6, 0.3))):
        samples = np.subtract(tokens[last - 1], tokens[first - 1] if first else 0) / 32
        assert np.abs(samples - np.multiply(shares, 4 * (last - first))).max() < 2
    assert all(any(f"loss/{name}" in line for line in straight) for name in ("corpus", "other", "text"))
    evaluated = {key for line in straight for key in line if key.startswith("eval/loss/")}
    assert evaluated == {"eval/loss/text"}


PARTS = [
    pytest.param((ONE, ONE), id="1 to 1", marks=pytest.mark.nightly),
    pytest.param((ONE, TWO), id="1 to 2", marks=pytest.mark.nightly),
    pytest.param((TWO, ONE), id="2 to 1"),
]


@pytest.mark.parametrize("parts", PARTS)
def test_a_run_goes_on_with_the_same_samples_on_another_number_of_ranks(
    shared_tiny, settings, straight, training_values, parts
):
    name = f"run.name=moved-{'-'.join(str(len(part)) for part in parts)}"
    for part, steps in zip(parts, (5, 12), strict=True):
        done = shared_tiny.completed(*settings, *part, f"train.steps={steps}", name)

    found, expected = training_values(done), training_values(straight)
    if parts == (ONE, ONE):
        assert found == expected
        assert of_sources(done) == of_sources(straight)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    for one, other in zip(of_sources(done), of_sources(straight), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


OFTEN = ["checkpoint.interval=1", "checkpoint.keep_last=2", "data.workers=3", "data.prefetch=7"]


@pytest.mark.slow
def test_a_run_that_is_killed_has_the_samples_of_one_that_is_not(shared_tiny, settings, straight, training_values):
    shared_tiny.kill_after(5, "killed", *settings, *ONE, *OFTEN, "train.steps=12")

    done = shared_tiny.completed(*settings, *ONE, *OFTEN, "train.steps=12", "run.name=killed")

    assert training_values(done) == training_values(straight)
    assert '"event": "resumed"' in (shared_tiny.path("killed") / "events.jsonl").read_text()


@pytest.mark.nightly
def test_two_ranks_that_are_killed_again_and_again_have_the_samples_of_those_that_are_not(
    shared_tiny, settings, training_values
):
    kills = 10
    settings = [*settings, *TWO, f"train.steps={2 * kills + 10}"]
    straight = shared_tiny.completed(*settings, "run.name=two-unkilled")
    for seed in range(kills):
        shared_tiny.kill_after(4 + 2 * seed, "two-killed", *settings, *OFTEN, pause=random.Random(seed).random() * 0.02)

    done = shared_tiny.completed(*settings, *OFTEN, "run.name=two-killed")

    assert training_values(done) == training_values(straight)
    events = (shared_tiny.path("two-killed") / "events.jsonl").read_text()
    assert events.count('"event": "resumed"') >= kills


@pytest.mark.parametrize(
    ("section", "streams", "sentence"),
    [
        ("", 3, None),  # three and two streams are read as one
        (
            "",
            8,
            r"data.sources: are read together as 2 streams \(corpus has 8, other has 2\), a number that must divide",
        ),
        ("eval.", 3, r"eval.data.sources\[0\].source: is read as streams, which have no end, and cannot be evaluated"),
    ],
)
def test_what_a_mixture_with_streams_cannot_do_is_told_by_validate(tiny, capsys, section, streams, sentence):
    data = section + mixture(tiny.folder, streams)
    code = main(
        ["validate", str(tiny.config), data, "train.batch_size=1", "train.global_batch_size=3", "eval.interval=2"]
    )

    said = capsys.readouterr()
    assert code == (0 if sentence is None else 2), said
    assert re.search(sentence or "", said.out + said.err), said


def test_more_ranks_than_streams_are_refused_and_nothing_is_made(shared_tiny, settings):
    done = shared_tiny.run(*settings, "train.batch_size=1", "train.global_batch_size=4", "--nproc", "4", "run.name=no")

    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "data.sources: are read together as 2 streams (" in said
    assert "and there are 4 data-parallel ranks, each of which reads at least one" in said
    assert not shared_tiny.path("no").exists()


def test_inspecting_shows_the_sources_of_a_step(shared_tiny, settings, capsys):
    assert main(["data", "inspect", str(shared_tiny.config), *settings, "--step", "3", "--json"]) == 0

    assert sum(json.loads(capsys.readouterr().out)["batch"]["sources"].values()) == 4
