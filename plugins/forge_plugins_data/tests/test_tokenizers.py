"""Bytes, and files of the tokenizers library."""

import json
import pickle

import attrs
import numpy as np
import pytest
import tokenizers

from forge_core.errors import ConfigError
from forge_plugins_data.answers import Answered, tokens_and_learned
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.encoding import encode_document
from forge_plugins_data.tokenizer_config import BytesConfig, TokenizerFileConfig
from forge_plugins_data.tokenizer_file import TokenizerFile
from forge_plugins_inference.prompt import prompt_ids

TEXTS = ["", "plain ASCII\n", "grüße, 世界 🌍\0\ttabs", "e\u0301 and \ufeff"]


@pytest.fixture
def word_file(tmp_path):
    """A tokenizer of words, with special tokens of our choice."""

    def write(*special, name="tokenizer.json", extra_ids=0):
        vocabulary = {token: i for i, token in enumerate(["hello", "world", "[UNK]", *special])}
        vocabulary |= {"far": len(vocabulary) + extra_ids}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(list(special))
        tokenizer.save(str(tmp_path / name))
        return tmp_path / name

    return write


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_those_of_utf8_and_come_back(text):
    tokenizer = BytesTokenizer(BytesConfig())

    ids = tokenizer.encode(text)

    assert ids.dtype == np.int64
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids.tolist()) == text


def test_decoding_bytes_leaves_the_end_of_document_out_and_marks_what_is_not_utf8():
    tokenizer = BytesTokenizer(BytesConfig())

    assert tokenizer.decode([104, 105, 256]) == "hi"
    assert tokenizer.decode([0xC3, 104]) == "\ufffdh"
    assert tokenizer.vocab_size == tokenizer.end_of_document + 1 == 257


@pytest.mark.parametrize("saved_with", ["enable_truncation", "enable_padding"])
def test_a_file_that_was_saved_while_texts_were_cut_or_filled_up_encodes_all_of_them_as_they_are(word_file, saved_with):
    file = word_file("</s>")
    saved = tokenizers.Tokenizer.from_file(str(file))
    saved.enable_truncation(2) if saved_with == "enable_truncation" else saved.enable_padding(length=9)
    saved.save(str(file))

    tokenizer = TokenizerFile(TokenizerFileConfig(path=file.name), base=file.parent)

    assert tokenizer.encode("hello world hello").tolist() == [0, 1, 0]
    assert tokenizer.encode_with_ends("hello world hello")[1].tolist() == [5, 11, 17]


def test_tokens_end_where_they_do_though_the_file_takes_spaces_off_them(tmp_path):
    saved = tokenizers.Tokenizer(tokenizers.models.BPE())
    saved.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    saved.decoder = tokenizers.decoders.ByteLevel()
    saved.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False)
    saved.train_from_iterator(["x:\n    y\n    " * 99], trainer)
    saved.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TokenizerFile(TokenizerFileConfig(path="tokenizer.json"), base=tmp_path)

    ids, ends = tokenizer.encode_with_ends("x:\n    ")

    starts = [0, *ends[:-1]]
    assert [tokenizer.decode([one]) for one in ids] == ["x:\n    "[a:b] for a, b in zip(starts, ends, strict=True)]
    assert len(ids) < 7, "no token has several spaces"


@pytest.mark.parametrize("special", ["<|endoftext|>", "</s>", "<|end_of_text|>", "[EOS]"])
def test_the_end_of_document_is_found_by_its_known_names(word_file, special):
    tokenizer = TokenizerFile(TokenizerFileConfig(path=str(word_file(special))), base=word_file(special).parent)

    assert tokenizer.end_of_document == 3
    assert tokenizer.encode("hello world").tolist() == [0, 1]
    assert tokenizer.decode([0, 1, 3]) == "hello world"


def test_an_unknown_or_ambiguous_end_of_document_must_be_said(word_file, tmp_path):
    def load(file, **keys):
        return TokenizerFile(TokenizerFileConfig(path=file.name, **keys), base=tmp_path)

    with pytest.raises(ConfigError, match=r'no known end of document; say which token .* end_of_document = "…"'):
        load(word_file("[PAD]"))
    with pytest.raises(ConfigError, match=r"several tokens that may end a document \(<\|endoftext\|>, </s>\)"):
        load(word_file("</s>", "<|endoftext|>"))
    with pytest.raises(ConfigError, match=r"end_of_document = '\[PADD\]' is not in .*Did you mean '\[PAD\]'"):
        load(word_file("[PAD]"), end_of_document="[PADD]")
    assert load(word_file("</s>", "<|endoftext|>"), end_of_document="</s>").end_of_document == 3


def test_the_vocabulary_covers_the_largest_id_even_if_some_are_unused(word_file, tmp_path):
    tokenizer = TokenizerFile(TokenizerFileConfig(path=word_file("</s>", extra_ids=100).name), base=tmp_path)

    assert tokenizer.vocab_size == 105
    assert tokenizer.encode("far").max() == 104


