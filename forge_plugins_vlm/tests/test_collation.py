"""The one collation: what is a target and what is not, and what every position sees."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_plugins_vlm.contracts.image_processor import Layout
from forge_plugins_vlm.data.document import Encoder
from forge_plugins_vlm.data.guard import refuse_copies
from forge_plugins_vlm.data.references import PictureFile
from forge_plugins_vlm.data.writing import Written

X = -100
_SPELLED = "<eos> <image> <unk> a red green blue circle square top left right what is it ? yes no <user> <bot> system"
WORDS = _SPELLED.split()
"""By their ids in the fixtures' tokenizer."""


def ids(text):
    return [X if word == "." else WORDS.index(word) for word in text.split()]


def part(text):
    return {"type": "text", "text": text}


def user(*content):
    return {"role": "user", "content": [one if isinstance(one, dict) else part(one) for one in content]}


def bot(*content):
    return {"role": "assistant", "content": [one if isinstance(one, dict) else part(one) for one in content]}


A = {"type": "image", "image": "a.png"}
B = {"type": "image", "image": "b.png"}
E = "<eos>"
I = "<image> <image>"  # noqa: E741
"""The run of an image of two tokens."""

PAIRS = {
    "caption": (
        [user(A), bot("a red circle")],
        f"{I} a red circle",
        f". a red circle {E}",
        [0, 1, -1, -1, -1],
        [(0, 0, 1)] * 5,
    ),
    "question": (
        [user(A, "what is it ?"), bot("a circle")],
        f"{I} what is it ? a circle",
        f". . . . . a circle {E}",
        [0, 1, *[-1] * 6],
        [(0, 0, 1)] * 8,
    ),
    "text alone": ([user("what is it ?"), bot("yes")], "what is it ? yes", f". . . yes {E}", [-1] * 5, [(0, 0, 0)] * 5),
    "text before the image": (
        [user("what is", A, "?"), bot("no")],
        f"what is {I} ? no",
        f". . . . no {E}",
        [-1, -1, 0, 1, -1, -1],
        [(0, 0, 0)] * 2 + [(0, 0, 1)] * 4,
    ),
    "two images together": (
        [user(A, B, "?"), bot("no")],
        f"{I} {I} ? no",
        f". . . . no {E}",
        [0, 1, 2, 3, -1, -1],
        [(0, 0, 1)] * 2 + [(0, 0, 2)] * 4,
    ),
    "two images apart": (
        [user(A, "a", B, "?"), bot("no")],
        f"{I} a {I} ? no",
        f". . . . . no {E}",
        [0, 1, -1, 2, 3, -1, -1],
        [(0, 0, 1)] * 3 + [(0, 1, 2)] * 4,
    ),
    "two turns": (
        [user(A, "?"), bot("yes"), user("what ?"), bot("no")],
        f"{I} ? yes {E} what ? no",
        f". . yes {E} . . no {E}",
        [0, 1, *[-1] * 6],
        [(0, 0, 1)] * 8,
    ),
    "what follows the last answer is left out": (
        [user(A), bot("yes"), user("what", B)],
        f"{I} yes",
        f". yes {E}",
        [0, 1, -1],
        [(0, 0, 1)] * 3,
    ),
    "interleaved": (
        [bot("a", A, "red", B)],
        f"a {I} red {I}",
        f". . red . . {E}",
        [-1, 0, 1, -1, 2, 3],
        [(0, 0, 0), (0, 0, 1), (0, 0, 1), (0, 0, 1), (0, 1, 2), (0, 1, 2)],
    ),
    "system": (
        [{"role": "system", "content": "system"}, user(A), bot("no")],
        f"system {I} no",
        f". . no {E}",
        [-1, 0, 1, -1],
        [(0, 0, 0)] + [(0, 0, 1)] * 3,
    ),
}


def write(path, *samples):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in samples), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", PAIRS)
def test_the_pair_table(name, tmp_path, picture, open_source):
    picture("a.png", 0), picture("b.png", 1)
    messages, tokens, targets, slots, ranges = PAIRS[name]

    batch = open_source(path=write(tmp_path / "one.jsonl", messages)).read(np.arange(1))

    length = len(tokens.split()) + 1  # the end
    assert batch["tokens"][0, :length].tolist() == ids(f"{tokens} {E}")
    assert batch["targets"][0, :length].tolist() == ids(f"{targets} .")
    assert batch["image_slots"][0, :length].tolist() == [*slots, -1]
    assert batch["image_range"][0, :length].tolist() == [list(one) for one in [*ranges, ranges[-1]]]
    assert (batch["tokens"][0, length:] == 0).all()
    assert (batch["targets"][0, length:] == X).all()
    assert (batch["image_slots"][0, length:] == -1).all()
    assert (batch["image_range"][0, length:] == 0).all()


