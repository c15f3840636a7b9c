"""The sources ``chat`` and ``prompt_completion``: what is learned is what transformers tells by the same template."""

import importlib
import json
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from forge_core.errors import ConfigError
from forge_core.train.scales import count_tokens
from forge_plugins_data.answers import Answered, learned_tokens, tokens_and_learned
from forge_plugins_data.answers_config import ChatConfig, PromptCompletionConfig
from forge_plugins_data.chat import open_chat
from forge_plugins_data.chat_template import ChatTemplate
from forge_plugins_data.prompt_completion import open_prompt_completion
from forge_plugins_data.tokenizer_config import TokenizerFileConfig
from forge_plugins_data.tokenizer_file import TokenizerFile

TEMPLATES = Path(__file__).with_name("chat_templates")
SPECIAL = {
    "qwen": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
    "llama_3": (
        ["<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot_id|>", "__type": "AddedToken"}},
    ),
    "gemma": (["<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], {"bos_token": "<bos>", "eos_token": "<eos>"}),
    "marked": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}),
}
"""For each template its special tokens, of which the first ends a document, and what the configuration says."""
PUBLISHED = ["qwen", "llama_3", "gemma"]
CHATS = [
    [("user", "What is 2 + 2?"), ("assistant", "It is 4.")],
    [("user", "Hello there"), ("assistant", "Hello! How are you?"), ("user", "Fine — naïve 🦀"),
     ("assistant", "Good 👩🏽‍🚀.")],
    [("user", "Say nothing twice"), ("assistant", "Nothing."), ("user", "Again"), ("assistant", "Nothing, again."),
     ("user", "Thanks")],
]  # fmt: skip


def as_messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


def write(path, *records):
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_chats(path, *chats):
    return write(path, *({"messages": as_messages(chat)} for chat in chats))


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder as it is downloaded, with a vocabulary that is trained on the spot."""

    def folder(name, *, in_config=False):
        special, config = SPECIAL[name]
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        texts = [content for chat in CHATS for _, content in chat] * 3 + ["user assistant model system"] * 9
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            texts, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet,
                                       show_progress=False)
        )  # fmt: skip
        out = tmp_path / name
        out.mkdir()
        tokenizer.save(str(out / "tokenizer.json"))
        template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        if in_config:
            config = {**config, "chat_template": template}
        else:
            (out / "chat_template.jinja").write_text(template, encoding="utf-8")
        (out / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return out

    return folder


@pytest.fixture
def open_chats(build, use_tokenizer):
    def open_chats(path, tokenizer, *, seq_len=256, split="train", **keys):
        if isinstance(tokenizer, Path):
            end = SPECIAL[tokenizer.name][0][0]
            tokenizer = use_tokenizer("tokenizer_file", path=str(tokenizer / "tokenizer.json"), end_of_document=end)
        config = ChatConfig(path=str(path), tokenizer=tokenizer, **keys)
        return open_chat(config, seq_len=seq_len, split=split, build=build)

    return open_chats


def documents(source):
    """Tokens of each document, and what is learned of it, in the order of their lengths."""
    batch = source.read(np.arange(len(source)))
    found = []
    for tokens, targets, document in zip(batch["tokens"], batch["targets"], batch["document"], strict=True):
        for number in range(document.max() + 1):
            own = document == number
            if (targets[own] != -100).any():
                found.append((tokens[own].tolist(), targets[own].tolist()))
    return sorted(found, key=lambda one: (len(one[0]), one))


def by_transformers(folder, chat, template=None):
    """The same, by ``apply_chat_template``: a turn is what a prefix of the messages adds to the prompt before it."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def ids(messages, **keys):
        return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **keys)

    messages = as_messages(chat)
    tokens = ids(messages)
    targets = [-100] * len(tokens)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before, through = ids(messages[:number], add_generation_prompt=True), ids(messages[: number + 1])
            assert tokens[: len(through)] == through
            for place in range(len(before), len(through)):
                targets[place - 1] = tokens[place]
    return tokens, targets


