"""Conversations with a model: what it is asked, where an answer ends, and what is dropped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from forge_core.errors import ConfigError
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.tokenizer_config import BytesConfig
from forge_plugins_inference.chat import converse
from forge_plugins_inference.conversation import Conversation

TEMPLATE = """\
{% for one in messages %}<{{ one.role }}>{{ one.content }}</>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


class Parrot(nn.Module):
    """Says what its script says, whatever it is asked, and keeps what it was asked."""

    vocab_size = 257

    def __init__(self, script: bytes, max_seq_len: int = 200) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.script = [*script]
        self.asked: list[str] = []
        self.weight = nn.Parameter(torch.zeros(()))

    def make_cache(self, batch_size, max_len):
        return []

    def forward(self, tokens, cache):
        if tokens.shape[1] > 1:
            self.asked.append(bytes(tokens[0].tolist()).decode())
        logits = torch.zeros(1, tokens.shape[1], self.vocab_size)
        logits[0, -1, self.script.pop(0)] = 1.0
        return logits


@pytest.fixture
def tokenizer(tmp_path):
    def tokenizer(template=TEMPLATE):
        (tmp_path / "chat.jinja").write_text(template)
        return BytesTokenizer(BytesConfig(chat_template="chat.jinja"), base=tmp_path)

    return tokenizer


def talk(model, tokenizer, *texts, max_new_tokens=30, **keys):
    said: list[str] = []
    conversation = Conversation(model, tokenizer, max_new_tokens=max_new_tokens, temperature=0, say=said.append, **keys)
    return ["".join(conversation.answer(text)) for text in texts], said


def test_each_turn_is_asked_after_all_before_it(tokenizer):
    model = Parrot(b"Hello.</>Fine.</>")

    answers, said = talk(model, tokenizer(), "Hi", "How are you?", system="Be kind")

    assert answers == ["Hello.", "Fine."]
    assert model.asked == [
        "<system>Be kind</><user>Hi</><assistant>",
        "<system>Be kind</><user>Hi</><assistant>Hello.</><user>How are you?</><assistant>",
    ]
    assert said == []


def test_an_answer_ends_with_the_document_the_turn_or_the_room(tokenizer):
    answers, _ = talk(Parrot(b"one!two</>" + b"x" * 30), tokenizer(), "1", "2")
    assert answers == ["one!two", "x" * 30]

    talking = tokenizer()
    talking.ends_of_turn = (ord("!"),)
    model = Parrot(b"one!two")
    model.script.insert(7, 256)
    answers, _ = talk(model, talking, "1", "2")
    assert answers == ["one", "two"]


def test_parts_come_as_they_are_whole(tokenizer):
    model = Parrot("ü < </> 🦀</>".encode())
    conversation = Conversation(model, tokenizer(), max_new_tokens=30, temperature=0, say=pytest.fail)

    assert [*conversation.answer("?")] == ["ü", " ", "< "]
    assert model.script == [*" 🦀</>".encode()]


def test_characters_are_shown_when_all_their_bytes_are_there(tokenizer):
    conversation = Conversation(
        Parrot("a🦀b</>".encode()), tokenizer(), max_new_tokens=30, temperature=0, say=pytest.fail
    )

    assert [*conversation.answer("?")] == ["a", "🦀", "b"]


def test_the_oldest_exchanges_are_dropped_when_there_is_no_room(tokenizer):
    model = Parrot(b"aaa</>bbb</>ccc</>ddd</>", max_seq_len=80)

    answers, said = talk(model, tokenizer(), "1", "2", "3", "4" * 30, max_new_tokens=10, system="S")

    assert answers == ["aaa", "bbb", "ccc", "ddd"]
    assert model.asked[2] == "<system>S</><user>2</><assistant>bbb</><user>3</><assistant>"
    assert model.asked[3] == f"<system>S</><user>{'4' * 30}</><assistant>"
    assert said[0].startswith("the oldest message and its answer are dropped: the model takes max_seq_len = 80 tokens")
    assert said[1].startswith("the 2 oldest exchanges are dropped")


def test_a_message_that_does_not_fit_is_refused_and_taken_back(tokenizer):
    model = Parrot(b"aaa</>", max_seq_len=80)
    conversation = Conversation(model, tokenizer(), max_new_tokens=10, temperature=0, say=pytest.fail)

    with pytest.raises(ConfigError, match="the message has 120 tokens as it is written, and max_seq_len is 80"):
        [*conversation.answer("x" * 100)]

    assert "".join(conversation.answer("y")) == "aaa"
    assert model.asked == ["<user>y</><assistant>"]


def test_an_answer_is_shorter_where_its_message_leaves_less_room(tokenizer):
    answers, _ = talk(Parrot(b"x" * 99, max_seq_len=60), tokenizer(), "y" * 30, max_new_tokens=50)

    assert answers == ["x" * (60 - len(f"<user>{'y' * 30}</><assistant>"))]


def test_what_the_template_refuses_is_said(tokenizer):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE

    with pytest.raises(ConfigError, match=r"chat\.jinja refuses the conversation: no system"):
        talk(Parrot(b""), tokenizer(template), "Hi", system="Be kind")


def test_a_template_is_needed():
    with pytest.raises(ConfigError, match="the tokenizer has no chat template; train on data whose tokenizer"):
        talk(Parrot(b""), BytesTokenizer(BytesConfig()), "Hi")


def test_who_types_is_told_of_a_message_that_does_not_fit_and_goes_on(tokenizer, monkeypatch, capsys):
    typed = iter(["Hi", " ", "x" * 100, "again"])

    def read(prompt):
        print(prompt, end="")
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    model = Parrot(b"one</>two</>", max_seq_len=80)

    converse(Conversation(model, tokenizer(), max_new_tokens=10, temperature=0, say=pytest.fail).answer, [])

    shown = capsys.readouterr()
    assert shown.out == "> one\n> > > two\n> \n"
    assert "the message has 120 tokens" in shown.err


def test_the_model_trains_on_as_it_did(tokenizer):
    model = Parrot(b"one</>").train()
    talk(model, tokenizer(), "Hi")
    assert model.training
