"""Runs on streams: killed, moved to other numbers of ranks, and taken back, they have the samples of a straight one."""

import json
import random
import re

import attrs
import pytest

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_data.inspection import opened

datasets = pytest.importorskip("datasets")

KEYS = ["train.global_batch_size=4", "checkpoint.interval=1", "checkpoint.keep_last=2", "scheduler={name='constant'}"]
ONE, TWO = ["train.batch_size=4"], ["train.batch_size=2", "--nproc", "2"]


def stream_of(folder, **keys):
    given = {"name": "huggingface_streaming", "path": str(folder / "corpus"), "streams": 4, "shuffle_buffer": 5} | keys
    return "data={" + ", ".join(f"{key}={json.dumps(value)}" for key, value in given.items()) + "}"


@pytest.fixture(scope="module")
def streamed(shared_tiny):
    """Settings of a run on a corpus of which it reads several epochs."""
    texts = [file.read_text()[:300] for file in sorted((shared_tiny.folder / "text").iterdir())]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(shared_tiny.folder / "corpus"))
    return [stream_of(shared_tiny.folder), *KEYS]


@pytest.fixture(scope="module")
def straight(shared_tiny, streamed):
    return shared_tiny.completed(*streamed, *ONE, "train.steps=12", "run.name=straight")


@pytest.mark.parametrize(
    "kills", [pytest.param(2, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.nightly)]
)
def test_a_run_that_is_killed_again_and_again_has_the_samples_of_one_that_is_not(
    shared_tiny, streamed, training_values, kills
):
    steps = 2 * kills + 16
    settings = [*streamed, *ONE, f"train.steps={steps}"]
    straight = shared_tiny.completed(*settings, f"run.name=unkilled-{kills}")
    name = f"killed-{kills}"
    settings += ["data.workers=3", "data.prefetch=7"]
    for seed in range(kills):
        chosen = random.Random(seed)
        shared_tiny.kill_after(chosen.randint(1, 2) + 2 * seed, name, *settings, pause=chosen.random() * 0.02)

    done = shared_tiny.completed(*settings, f"run.name={name}")

    assert training_values(done) == training_values(straight)
    events = (shared_tiny.path(name) / "events.jsonl").read_text()
    assert events.count('"event": "resumed"') >= kills - 1  # the first may have left nothing to go on from


PARTS = [
    pytest.param((ONE, ONE), id="1 to 1", marks=pytest.mark.nightly),
    pytest.param((ONE, TWO), id="1 to 2"),
    pytest.param((TWO, ONE), id="2 to 1", marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_a_run_goes_on_with_the_same_samples_on_another_number_of_ranks(
    shared_tiny, streamed, straight, training_values, parts
):
    name = f"run.name=moved-{'-'.join(str(len(part)) for part in parts)}"
    for part, steps in zip(parts, (5, 12), strict=True):
        done = shared_tiny.completed(*streamed, *part, f"train.steps={steps}", name)

    found, expected = training_values(done), training_values(straight)
    if parts == (ONE, ONE):
        assert found == expected
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


PLUGIN = """
    from forge_core.api import Component, hookimpl

    @hookimpl
    def forge_data_sources():
        yield Component(
            name="letters", summary="for a test", factory="acme_letters.letters:Letters",
            config="acme_letters.config:LettersConfig",
        )

    @hookimpl
    def forge_callbacks():
        yield Component(
            name="spoiler", summary="for a test", factory="acme_letters.letters:Spoiler",
            config="acme_letters.config:SpoilerConfig",
        )
"""
CONFIG = """
    from typing import ClassVar

    import attrs

    from forge_core.contracts.data_source import DataSourceConfig

    @attrs.frozen(kw_only=True)
    class LettersConfig(DataSourceConfig):
        '''Random letters.'''

        has_own_order: ClassVar[bool] = True
        streams: int = 2
        '''How many.'''
        marked: tuple[int, ...] = ()
        '''Samples of each stream that have the letter 0.'''
        without: tuple[int, ...] = ()
        '''Samples that are not there.'''
        dry: tuple[int, ...] = ()
        '''Streams without a sample.'''

    @attrs.frozen(kw_only=True)
    class SpoilerConfig:
        '''The loss of what has the letter 0 is no number.'''
"""
LETTERS = """
    import numpy as np

    from forge_core.contracts.callback import Callback
    from forge_core.errors import ConfigError


    class Letters:
        vocab_size, tokenizer, fingerprint = 32, None, "letters"

        def __init__(self, config, /, *, seq_len, split, **_):
            if split != "train":
                raise ConfigError("letters have no end")
            self.n_streams, self._config, self._seq_len = config.streams, config, seq_len

        def open(self, stream, state):
            number = state["next"] if state else 0
            while stream not in self._config.dry:
                letters = np.random.default_rng([stream, number]).integers(1, 32, size=self._seq_len + 1)
                letters[0] *= number not in self._config.marked
                number += 1
                if number - 1 not in self._config.without:
                    yield {"tokens": letters[:-1], "targets": letters[1:]}, {"next": number}


    class Spoiler(Callback):
        def __init__(self, config):
            self._has_mark = False

        def run_start(self, run):
            for part in run.parts:
                part.register_forward_pre_hook(self._look, with_kwargs=True)
                part.register_forward_hook(self._spoil)

        def _look(self, part, arguments, named):
            self._has_mark = bool(((arguments[0] if arguments else named["tokens"]) == 0).any())

        def _spoil(self, part, arguments, output):
            if part.training and self._has_mark and hasattr(output, "total"):
                return output._replace(total=output.total * float("nan"))
"""


@pytest.fixture
def letters(tiny, make_distribution, monkeypatch):
    files = {"acme_letters/plugin.py": PLUGIN, "acme_letters/config.py": CONFIG, "acme_letters/letters.py": LETTERS}
    monkeypatch.setenv("PYTHONPATH", str(make_distribution("acme-letters", files=files)))
    return tiny


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_goes_back_reads_over_what_it_leaves_out(letters, training_values, workers):
    settings = [
        *("train.steps=12", "checkpoint.interval=2", "anomalies.roll_back_after=2", "scheduler={name='constant'}"),
        "callbacks=[{name='spoiler'}]",
    ]

    def letters_with(keys):
        return f"data={{name='letters', workers={workers}, {'' if workers == 0 else 'prefetch=9, '}{keys}}}"

    marked = "marked=[8, 9, 10, 11]"  # those of steps 5 and 6

    letters.completed(*settings, letters_with(marked), "train.steps=8")
    gone_back = letters.completed(*settings, letters_with(marked))
    reference = letters.completed(*settings, letters_with("without=[8, 9, 10, 11]"), "run.name=reference")

    events = [json.loads(line) for line in (letters.path() / "events.jsonl").read_text().splitlines()]
    (back,) = [event for event in events if event["event"] == "rolled_back"]
    assert (back["to_step"], back["samples"]) == (4, [[16, 23]])
    assert training_values(gone_back) == training_values(reference)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["data={name='letters', shuffle=true}"],
            "data.shuffle: has no effect: 'letters' says itself what stands where",
        ),
        (["data={name='letters', streams=3}"], "must be a multiple of the number of streams, 3, .* it is 4"),
        (
            ["data={name='mixture', sources=[{name='a', weight=1, source={name='letters', streams=3}}]}"],
            r"data.sources: are read together as 3 streams \(a has 3\), a number that must divide .* 4",
        ),
        (
            ["eval={interval=2, data={name='letters'}}"],
            "eval.data: letters have no end",
        ),
    ],
)
def test_what_streams_cannot_do_is_refused_and_nothing_is_made(letters, settings, sentence):
    done = letters.run(*settings)

    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(sentence, done.stderr)
    assert not letters.path().exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["train.global_batch_size=4"], "data.streams: must divide train.global_batch_size, 4, .* it is 8"),
        (["train.batch_size=2", "parallel.dp_shard=6"], "must divide train.global_batch_size, 12, .* it is 8"),
        (
            ["data={name='synthetic'}", "eval={interval=2, data={name='huggingface_streaming', path='corpus'}}"],
            "eval.data.streams: have no end, so that they cannot be evaluated",
        ),
    ],
)
def test_streams_that_do_not_fit_the_job_are_told_by_validate(tiny, capsys, settings, sentence):
    given = ["data={name='huggingface_streaming', path='corpus'}", *settings]
    assert main(["validate", str(tiny.config), *given]) == 2

    said = capsys.readouterr()
    assert re.search(sentence, said.out + said.err), said