@pytest.mark.parametrize("in_config", [False, True], ids=["jinja", "tokenizer_config"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_and_targets_are_those_of_transformers_with_published_templates(
    tmp_path, folder, open_chats, name, in_config
):
    model = folder(name, in_config=in_config)
    source = open_chats(write_chats(tmp_path / "a.jsonl", *CHATS), model)

    expected = sorted((by_transformers(model, chat) for chat in CHATS), key=lambda one: (len(one[0]), one))
    assert documents(source) == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_token_that_ends_a_turn_is_learned(tmp_path, folder, open_chats, name):
    source = open_chats(write_chats(tmp_path / "a.jsonl", *CHATS), folder(name))
    end = {"qwen": "<|im_end|>", "llama_3": "<|eot_id|>", "gemma": "<end_of_turn>"}[name]

    learned = [source.tokenizer.decode([one for one in targets if one != -100]) for _, targets in documents(source)]

    after = {"qwen": "\n", "llama_3": "", "gemma": "\n"}[name]
    said = [[content for role, content in chat if role == "assistant"] for chat in CHATS]
    expected = ["".join(f"{text}{end}{after}" for text in texts) for texts in said]
    assert sorted(learned) == sorted(expected)


def test_marks_of_a_template_are_taken_at_their_word_as_transformers_does(tmp_path, folder, open_chats):
    transformers = pytest.importorskip("transformers")
    model = folder("marked")
    source = open_chats(write_chats(tmp_path / "a.jsonl", *CHATS), model)
    theirs = transformers.AutoTokenizer.from_pretrained(model)

    expected = []
    for chat in CHATS:
        given = theirs.apply_chat_template(
            as_messages(chat), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = given["input_ids"], given["assistant_masks"]
        targets = [token if learned else -100 for token, learned in zip(ids[1:], mask[1:], strict=True)]
        expected.append((ids, [*targets, -100]))

    assert documents(source) == sorted(expected, key=lambda one: (len(one[0]), one))


def test_tools_are_given_to_the_template(tmp_path, folder, open_chats):
    tools = [{"name": "add", "about": "a & b <c>"}]
    path = write(tmp_path / "a.jsonl", {"messages": as_messages(CHATS[0]), "tools": tools})

    ((tokens, _),) = documents(open_chats(path, model := folder("qwen"), seq_len=512))

    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model)
    expected = theirs.apply_chat_template(as_messages(CHATS[0]), tools=tools, tokenize=True, return_dict=False)
    assert tokens == expected


def test_bytes_learn_the_same_characters(tmp_path, open_chats, use_tokenizer):
    tokenizer = use_tokenizer("bytes", chat_template=str(TEMPLATES / "qwen.jinja"))
    source = open_chats(write_chats(tmp_path / "a.jsonl", CHATS[1]), tokenizer, seq_len=300)

    ((_, targets),) = documents(source)

    learned = bytes(one for one in targets if one != -100).decode()
    assert learned == "Hello! How are you?<|im_end|>\nGood 👩🏽‍🚀.<|im_end|>\n"


def test_conversations_share_a_sample_and_stay_apart(tmp_path, folder, open_chats):
    source = open_chats(write_chats(tmp_path / "a.jsonl", *CHATS), folder("llama_3"), seq_len=512)

    batch = source.read(np.array([0]))

    assert len(source) == 1
    assert batch.keys() == {"tokens", "targets", "document", "positions"}
    document, positions, targets = (batch[name][0] for name in ("document", "positions", "targets"))
    assert document.max() == 3  # and the padding
    assert set(positions[document == 3].tolist()) == {-1}
    assert (targets[document == 3] == -100).all()
    assert count_tokens({name: torch.from_numpy(values) for name, values in batch.items()}) == (document < 3).sum()
    for number in range(3):
        own = batch["tokens"][0][document == number]
        assert positions[document == number].tolist() == list(range(len(own)))
        learned = targets[document == number] != -100
        assert (targets[document == number][learned] == np.append(own[1:], -100)[learned]).all()


@pytest.mark.parametrize("too_long", ["cut", "skip"])
def test_too_long_conversations_are_cut_or_skipped_and_counted(tmp_path, folder, open_chats, too_long):
    long = [("user", "Hello"), ("assistant", "a b c d " * 40)]
    hopeless = [("user", "a b c d " * 80), ("assistant", "Yes")]
    path = write_chats(tmp_path / "a.jsonl", CHATS[0], long, hopeless)
    source = open_chats(path, folder("gemma"), seq_len=64, too_long=too_long)

    found = documents(source)

    whole = documents(open_chats(write_chats(tmp_path / "b.jsonl", CHATS[0]), tmp_path / "gemma", seq_len=64))
    assert found[: len(whole)] == whole
    if too_long == "skip":
        assert source.lines == {"lines": 3, "cut": 0, "skipped": 2}
        assert len(found) == 1
    else:
        assert source.lines == {"lines": 3, "cut": 1, "skipped": 1}
        tokens, targets = found[1]
        longer = documents(open_chats(write_chats(tmp_path / "c.jsonl", long), tmp_path / "gemma", seq_len=512))[0]
        assert tokens == longer[0][:64]
        assert targets == longer[1][:64]


def test_a_conversation_that_just_fits_is_whole(tmp_path, folder, open_chats):
    path, model = write_chats(tmp_path / "a.jsonl", CHATS[0]), folder("llama_3")
    ((tokens, targets),) = documents(open_chats(path, model))

    ((exact, learned),) = documents(open_chats(path, model, seq_len=len(tokens) - 1))

    assert (exact, learned) == (tokens[:-1], targets[:-1])
    with pytest.raises(ConfigError, match=rf"line 1 has {len(tokens)} tokens, and a sample takes train.seq_len \+ 1 ="):
        open_chats(path, model, seq_len=len(tokens) - 2)


def test_lines_are_held_out_by_their_number(tmp_path, folder, open_chats):
    chats = [[("user", f"number {n}"), ("assistant", f"yes, {n * n}")] for n in range(40)]
    path, model = write_chats(tmp_path / "a.jsonl", *chats), folder("qwen")
    keys = {"validation": 0.3, "seq_len": 120}

    trained, held_out, both = (
        {tuple(tokens) for tokens, _ in documents(open_chats(path, model, split=split, **keys))}
        for split in ("train", "validation", "all")
    )

    assert not trained & held_out
    assert trained | held_out == both
    assert len(both) == 40
    assert 4 <= len(held_out) <= 20


def test_the_fingerprint_follows_what_is_learned(tmp_path, folder, open_chats, use_tokenizer):
    path = write_chats(tmp_path / "a.jsonl", *CHATS)
    marked = (TEMPLATES / "marked.jinja").read_text().replace("<think>\\n\\n</think>\\n\\n", "")
    (tmp_path / "marked.jinja").write_text(marked)
    (tmp_path / "plain.jinja").write_text(marked.replace("{%- generation %}", "").replace("{%- endgeneration %}", ""))
    sources = [
        open_chats(path, use_tokenizer("bytes", chat_template=str(tmp_path / name)), seq_len=400)
        for name in ("marked.jinja", "plain.jinja", "plain.jinja")
    ]

    assert (sources[0].read(np.array([0]))["tokens"] == sources[1].read(np.array([0]))["tokens"]).all()
    assert sources[0].fingerprint != sources[1].fingerprint == sources[2].fingerprint


def test_the_fingerprint_follows_the_words_where_their_lengths_are_equal(tmp_path, open_chats, folder):
    tokenizer = folder("gemma")
    one, other = (
        open_chats(write_chats(tmp_path / f"{word}.jsonl", [("user", "Say"), ("assistant", word)]), tokenizer)
        for word in ("xyz", "zyx")
    )

    assert [len(tokens) for tokens, _ in documents(one)] == [len(tokens) for tokens, _ in documents(other)]
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("ends", "answers", "learned"),
    [
        ([1, 3, 5], [(1, 1), (2, 2)], [0, 0, 0]),
        ([1, 3, 5], [(1, 3), (3, 3)], [0, 1, 0]),
        ([1, 3, 5], [(2, 4)], [0, 1, 1]),
        ([1, 3, 5], [(3, 6)], [0, 0, 1]),
        ([], [(0, 1)], []),
    ],
)
def test_an_answer_without_a_character_has_no_token_and_one_in_the_middle_of_tokens_has_all_of_them(
    ends, answers, learned
):
    assert learned_tokens(np.array(ends, dtype=np.int64), answers).tolist() == [bool(one) for one in learned]


def test_an_answer_that_nothing_stands_before_is_nothing_to_learn(use_tokenizer, build):
    tokenizer = build(use_tokenizer("bytes"), base=Path())

    with pytest.raises(ConfigError, match="line 1 has nothing to learn"):
        tokens_and_learned(Answered("ab", [(0, 1)], "line 1"), tokenizer)


def test_a_template_that_writes_the_date_needs_one_that_stays(tmp_path, open_chats, use_tokenizer):
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}" + (TEMPLATES / "gemma.jinja").read_text())
    path = write_chats(tmp_path / "a.jsonl", CHATS[0])
    tokenizer = use_tokenizer("bytes", chat_template=str(tmp_path / "dated.jinja"))

    with pytest.raises(ConfigError, match=r"line 1: the template writes down today's date.*set date"):
        open_chats(path, tokenizer)
    ((tokens, _),) = documents(open_chats(path, tokenizer, date="2026-01-31"))

    assert bytes(tokens).startswith(b"31 Jan 2026<start_of_turn>")
    with pytest.raises(ValueError, match="'date' must be a day such as 2026-01-31, got '31 Jan'"):
        ChatConfig(path="a", tokenizer=tokenizer, date="31 Jan")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"messages": [', r"a\.jsonl, line 2 is not JSON"),
        ("[1]", r"line 2 must be an object, it is \[1\]"),
        ('{"conversations": []}', r"line 2 has no 'messages'; its keys are conversations \(.*messages_field"),
        ('{"messages": []}', r"line 2: 'messages' must be an array of messages, it is \[\]"),
        ('{"messages": [{"from": "human"}]}', r"line 2: message 1 must be an object with a role, it is .*human"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            r"line 2 has no message of the role 'assistant', so nothing to learn; its roles are user",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "x"}]}',
            r"line 2: .*chat_template\.jinja refuses the conversation: Conversation roles must alternate",
        ),
        (
            '{"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}]}',
            r"line 2: .*chat_template\.jinja refuses the conversation: System role not supported",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\\ud800"}]}',
            r"a\.jsonl, line 2 is not valid UTF-8",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_file_and_line(tmp_path, folder, open_chats, line, sentence):
    good = {"messages": as_messages(CHATS[0])}

    with pytest.raises(ConfigError, match=sentence):
        open_chats(write(tmp_path / "a.jsonl", good, line, good), folder("gemma"))


def test_turns_that_do_not_add_up_are_refused_by_file_line_and_turn(tmp_path, open_chats, use_tokenizer):
    thinking = (TEMPLATES / "marked.jinja").read_text()
    for mark in ("{%- generation %}", "{%- endgeneration %}"):
        thinking = thinking.replace(mark, "")
    (tmp_path / "thinking.jinja").write_text(thinking)
    tokenizer = use_tokenizer("bytes", chat_template=str(tmp_path / "thinking.jinja"))

    with pytest.raises(
        ConfigError, match=r"a\.jsonl, line 2: the template's turns do not add up: message 2 is written"
    ):
        open_chats(write_chats(tmp_path / "a.jsonl", CHATS[0], CHATS[1]), tokenizer)


def test_an_answer_that_is_asked_for_in_other_words_than_it_is_written_in_is_refused(
    tmp_path, open_chats, use_tokenizer
):
    template = tmp_path / "asking.jinja"
    turns = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    template.write_text(turns + "{% if add_generation_prompt %}<assistant><think>{% endif %}")

    with pytest.raises(
        ConfigError, match=r"line 1: the template's turns do not add up: message 2 is written otherwise"
    ):
        open_chats(write_chats(tmp_path / "a.jsonl", CHATS[0]), use_tokenizer("bytes", chat_template=str(template)))


@pytest.mark.parametrize(
    ("turn", "end"),
    [
        ("[{{ one.role }}] {{ one.content }} <|end|>\n", "<|end|>"),
        ("Say Yes or No to {{ one.role }}: {{ one.content }}</s>", "</s>"),
        ("{{ one.role }}: {{ one.content }}\n", ""),
        ("{{ raise_exception('only tools') }}", ""),
    ],
)
def test_what_ends_a_turn_is_found_by_a_conversation(turn, end):
    template = "{% for one in messages %}" + turn + "{% endfor %}"

    assert ChatTemplate(template, "chat_template.jinja", {}).end_of_turn() == end


def test_a_template_is_needed_and_jinja_to_read_it(tmp_path, folder, open_chats, use_tokenizer, monkeypatch):
    path, model = write_chats(tmp_path / "a.jsonl", *CHATS), folder("qwen")

    with pytest.raises(ConfigError, match=r"the tokenizer bytes has no chat template: put chat_template\.jinja"):
        open_chats(path, use_tokenizer("bytes"))
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.jinja: No such file"):
        open_chats(path, use_tokenizer("bytes", chat_template=str(tmp_path / "gone.jinja")))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"bad\.jinja is not a template of Jinja: "):
        open_chats(path, use_tokenizer("bytes", chat_template=str(tmp_path / "bad.jinja")))
    monkeypatch.delitem(sys.modules, "forge_plugins_data.jinja_environment", raising=False)
    monkeypatch.delattr(importlib.import_module("forge_plugins_data"), "jinja_environment", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"needs the package jinja2, .*pip install 'forge-plugins-data\[chat\]'"):
        open_chats(path, model)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "messages.append(1)",
        "namespace(_x=1)",
        "messages[0].update({'role': 'assistant'})",
        "cycler.__init__.__globals__.os",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path, open_chats, use_tokenizer, expression):
    (tmp_path / "evil.jinja").write_text("{{ " + expression + " }}")

    with pytest.raises(ConfigError, match=r"evil\.jinja refuses the conversation"):
        open_chats(
            write_chats(tmp_path / "a.jsonl", CHATS[0]),
            use_tokenizer("bytes", chat_template=str(tmp_path / "evil.jinja")),
        )