def test_the_entries_have_the_shapes_of_the_contract(tmp_path, picture, open_source):
    picture("a.png", 0), picture("b.png", 1)
    source = open_source(path=write(tmp_path / "two.jsonl", [user(A), bot("a")], [user(A, B), bot("no")], [bot("yes")]))

    batch = source.read(np.array([0, 1, 2]))

    assert batch["pixels"].shape == (3, 2, 3, 8, 8)
    assert batch["pixels"].dtype == np.uint8
    assert (batch["pixels"][0, 1] == 0).all()
    assert batch["pixels"][1].any(axis=(1, 2, 3)).all()
    assert (batch["pixels"][2] == 0).all()
    assert np.array_equal(batch["pixels"][0, 0], batch["pixels"][1, 0])
    assert batch["image_range"].shape == (3, 16, 3)
    assert {"document", "tile_sizes"}.isdisjoint(batch)
    assert ((batch["positions"] == -1) | (batch["positions"] == np.arange(16))).all()
    assert (batch["positions"] == -1).sum(1).tolist() == [12, 10, 14]
    assert source.read(np.array([2]))["pixels"].shape == (1, 1, 3, 8, 8)


def test_an_image_of_one_token_has_no_slots_but_begins_its_range(tmp_path, picture, open_source):
    picture("a.png")
    source = open_source(path=write(tmp_path / "a.jsonl", [user("what", A, "?"), bot("no")]), one_token_an_image=True)

    batch = source.read(np.arange(1))

    assert batch["tokens"][0, :4].tolist() == ids("what <image> ? no")
    assert batch["targets"][0, :4].tolist() == ids(f". . no {E}")
    assert (batch["image_slots"] == -1).all()
    assert batch["image_range"][0, :4].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1]]


def test_packing_binds_images_to_their_documents(tmp_path, picture, open_source):
    picture("a.png", 0), picture("b.png", 1)
    samples = [user(A), bot("a")], [user("what ?"), bot("no")], [user(B, "?"), bot("yes")]
    source = open_source(path=write(tmp_path / "three.jsonl", *samples), packing=True)

    assert len(source) == 1
    batch = source.read(np.arange(1))

    assert batch["tokens"][0, :13].tolist() == ids(f"{I} a {E} what ? no {E} {I} ? yes {E}")
    assert batch["targets"][0, :13].tolist() == ids(f". a {E} . . no {E} . . . yes {E} .")
    assert batch["document"][0].tolist() == [0] * 4 + [1] * 4 + [2] * 5 + [3] * 3
    assert batch["positions"][0].tolist() == [*range(4), *range(4), *range(5), -1, -1, -1]
    assert batch["image_slots"][0, :13].tolist() == [0, 1, -1, -1, -1, -1, -1, -1, 2, 3, -1, -1, -1]
    assert batch["image_range"][0, :13].tolist() == [[0, 0, 1]] * 4 + [[1, 1, 1]] * 4 + [[1, 1, 2]] * 5


def test_packing_keeps_to_the_most_images_and_loses_nothing(tmp_path, picture, open_source):
    rng = np.random.default_rng(0)
    samples = []
    for number in range(40):
        images = [{"type": "image", "image": picture(f"{number}_{one}.png", 10 * number + one)} for one in range(int(rng.integers(0, 4)))]  # fmt: skip # noqa: E501
        samples.append([user(*images, "what " * int(rng.integers(1, 6))), bot("yes " * int(rng.integers(1, 4)))])
    path = write(tmp_path / "many.jsonl", *samples)
    single, packed = open_source(path=path, seq_len=24), open_source(path=path, seq_len=24, packing=True, max_images=3)

    assert len(packed) < len(single) == 40
    found = []
    for index in range(len(packed)):
        batch = packed.read(np.array([index]))
        assert batch["image_range"].max() <= 3
        for number in np.unique(batch["document"]):
            here = batch["document"][0] == number
            if (batch["targets"][0, here] == X).all():  # padding
                continue
            first = batch["image_range"][0, here][0, 0]
            tiles = batch["pixels"][0, first : batch["image_range"][0, here][-1, 2]]
            slots = batch["image_slots"][0, here]
            found.append((batch["tokens"][0, here].tolist(), batch["targets"][0, here].tolist(),
                          np.where(slots >= 0, slots - 2 * first, slots).tolist(), tiles.tobytes()))  # fmt: skip
    expected = []
    for index in range(40):
        batch = single.read(np.array([index]))
        length = int(np.flatnonzero(batch["targets"][0] != X)[-1]) + 2
        tiles = batch["pixels"][0, : batch["image_range"][0, length - 1, 2]]
        expected.append((batch["tokens"][0, :length].tolist(), batch["targets"][0, :length].tolist(),
                         batch["image_slots"][0, :length].tolist(), tiles.tobytes()))  # fmt: skip
    assert sorted(found) == sorted(expected)


