"""``forge data inspect CONFIG`` and ``forge data seen RUN``: the samples that a run reads."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from forge_core.cli import main
from forge_core.data.loader import BatchLoader
from forge_core.job import load_job
from forge_core.registry.discovery import discover
from forge_plugins_data.inspection import in_one_line, opened, spans
from forge_plugins_data.run_events import steps_without_update


@pytest.fixture
def trained(tiny, monkeypatch):
    """The batches that a run of ten steps has trained on, by step."""
    batches = []
    read = BatchLoader.__next__

    def noted(loader):
        step = read(loader)
        batches.append(np.concatenate([microbatch["tokens"].numpy() for microbatch in step]))
        return step

    monkeypatch.setattr(BatchLoader, "__next__", noted)
    tiny.completed("train.grad_accumulation=2")
    return batches


def test_what_is_shown_is_what_the_run_trains_on(tiny, trained, capsys):
    job = load_job(tiny.config, ["train.global_batch_size=8"], catalog=discover(), world_size=1)
    with opened(job, discover()) as data:
        for step, tokens in enumerate(trained, start=1):
            np.testing.assert_array_equal(data.step(step)[1]["tokens"], tokens)
            assert data.texts(data.step(step)[1], 1) == [bytes(tokens[0].astype(np.uint8)).decode()]

    capsys.readouterr()
    assert main(["data", "seen", str(tiny.path()), "--steps", "3..4", "--json", "--show", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == [3, 4]
    assert [line["numbers"] for line in lines] == [[*range(16, 24)], [*range(24, 32)]]
    assert [line["texts"] for line in lines] == [[bytes(trained[step][0].astype(np.uint8)).decode()] for step in (2, 3)]

    assert main(["data", "seen", str(tiny.path()), "--steps", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["numbers"] == [*range(72, 80)]
    assert main(["data", "seen", str(tiny.path()), "--steps", "10..11"]) == 2
    assert "step_00000010 has been trained for 10 steps" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_a_run_whose_steps_have_had_other_sizes_is_refused(tiny, capsys, sizes):
    for steps, size in zip((3, 6), sizes, strict=True):
        tiny.completed(f"train.steps={steps}", "scheduler.decay_steps=4", f"train.batch_size={size}")
    capsys.readouterr()

    assert main(["data", "seen", str(tiny.path()), "--steps", "1"]) == 2
    assert "its steps have not all had as many samples (36 in 6 steps)" in capsys.readouterr().err


def test_other_data_than_the_run_has_had_are_refused(tiny, capsys):
    tiny.completed("train.steps=3")
    for file in (tiny.folder / "text").rglob("*.txt"):
        file.write_text(file.read_text() + "more")
    capsys.readouterr()

    assert main(["data", "seen", str(tiny.path()), "--steps", "1"]) == 2
    assert "data: they are not those of the run any more" in capsys.readouterr().err


def test_a_stretch_that_a_rollback_has_left_out_is_not_shown(tiny):
    job = load_job(tiny.config, ["train.global_batch_size=4"], catalog=discover(), world_size=1)
    with opened(job, discover()) as data:
        third = data.step(3)[1]["tokens"]
    with opened(job, discover(), [(4, 8)]) as data:
        facts, second = data.step(2)
        left_out = [data.step(step)[0].left_out for step in (1, 2, 3)]

    assert facts.numbers == [8, 9, 10, 11]
    assert left_out == [[], [(4, 7)], []]
    np.testing.assert_array_equal(second["tokens"], third)


MIXTURE = """data={{name="mixture", sources=[
    {{name="text", weight=0.5, source={{name="text_files", path="{folder}/text", validation=0.3}}}},
    {{name="made_up", weight=0.5, source={{name="synthetic", vocab_size=64}}}},
]}}"""


def test_of_a_mixture_it_says_which_samples_of_which_source_and_what_was_not_learned(tiny, capsys):
    tiny.completed(MIXTURE.format(folder=tiny.folder), "train.steps=3", "scheduler.warmup_steps=0")
    with (tiny.path() / "events.jsonl").open("a") as events:
        events.write(json.dumps({"event": "skipped", "step": 2}) + "\n")
    job = load_job(tiny.config, ["train.global_batch_size=4"], catalog=discover(), world_size=1)
    with opened(job, discover()) as data:
        text = data.source
    capsys.readouterr()

    assert main(["data", "seen", str(tiny.path()), "--steps", "1..3", "--json", "--show", "4"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    made_up = []
    for line in lines:
        assert Counter(line["sample_sources"]) == Counter(line["sources"])
        for number, source, shown in zip(line["samples"], line["sample_sources"], line["texts"], strict=True):
            if source == "text":
                assert shown == text.tokenizer.decode(text.read(np.array([number]))["tokens"][0].tolist())
            else:
                made_up.append(number)
    assert made_up == [*range(6)]
    assert [line["update_left_out"] for line in lines] == [False, True, False]

    assert main(["data", "seen", str(tiny.path()), "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"step 2: samples 4 to 7: (\d+, \d+ of (text|made_up)(, |; )){2}128 targets", said)
    assert "  its update was left out: nothing was learned from these samples" in said


def test_each_source_of_a_mixture_is_counted(tiny, capsys):
    ids = tiny.folder / "ids"
    assert main(["data", "prepare", str(tiny.folder / "text"), "-o", str(ids), "--workers", "1"]) == 0
    files = f'{{name="ids", weight=1, source={{name="token_files", path="{ids}"}}}}, ]'
    mixture = MIXTURE.format(folder=tiny.folder).replace("]", files)
    phase = "phases=[{at=6, data={weights={text=0.0, made_up=0.0}}}]"
    capsys.readouterr()

    arguments = ["data", "inspect", str(tiny.config), mixture, phase]
    assert main([*arguments, "--json", "--show", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    text, made_up, ids = found["parts"]
    assert (text["documents"], made_up["documents"], ids["documents"], found["documents"]) == (10, None, 12, None)
    assert made_up == {"name": "made_up", "samples": None, "tokens": None, "documents": None, "read": 5, "epochs": None}
    assert (text["read"], ids["read"]) == (5, 30)
    assert ids["tokens"] == ids["samples"] * 32
    assert ids["epochs"] == pytest.approx(30 / ids["samples"])

    assert main([*arguments, "--show", "0"]) == 0
    said = capsys.readouterr().out
    assert (
        f"\n  text: {text['samples']:,} samples, {text['tokens']:,} tokens, of 10 documents; 5 samples are read, "
        in said
    )
    assert "\n  made_up: in an order of its own; 5 samples are read\n" in said


def test_steps_that_were_done_again_have_the_update_of_the_last_time(tmp_path):
    events = [("started", 0), ("skipped", 2), ("skipped", 5), ("skipped", 6), ("rolled_back", 6), ("resumed", 3)]
    lines = [json.dumps({"event": name, "step": step, "to_step": 4}) for name, step in events]
    found = []
    for n_lines in range(len(lines) + 1):
        (tmp_path / "events.jsonl").write_text("\n".join([*lines[:n_lines], '{"event": "skip']))
        found.append(steps_without_update(tmp_path / "events.jsonl"))

    assert found == [set(), set(), {2}, {2, 5}, {2, 5, 6}, {2}, {2}]
    assert steps_without_update(tmp_path / "nothing.jsonl") is None


def test_people_are_shown_sizes_and_text(tiny, capsys):
    assert main(["data", "inspect", str(tiny.config), "train.batch_size=2", "--world-size", "3", "--step", "2"]) == 0
    said = capsys.readouterr().out
    assert "tokens, 14,304 in all, of 10 documents; 6 samples a step" in said
    assert "step 2: samples 6 to 11 of the stream; 192 targets" in said
    assert said.count("\n  ") == 3

    assert main(["data", "inspect", str(tiny.config), "--json", "--show", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entries"] == {"tokens": [4, 32], "targets": [4, 32]}
    assert found["batch"]["texts"] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["inspect", "$CONFIG", "--verify"], "--verify is for prepared data"),
        (["inspect", "$CONFIG", "data.pth=x"], "did you mean 'path'?"),
        (["inspect", "$FOLDER", "--step", "3"], "--step: "),
        (["inspect", "$FOLDER", "train.steps=3"], "train.steps=3: "),
        (["inspect", "nowhere.toml"], "nowhere.toml"),
        (["seen", "$FOLDER", "--steps", "1"], "holds no checkpoint"),
        (["seen", "$FOLDER", "--steps", "9..3"], "--steps 9..3: expected two steps from 1 on, as in 100..110"),
    ],
)
def test_what_cannot_be_shown_is_told(tiny, capsys, words, sentence):
    given = [word.replace("$CONFIG", str(tiny.config)).replace("$FOLDER", str(tiny.folder)) for word in words]

    assert main(["data", *given]) == 2
    assert sentence in capsys.readouterr().err


def test_words_for_numbers_and_text():
    assert spans([48, 49, 50, 60, 62, 63]) == "48 to 50, 60, 62 to 63"
    assert in_one_line("a\nb" + "x" * 100) == "a⏎b" + "x" * 69 + "…"


def test_what_is_learned_of_conversations_is_shown(tiny, capsys):
    template = tiny.folder / "chat.jinja"
    template.write_text(
        "{% for one in messages %}<{{ one.role }}>{{ one.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    chats = tiny.folder / "chats.jsonl"
    chats.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"messages": [*chat, *chat * 9]}) + "\n")
    data = (
        f'data={{name="chat", path="{chats}", too_long="skip", tokenizer={{name="bytes", chat_template="{template}"}}}}'
    )
    arguments = ["data", "inspect", str(tiny.config), data, "train.seq_len=64", "eval.interval=0", "train.batch_size=1"]

    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "2 lines, of which 0 are cut and 1 skipped" in shown
    assert "  <user>2 + 2?</><assistant>4</>\n    learned: 4</>\n" in shown
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["lines"], facts["skipped"], facts["batch"]["learned"]) == (2, 1, [["4</>"]])
    assert facts["batch"]["targets"] == len("4</>")