def test_the_template_is_saved_with_the_tokenizer(tmp_path, folder):
    model, out, again = folder("llama_3"), tmp_path / "saved", tmp_path / "again"
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 4]}')
    tokenizer = TokenizerFile(TokenizerFileConfig(path="tokenizer.json"), base=model)
    for directory in (out, again):
        directory.mkdir()

    table = dict(tokenizer.save(out))
    table.pop("name")
    saved = TokenizerFile(TokenizerFileConfig(**table), base=out)
    other = TokenizerFile(
        TokenizerFileConfig(path="tokenizer.json", chat_template=str(TEMPLATES / "qwen.jinja")), base=model
    )
    other.save(again)

    assert saved.chat_template.end_of_turn() == "<|eot_id|>"
    assert saved.ends_of_turn == (7, 4, 0)
    assert saved.fingerprint == tokenizer.fingerprint == other.fingerprint
    assert (again / "chat_template.jinja").read_bytes() == (TEMPLATES / "qwen.jinja").read_bytes()
    now = datetime.now()
    assert saved.chat_template.render(as_messages(CHATS[0]), now=lambda: now).text.startswith(
        "<|begin_of_text|><|start"
    )


@pytest.fixture
def open_completions(build, use_tokenizer):
    def open_completions(path, *, seq_len=64, split="train", **keys):
        config = PromptCompletionConfig(path=str(path), **{"tokenizer": use_tokenizer("bytes"), **keys})
        return open_prompt_completion(config, seq_len=seq_len, split=split, build=build)

    return open_completions