def test_a_saved_tokenizer_is_the_same_one(word_file, tmp_path, build):
    original = TokenizerFile(TokenizerFileConfig(path=str(word_file("</s>"))), base=tmp_path)
    (tmp_path / "copy").mkdir()

    table = original.save(tmp_path / "copy")
    copy = build(build.resolve("tokenizer", json.loads(json.dumps(table))), base=tmp_path / "copy")

    assert copy.fingerprint == original.fingerprint
    assert copy.encode("world hello").tolist() == original.encode("world hello").tolist()
    assert BytesTokenizer(BytesConfig()).save(tmp_path) == {"name": "forge-plugins-data:bytes"}


def test_the_fingerprint_tells_tokenizers_apart(word_file, tmp_path):
    def fingerprint(file, **keys):
        return TokenizerFile(TokenizerFileConfig(path=str(file), **keys), base=tmp_path).fingerprint

    both = word_file("</s>", "<|endoftext|>", name="both.json")
    prints = {
        fingerprint(both, end_of_document="</s>"),
        fingerprint(both, end_of_document="<|endoftext|>"),
        fingerprint(word_file("</s>")),
        BytesTokenizer(BytesConfig()).fingerprint,
    }
    assert len(prints) == 4


@pytest.fixture
def beginning(word_file, tmp_path):
    """A tokenizer whose documents begin with a token."""
    config = TokenizerFileConfig(path=str(word_file("<bos>", "</s>")), begin_of_document="<bos>")
    return TokenizerFile(config, base=tmp_path)


def test_documents_begin_with_their_token_and_texts_in_them_do_not(beginning):
    begin, world = beginning.begin_of_document, 1

    assert beginning.encode("world").tolist() == [world]
    assert encode_document(beginning, b"world", "strict", "here").tolist() == [begin, world]
    assert encode_document(beginning, "<bos> world", "strict", "here").tolist() == [begin, world]  # spelled out
    assert encode_document(beginning, "", "strict", "here").tolist() == []  # is left out
    assert encode_document(BytesTokenizer(BytesConfig()), b"a", "strict", "here").tolist() == [97]


def test_the_token_that_begins_documents_is_saved_and_decides_the_ids(beginning, word_file, tmp_path, build):
    (tmp_path / "copy").mkdir()
    copy = build(build.resolve("tokenizer", beginning.save(tmp_path / "copy")), base=tmp_path / "copy")
    plain = TokenizerFile(TokenizerFileConfig(path=str(word_file("<bos>", "</s>"))), base=tmp_path)

    assert (copy.begin_of_document, copy.fingerprint) == (beginning.begin_of_document, beginning.fingerprint)
    assert (plain.begin_of_document, plain.fingerprint != copy.fingerprint) == (None, True)
    assert "begin_of_document" not in plain.save(tmp_path)
    with pytest.raises(ConfigError, match=r"begin_of_document = '<boss>' is not in .* Did you mean '<bos>'\?"):
        TokenizerFile(TokenizerFileConfig(path="tokenizer.json", begin_of_document="<boss>"), base=tmp_path)


def test_answers_begin_with_it_and_do_not_learn_it(beginning):
    text = Answered("hello world", [(6, 11)], "here", is_ended=True)

    ids, learned = tokens_and_learned(text, beginning)

    assert ids.tolist() == [beginning.begin_of_document, 0, 1, beginning.end_of_document]
    assert learned.tolist() == [False, False, True, True]
    of_template, _ = tokens_and_learned(attrs.evolve(text, is_ended=False), beginning)  # which says what it wants
    assert of_template.tolist() == [0, 1]


def test_prompts_begin_as_documents_do(beginning):
    begin = beginning.begin_of_document

    assert [prompt_ids(beginning, text) for text in ("world", "<bos> world", "")] == [[begin, 1], [begin, 1], [begin]]
    assert [prompt_ids(BytesTokenizer(BytesConfig()), text) for text in ("a", "")] == [[97], [256]]


def test_templates_of_conversations_know_it(beginning, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    config = TokenizerFileConfig(path="tokenizer.json", begin_of_document="<bos>")

    template = TokenizerFile(config, base=tmp_path).chat_template

    assert template.render([{"role": "user", "content": "hello"}]).text == "<bos>hello"


def test_tokenizers_can_be_sent_to_other_processes(word_file, tmp_path):
    tokenizer = TokenizerFile(TokenizerFileConfig(path=str(word_file("</s>"))), base=tmp_path)

    copy = pickle.loads(pickle.dumps(tokenizer))

    assert copy.encode("world").tolist() == [1]
    assert copy.fingerprint == tokenizer.fingerprint


def test_files_that_are_missing_or_something_else_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the tokenizer .*none\.json: No such file"):
        TokenizerFile(TokenizerFileConfig(path="none.json"), base=tmp_path)
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"list\.json is not a file of the tokenizers library"):
        TokenizerFile(TokenizerFileConfig(path="list.json"), base=tmp_path)