def test_a_document_of_one_more_token_than_a_sample_fits(tmp_path, picture, open_source):
    picture("a.png")
    path = write(tmp_path / "a.jsonl", [user(A), bot("a red circle top")])

    assert open_source(path=path, seq_len=6).read(np.arange(1))["targets"].tolist() == [ids(f". a red circle top {E}")]


def test_what_is_too_long_says_how_many_tokens_its_images_take(tmp_path, picture, open_source):
    picture("a.png"), picture("b.png")
    path = write(tmp_path / "a.jsonl", [user(A, B, "what is it ?"), bot("a red circle")])

    with pytest.raises(ConfigError, match=r"has 12 tokens, of which its 2 images take 4, and a sample takes .* = 9"):
        open_source(path=path, seq_len=8)


def test_what_is_too_long_is_cut_before_an_image_that_does_not_fit(tmp_path, picture, open_source):
    picture("a.png"), picture("b.png")
    path = write(tmp_path / "a.jsonl", [user(A), bot("a red"), user(B), bot("no")], [bot("yes")])

    source = open_source(path=path, seq_len=5, too_long="cut")

    assert source.counts == {"conversations": 2, "cut": 1, "skipped": 0, "unreadable": 0}
    batch = source.read(np.arange(2))
    assert batch["tokens"][0].tolist() == ids(f"{I} a red {E}")
    assert batch["targets"][0].tolist() == ids(f". a red {E} .")
    assert batch["pixels"].shape[1] == 1


def test_what_has_too_many_images_is_refused_or_skipped(tmp_path, picture, open_source):
    picture("a.png")
    path = write(tmp_path / "a.jsonl", [user(A, A, A), bot("a")], [user(A), bot("no")])

    with pytest.raises(ConfigError, match="has 3 images, and max_images = 2"):
        open_source(path=path, max_images=2)
    source = open_source(path=path, max_images=2, too_long="skip")
    assert len(source) == 1
    assert source.counts["skipped"] == 1


def test_a_source_whose_targets_are_its_tokens_is_refused():
    tokens = np.arange(200).reshape(2, 100)

    refuse_copies(tokens, np.roll(tokens, -1, axis=1))
    with pytest.raises(ConfigError, match="200 of 200 targets are the token at their own position"):
        refuse_copies(tokens, tokens)
    masked = np.where(tokens % 3 == 0, tokens, X)
    with pytest.raises(ConfigError, match="would learn to copy its input"):
        refuse_copies(tokens, masked)


def test_the_guard_looks_at_a_source_that_opens(tmp_path, open_source):
    path = write(tmp_path / "a.jsonl", [bot("a " * 400)])

    with pytest.raises(ConfigError, match="targets are the token at their own position"):
        open_source(path=path, seq_len=400)


@pytest.mark.parametrize("messages", [[user("a <image> b"), bot("no")], [user(A), bot("a <image>")]])
def test_a_placeholder_in_a_text_is_refused(messages, tmp_path, picture, open_source):
    picture("a.png")

    with pytest.raises(ConfigError, match=r"line 1.*the placeholder '<image>' stands in (a text|an answer), message"):
        open_source(path=write(tmp_path / "a.jsonl", messages))


def test_a_tokenizer_without_a_placeholder_has_its_end_in_place_of_it(tmp_path, picture, open_source):
    picture("a.png")
    path = write(tmp_path / "a.jsonl", [user(A), bot("no")])

    batch = open_source(path=path, tokenizer={"name": "bytes"}).read(np.arange(1))

    assert batch["tokens"][0, :5].tolist() == [256, 256, *b" no"]
    assert batch["targets"][0, :5].tolist() == [X, X, *b"no", 256]


def test_prompts_are_written_by_a_template(tmp_path, picture, open_source):
    picture("a.png")
    path = write(tmp_path / "a.jsonl", [user(A, "?"), bot("yes"), user("what ?"), bot("no")])

    batch = open_source(path=path, prompt_template="<user> {prompt} <bot> {answer}").read(np.arange(1))

    assert batch["tokens"][0, :12].tolist() == ids(f"<user> {I} ? <bot> yes {E} <user> what ? <bot> no")
    assert batch["targets"][0, :12].tolist() == ids(f". . . . yes {E} . . . . no {E}")


