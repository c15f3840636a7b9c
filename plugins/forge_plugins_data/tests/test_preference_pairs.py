"""The source ``preference_pairs``: samples of whole pairs, with the reference of each, and what is refused."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_plugins_data.preference_config import PreferencePairsConfig
from forge_plugins_data.preference_pairs import Pair, open_preference_pairs
from forge_plugins_data.preference_reference import write_reference

TEMPLATES = Path(__file__).with_name("chat_templates")
PAIRS = [
    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "five"},
    {"prompt": "a", "chosen": "naïve 🦀", "rejected": "no"},
    {"prompt": "", "chosen": "yes", "rejected": "yesterday"},
]


def write(path, *records):
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def open_pairs(tmp_path, build, use_tokenizer):
    def open_pairs(*records, seq_len=64, split="train", template=None, **keys):
        path = write(tmp_path / "a.jsonl", *records)
        keys.setdefault(
            "tokenizer",
            use_tokenizer("bytes", **({} if template is None else {"chat_template": str(TEMPLATES / template)})),
        )
        config = PreferencePairsConfig(path=str(path), **keys)
        return open_preference_pairs(config, seq_len=seq_len, split=split, build=build)

    return open_pairs


@pytest.mark.parametrize("lengths", [(5, 14), (14, 5)])
def test_a_pair_of_which_a_cut_leaves_one_answer_nothing_is_left_out(lengths):
    """Of a prompt of four tokens and room for nine, one of the two has the prompt alone."""
    prompt, answers = np.arange(4), (np.full(one - 4, one) for one in lengths)
    tokens = [np.concatenate([prompt, one]) for one in answers]
    pair = Pair(tokens, [one >= 4 for one in tokens], "line 1")

    assert pair.cut(9) is None
    assert pair.cut(10) is not None


def test_a_pair_of_which_a_cut_leaves_the_same_answer_twice_is_left_out():
    pair = Pair([np.arange(9), np.append(np.arange(8), 99)], [np.arange(9) > 2] * 2, "line 1")

    assert pair.cut(16) is None
    assert pair.cut(18) is not None


def test_pairs_of_the_same_words_that_learn_other_ones_are_other_pairs():
    tokens = [np.arange(9), np.arange(8)]
    one, other = (Pair(tokens, [np.arange(n) > border for n in (9, 8)], "line 1") for border in (2, 3))

    assert one.key != other.key


def documents(source):
    """Of each pair: the texts that are read and those that are learned, of its two answers."""
    found = []
    batch = source.read(np.arange(len(source)))
    for tokens, answers, targets, document in zip(
        *(batch[name] for name in ("tokens", "answers", "targets", "document")), strict=True
    ):
        for number in range(0, int(document[answers != -100].max(initial=-1)) + 1, 2):
            pair = []
            for one in (number, number + 1):
                own = document == one
                learned = answers[own][answers[own] != -100]
                pair.append((source.tokenizer.decode(tokens[own].tolist()), learned.tolist()))
            (place,) = np.flatnonzero((document == number) & (targets != -100))
            assert targets[place] == answers[place]
            assert place == np.flatnonzero((document == number) & (answers != -100))[-1]
            assert (targets[document == number + 1] == -100).all()
            found.append(pair)
    return found


def test_a_pair_is_two_documents_with_one_target_and_the_targets_of_both_answers(open_pairs):
    source = open_pairs(*PAIRS)
    end = source.tokenizer.end_of_document

    found = documents(source)

    expected = [
        [(one["prompt"] + one[side], [*one[side].encode(), end]) for side in ("chosen", "rejected")] for one in PAIRS
    ]
    first = expected[2]  # without a prompt, its first token has nothing before it
    expected[2] = [(text, learned[1:]) for text, learned in first]
    assert sorted(found) == sorted(expected)


def test_pairs_are_packed_and_their_documents_have_positions_of_their_own(open_pairs):
    source = open_pairs(*PAIRS, seq_len=64)

    batch = source.read(np.arange(len(source)))

    assert len(source) == 1
    assert batch.keys() == {"tokens", "targets", "document", "positions", "answers", "pair"}
    assert batch["document"].max() == 6  # and the padding
    for number in range(6):
        own = batch["document"][0] == number
        assert batch["positions"][0][own].tolist() == list(range(own.sum()))
    assert set(batch["positions"][0][batch["document"][0] == 6].tolist()) == {-1}
    assert sorted(batch["pair"][batch["pair"] >= 0].tolist()) == [0, 0, 1, 1, 2, 2]


def test_the_reference_of_an_answer_stands_where_the_answer_ends(open_pairs, tmp_path):
    plain = open_pairs(*PAIRS)
    values = -np.arange(1.0, 7.0).reshape(3, 2)
    write_reference(tmp_path / "r.npz", [one.key for one in plain.pairs], values, plain.tokenizer.fingerprint)

    batch = open_pairs(*PAIRS, reference=str(tmp_path / "r.npz")).read(np.array([0]))

    assert batch["reference"].dtype == np.float32
    pair, numbers = plain.read(np.array([0]))["pair"], batch["document"] % 2
    assert (batch["reference"][pair < 0] == 0).all()
    for place in zip(*np.nonzero(pair >= 0), strict=True):
        assert batch["reference"][place] == values[pair[place], numbers[place]]


def as_messages(*turns):
    return [{"role": role, "content": content} for role, content in turns]


QUESTION = as_messages(("user", "What is 2 + 2?"))
GOOD, BAD = as_messages(("assistant", "It is 4.")), as_messages(("assistant", "Five!"))
FORMS = {
    "prompt and answers": {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD},
    "whole conversations": {"chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
    "conversations of several turns": {
        "chosen": as_messages(("user", "Hm"), ("assistant", "Yes?")) + QUESTION + GOOD,
        "rejected": as_messages(("user", "Hm"), ("assistant", "Yes?")) + QUESTION + BAD,
    },
    "a prompt in words beside them": {"prompt": "What?", "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
}


@pytest.mark.parametrize("form", FORMS)
def test_messages_are_written_by_the_template_in_each_form_that_data_have(open_pairs, form):
    source = open_pairs(FORMS[form], seq_len=600, template="qwen.jinja")

    ((chosen, rejected),) = documents(source)

    written = "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    for (text, learned), answer in ((chosen, "It is 4."), (rejected, "Five!")):
        assert text.endswith(f"{written}{answer}<|im_end|>\n")
        assert bytes(learned).decode() == f"{answer}<|im_end|>\n"


def test_a_pair_that_just_fits_is_whole(open_pairs):
    length = open_pairs(PAIRS[0]).pairs[0].length

    assert open_pairs(PAIRS[0], seq_len=length).lines == {"lines": 1, "cut": 0, "skipped": 0}
    with pytest.raises(ConfigError, match=f"has {length} tokens in its two answers with their prompt"):
        open_pairs(PAIRS[0], seq_len=length - 1)


def test_too_long_pairs_are_refused_cut_or_skipped_and_counted(open_pairs):
    long = {"prompt": "ab", "chosen": "c" * 40, "rejected": "d" * 8}
    hopeless = {"prompt": "p" * 40, "chosen": "x", "rejected": "y"}
    longest = {"prompt": "p", "chosen": "e" * 40, "rejected": "f" * 50}

    with pytest.raises(
        ConfigError, match=r"a\.jsonl, line 2 has 54 tokens in its two .*takes train.seq_len = 32; raise"
    ):
        open_pairs(PAIRS[0], long, seq_len=32)
    skipped = open_pairs(PAIRS[0], long, hopeless, seq_len=32, too_long="skip")
    cut = open_pairs(PAIRS[0], long, hopeless, longest, seq_len=32, too_long="cut")

    assert skipped.lines == {"lines": 3, "cut": 0, "skipped": 2}
    assert cut.lines == {"lines": 4, "cut": 2, "skipped": 1}
    assert [[*map(len, one.tokens)] for one in cut.pairs] == [[10, 13], [21, 11], [16, 16]]


def test_lines_are_held_out_by_their_number(open_pairs):
    records = [{"prompt": f"{n} is", "chosen": f"{n}", "rejected": f"{n + 1}"} for n in range(40)]

    trained, held_out, both = (
        {one.key for one in open_pairs(*records, split=split, validation=0.3).pairs}
        for split in ("train", "validation", "all")
    )

    assert not trained & held_out
    assert trained | held_out == both
    assert 4 <= len(held_out) <= 20


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"prompt": "x", "chosen": "y"}', r"line 2 has no 'rejected'; its keys are prompt, chosen \(.*rejected_field"),
        ('{"prompt": "x", "best": "y", "rejected": "z"}', r"line 2 has no 'chosen'; its keys .*chosen_field"),
        ('{"chosen": "y", "rejected": "z"}', r"line 2 has no 'prompt'; its keys are chosen, rejected"),
        ('{"prompt": "x", "chosen": "y", "rejected": 3}', "line 2: 'rejected' must be text, it is 3"),
        ('{"prompt": "x", "chosen": "y", "rejected": "y"}', "line 2: the chosen and the rejected answer are equal"),
        (json.dumps({"prompt": QUESTION, "chosen": GOOD, "rejected": "y"}), "must be text, or an array of messages"),
        (json.dumps({"prompt": QUESTION, "chosen": GOOD, "rejected": QUESTION}), "must be of the role 'assistant', it"),
        (json.dumps({"chosen": [{"from": "x"}], "rejected": GOOD}), "message 1 of 'chosen' must be an object with a"),
        (
            json.dumps({"chosen": QUESTION + GOOD, "rejected": [*as_messages(("user", "What is 3?")), *BAD]}),
            "line 2: the chosen and the rejected answer have two prompts, which differ at message 1",
        ),
        ('{"prompt": "x", "chosen": "", "rejected": "y', "line 2 is not JSON"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_used_is_named_by_file_and_line(open_pairs, line, sentence):
    with pytest.raises(ConfigError, match=sentence):
        open_pairs(PAIRS[0], line, template="qwen.jinja")


def test_a_prompt_that_is_written_otherwise_when_an_answer_follows_is_refused(open_pairs, tmp_path):
    template = tmp_path / "asking.jinja"
    turns = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    template.write_text(turns + "{% if add_generation_prompt %}<assistant><think>{% endif %}")

    with pytest.raises(
        ConfigError, match="line 1: the template's turns do not add up: the prompt is written otherwise"
    ):
        open_pairs(FORMS["whole conversations"], template=template)


@pytest.mark.parametrize("values", [np.zeros((2, 3)), np.zeros((1, 2)), np.zeros(2), np.full((2, 2), np.inf)])
def test_a_reference_whose_values_are_not_two_for_each_pair_is_refused(open_pairs, tmp_path, values):
    plain = open_pairs(*PAIRS[:2])
    path = tmp_path / "r.npz"
    write_reference(path, [one.key for one in plain.pairs], values, plain.tokenizer.fingerprint)

    with pytest.raises(ConfigError, match=r"r\.npz' is no reference of pairs of version 1"):
        open_pairs(*PAIRS[:2], reference=str(path))


def test_a_reference_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    flushed, fsync = [], os.fsync

    def seen(handle):
        flushed.append((os.fstat(handle).st_ino, {one.name for one in tmp_path.iterdir()}))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", seen)

    write_reference(tmp_path / "r.npz", [b"k" * 16], np.zeros((1, 2)), "bytes")

    first, last = flushed
    assert first == ((tmp_path / "r.npz").stat().st_ino, {f".r.npz.{os.getpid()}"})
    assert last == (tmp_path.stat().st_ino, {"r.npz"})


def test_a_reference_that_is_not_there_or_is_of_other_data_is_refused(open_pairs, tmp_path):
    path = tmp_path / "r.npz"
    with pytest.raises(ConfigError, match=r"r\.npz': there is no such file; make it by forge eval RUN --evaluation"):
        open_pairs(*PAIRS, reference=str(path))
    plain = open_pairs(*PAIRS[:2])
    keys = [one.key for one in plain.pairs]
    write_reference(path, keys, np.zeros((2, 2)), plain.tokenizer.fingerprint)

    open_pairs(*PAIRS[:2], reference=str(path))
    with pytest.raises(ConfigError, match=r"r\.npz' lacks 1 of the 3 pairs: it is of other data, or of another templ"):
        open_pairs(*PAIRS, reference=str(path))
    write_reference(path, keys, np.zeros((2, 2)), "another")
    with pytest.raises(ConfigError, match=r"r\.npz' is of another tokenizer"):
        open_pairs(*PAIRS[:2], reference=str(path))
    write_reference(path, keys, np.full((2, 2), np.nan), plain.tokenizer.fingerprint)
    with pytest.raises(ConfigError, match=r"r\.npz' is no reference of pairs of version 1"):
        open_pairs(*PAIRS[:2], reference=str(path))
    np.save(array := tmp_path / "r.npy", np.zeros((2, 2)))
    with pytest.raises(ConfigError, match=r"r\.npy' is damaged, or no reference of pairs"):
        open_pairs(*PAIRS[:2], reference=str(array))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"r\.npz' is damaged, or no reference of pairs"):
        open_pairs(*PAIRS[:2], reference=str(path))


def test_the_fingerprint_follows_the_pairs_and_their_reference(open_pairs, tmp_path):
    plain = open_pairs(*PAIRS)
    fingerprints = {plain.fingerprint, open_pairs(*PAIRS[:2]).fingerprint, open_pairs(*PAIRS, seq_len=60).fingerprint}
    for number in range(2):
        path = tmp_path / f"{number}.npz"
        values = np.full((3, 2), float(number))
        write_reference(path, [one.key for one in plain.pairs], values, plain.tokenizer.fingerprint)
        fingerprints.add(open_pairs(*PAIRS, reference=str(path)).fingerprint)

    assert len(fingerprints) == 5
    assert open_pairs(*PAIRS).fingerprint == plain.fingerprint