def test_a_completion_and_its_end_are_learned(tmp_path, open_completions):
    pairs = [("2 + 2 = ", "4"), ("naïve: ", "grüße 🦀"), ("", "no prompt"), ("nothing", "")]
    path = write(tmp_path / "a.jsonl", *({"prompt": one, "completion": other} for one, other in pairs))

    found = documents(open_completions(path))

    expected = []
    for prompt, completion in pairs:
        tokens = [*(prompt + completion).encode(), 256]
        first = max(1, len(prompt.encode()))
        expected.append((tokens, [-100] * (first - 1) + tokens[first:] + [-100]))
    assert found == sorted(expected, key=lambda one: (len(one[0]), one))


def test_a_token_across_the_border_of_a_completion_belongs_to_it(tmp_path, open_completions, folder, use_tokenizer):
    model = folder("qwen")
    tokenizer = use_tokenizer("tokenizer_file", path=str(model / "tokenizer.json"))
    source = open_completions(
        write(tmp_path / "a.jsonl", {"prompt": "It", "completion": " is 4."}, {"prompt": "It ", "completion": "is 4."}),
        tokenizer=tokenizer,
    )

    (one, other) = documents(source)

    assert one == other
    assert source.tokenizer.decode([token for token in one[1] if token != -100]) == " is 4."