TEMPLATE = (
    "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else 'user' }}> {{ m.content }} <eos> {% endfor %}"
)


def test_a_chat_template_is_masked_by_turns(tmp_path, picture, open_source, tokenizer_path):
    picture("a.png")
    (tmp_path / "chat.jinja").write_text(TEMPLATE + "{% if add_generation_prompt %}<bot> {% endif %}", encoding="utf-8")
    tokenizer = {"name": "tokenizer_file", "path": str(tokenizer_path), "chat_template": str(tmp_path / "chat.jinja")}
    path = write(tmp_path / "a.jsonl", [user(A, " ?"), bot("yes"), user("what ?"), bot("no")])

    batch = open_source(path=path, tokenizer=tokenizer, chat_template=True).read(np.arange(1))

    assert batch["tokens"][0, :13].tolist() == ids(f"<user> {I} ? {E} <bot> yes {E} <user> what ? {E} <bot> no")[:13]
    assert batch["targets"][0, :13].tolist() == ids(f". . . . . yes {E} . . . . . no {E}")[:13]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ loop.revindex }} {{ m.content }} {% endfor %}", "turns do not add up"),
        ("{% for m in messages %}<user> {{ m.content | replace('<image>', '') }} {% endfor %}", "has 1 images, and"),
    ],
)
def test_a_chat_template_that_changes_turns_or_loses_images_is_refused(
    template, words, tmp_path, picture, open_source, tokenizer_path
):
    picture("a.png")
    (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
    tokenizer = {"name": "tokenizer_file", "path": str(tokenizer_path), "chat_template": str(tmp_path / "chat.jinja")}

    with pytest.raises(ConfigError, match=words):
        open_source(
            path=write(tmp_path / "a.jsonl", [user(A, "?"), bot("yes")]), tokenizer=tokenizer, chat_template=True
        )


def test_a_prompt_keeps_all_of_its_text(build, tokenizer_path, tmp_path, picture):
    tokenizer = build(
        build.resolve("tokenizer", {"name": "tokenizer_file", "path": str(tokenizer_path)}), base=tmp_path
    )
    encoder = Encoder(tokenizer, placeholder="<image>", tokens_a_tile=2, one_token_an_image=False)
    image = PictureFile(tmp_path / picture("a.png"), "a.png"), Layout(1, np.arange(2))

    document = encoder(Written("<image> what ?", ()), [image], "the prompt", is_prompt=True)

    assert document.tokens.tolist() == ids(f"{I} what ?")
    assert document.slots.tolist() == [0, 1, -1, -1]
    assert document.ranges().tolist() == [[0, 0, 1]] * 4
    with pytest.raises(ConfigError, match="the prompt has 2 placeholders '<image>' and 1 images"):
        encoder(Written("<image> <image>", ()), [image], "the prompt", is_prompt=True)


@pytest.mark.parametrize("text", ["<image> ?", "what <image> ?"])
def test_a_conversation_begins_with_the_token_of_documents_once(build, tokenizer_path, tmp_path, picture, text):
    table = {"name": "tokenizer_file", "path": str(tokenizer_path), "begin_of_document": "what"}
    tokenizer = build(build.resolve("tokenizer", table), base=tmp_path)
    encoder = Encoder(tokenizer, placeholder="<image>", tokens_a_tile=2, one_token_an_image=False)
    image = PictureFile(tmp_path / picture("a.png"), "a.png"), Layout(1, np.arange(2))

    document = encoder(Written(text, ((len(text) - 1, len(text)),)), [image], "the line")

    assert document.tokens.tolist() == ids(f"what {I} ?")
    assert document.learned.tolist() == [False, False, False, True]
    assert document.slots.tolist() == [-1, 0, 1, -1]
    assert [one.at for one in document.images] == [1]


def test_tiles_with_padding_have_sizes_and_rows_that_end(tmp_path, picture, open_source):
    picture("a.png", size=(16, 32))
    path = write(tmp_path / "a.jsonl", [user(A), bot("no")])
    naflex = {"name": "naflex", "size": 32, "patch": 8, "max_patches": 8}

    batch = open_source(path=path, processor=naflex, token_grid=[4, 4]).read(np.arange(1))
    tiled = open_source(path=path, processor={"name": "tiles", "size": 16}, token_grid=[1, 1]).read(np.arange(1))

    assert batch["tile_sizes"].tolist() == [[[16, 32]]]
    assert batch["image_slots"][0, :9].tolist() == [*range(8), -1]
    assert tiled["image_slots"][0, :5].tolist() == [0, 1, -2, 2, -1]
    assert (tiled["tokens"][0, :4] == 1).all()
    assert (tiled["targets"][0, :3] == X).all()