def test_inspecting_refuses_streams_as_a_run_does_and_keeps_no_more_than_a_step(shared_tiny, streamed, capsys):
    uneven = stream_of(shared_tiny.folder, streams=3)
    assert main(["data", "inspect", str(shared_tiny.config), uneven]) == 2
    assert "data.streams: must divide train.global_batch_size, 4" in capsys.readouterr().err
    job = load_job(shared_tiny.config, [uneven], catalog=discover())
    job = attrs.evolve(job, train=attrs.evolve(job.train, global_batch_size=4))
    with (
        pytest.raises(ConfigError, match=r"a multiple of the number of streams, 3, .* it is 4"),
        opened(job, discover()),
    ):
        pass

    job = load_job(shared_tiny.config, streamed, catalog=discover(), world_size=1)
    with opened(job, discover()) as data:
        found, _ = data.step(200)
        cursors = data.stream.streams._cursors
    assert found.numbers == [796, 797, 798, 799]
    assert (found.samples, found.streams) == ([199] * 4, [0, 1, 2, 3])
    assert [(sorted(cursor.states), len(cursor._samples)) for cursor in cursors] == [([0, 199, 200], 1)] * 4


def test_more_ranks_than_streams_are_refused(letters):
    done = letters.run("data={name='letters', streams=1}", "--nproc", "2")

    assert done.returncode == 2
    assert "there are 2 data-parallel ranks and 1 stream, and each rank reads at least one" in done.stderr
    assert not letters.path().exists()


@pytest.mark.parametrize("dry", [0, 1])
def test_a_stream_that_runs_dry_is_named_and_nothing_is_made(letters, capfd, dry):
    assert main(["run", str(letters.config), f"data={{name='letters', dry=[{dry}]}}"]) == 2

    said = capfd.readouterr().err
    assert f"data: stream {dry} of 2 (from 0) has no sample; use fewer streams" in said
    assert "Traceback" not in said
    assert not letters.path().exists()


def test_a_dry_run_says_that_there_is_no_end(letters):
    done = letters.run("data={name='letters'}", "--dry-run")

    assert done.returncode == 0, done.stderr
    assert "data samples of 32 tokens, without end" in done.stdout


def test_a_run_in_small_microbatches_is_evaluated_on_one_process(shared_tiny, streamed, capsys):
    """One sequence a microbatch is fewer than there are streams; the run's batch is not."""
    held_out = f"eval={{interval=2, data={{name='text_files', path='{shared_tiny.folder / 'text'}'}}}}"
    done = shared_tiny.completed(*streamed, "train.batch_size=1", held_out, "train.steps=2", "run.name=by-ones")
    capsys.readouterr()

    assert main(["eval", str(shared_tiny.path("by-ones")), "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["eval/loss"] == pytest.approx(done[-1]["eval/loss"], rel=1e-6)