def test_a_completion_may_end_in_a_space_that_has_no_token(tmp_path, open_completions, use_tokenizer):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"is": 0, "it": 1, "</s>": 2}, unk_token="</s>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    tokenizer = use_tokenizer("tokenizer_file", path=str(tmp_path / "words.json"))
    lines = {"prompt": "is", "completion": " it \n"}, {"prompt": "it is", "completion": " "}
    source = open_completions(write(tmp_path / "a.jsonl", *lines), tokenizer=tokenizer)

    assert documents(source) == [([0, 1, 2], [1, 2, -100]), ([1, 0, 2], [-100, 2, -100])]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"prompt": "x"}, r"line 1 has no 'completion'; its keys are prompt \(choose with the key completion_field\)"),
        ({"prompt": 3, "completion": "x"}, r"line 1: 'prompt' must be text, it is 3"),
        ({"prompt": "a", "completion": "\ud800"}, r"line 1 is not valid UTF-8 .*\)\. Convert or exclude it\.$"),
        ({"prompt": "x" * 99, "completion": "y"}, r"line 1 has 101 tokens, .*raise train.seq_len, or set too_long"),
    ],
)
def test_a_pair_that_cannot_be_used_is_named_by_file_and_line(tmp_path, open_completions, line, sentence):
    with pytest.raises(ConfigError, match=sentence):
        open_completions(write(tmp_path / "a.jsonl", line))


def test_nothing_to_learn_is_an_error(tmp_path, open_completions):
    path = write(tmp_path / "a.jsonl", {"prompt": "x" * 99, "completion": "y"})

    with pytest.raises(
        ConfigError, match=r"the train part of the data has nothing to learn, as all 1 lines are too long"
    ):
        open_completions(path, too_long="cut")
    with pytest.raises(ConfigError, match=r"validation = 0 holds nothing out"):
        open_completions(path, split="validation")
