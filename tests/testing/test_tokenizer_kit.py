"""The tokenizer kit passes a tokenizer that keeps the contract, and has a sentence for each way to break it."""

import itertools

import numpy as np
import pytest

from forge_testing.tokenizer import TokenizerConformance


class Bytes:
    vocab_size = 257
    end_of_document = 256
    fingerprint = "bytes"

    def encode(self, text):
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids):
        return bytes(number for number in ids if number < 256).decode(errors="replace")

    def save(self, directory):
        (directory / "bytes.txt").write_text("bytes")
        return {"name": "test:bytes", "file": "bytes.txt"}


class Case(TokenizerConformance):
    tokenizer = Bytes

    def make(self, *, base):
        return self.tokenizer()

    def rebuild(self, table, base):
        assert (base / table["file"]).exists()
        return self.tokenizer()


class TestBytes(Case):
    pass


class Extended(Bytes):
    begin_of_document = 255
    ends_of_turn = (256,)

    def encode_bytes(self, content):
        return self.encode(content.decode())

    def encode_with_ends(self, text):
        ends = [number for number, character in enumerate(text, 1) for _ in character.encode()]
        return self.encode(text), np.array(ends, dtype=np.int64)


class TestExtended(Case):
    tokenizer = Extended


def faulty(**attributes):
    return type("Faulty", (Bytes,), attributes)


def encoding(change):
    return faulty(encode=lambda self, text: change(Bytes().encode(text)))


def with_bytes(change):
    return faulty(encode_bytes=lambda self, content: change(Bytes().encode(content.decode())))


def with_ends(change):
    return faulty(encode_with_ends=lambda self, text: change(Bytes().encode(text)))


class Beginning(Bytes):
    number = itertools.count()

    def __init__(self):
        self.begin_of_document = None if next(self.number) else 256


class Counted(Bytes):
    number = itertools.count()

    def __init__(self):
        self.fingerprint = f"bytes {next(self.number)}"


class Nameless(Bytes):
    def save(self, directory):
        return {}


FAULTS = [
    (faulty(vocab_size=256.0), "test_states_its_sizes", "vocab_size must be an int, got float"),
    (faulty(end_of_document=257), "test_states_its_sizes", "must be an id below vocab_size = 257, got 257"),
    (faulty(fingerprint=""), "test_states_its_sizes", "fingerprint is empty"),
    (encoding(np.ndarray.tolist), "test_ids_are_valid", "must return a numpy array, got list"),
    (encoding(lambda ids: ids.astype(np.int32)), "test_ids_are_valid", "must return int64, got int32 for ''"),
    (encoding(lambda ids: ids[None]), "test_ids_are_valid", r"must return ids of shape \(N,\), got \(1, 0\)"),
    (encoding(lambda ids: ids + 200), "test_ids_are_valid", "ids outside of 0 to 256 for 'a'"),
    (encoding(lambda ids: np.append(ids, 1)), "test_adds_nothing", r"encode\(''\) must be empty"),
    (
        encoding(lambda ids: np.append(ids, 256) if len(ids) else ids),
        "test_adds_nothing",
        "encode adds end_of_document to 'a'",
    ),
    (encoding(lambda ids: ids[::-1]), "test_text_survives", r"decode\(encode\(text\)\) is .* for 'def f"),
    (
        faulty(encode=lambda self, text: Bytes().encode(text if text.isascii() and len(text) < 40 else text.lower())),
        "test_text_survives",
        "from character 0 on 'straße, œuvre, ǆ and' in place of 'Straße, ŒUVRE, ǅ and'",
    ),
    (faulty(decode=lambda self, ids: "<end>"), "test_end_of_document_has_no_text", "got '<end>'"),
    (Counted, "test_is_deterministic", "two tokenizers of one configuration differ in fingerprint"),
    (faulty(begin_of_document=257), "test_optional_members_agree", r"begin_of_document must be below .*, got \[257\]"),
    (faulty(begin_of_document=97), "test_optional_members_agree", "encode adds begin_of_document to 'a'"),
    (faulty(ends_of_turn=(256, -1)), "test_optional_members_agree", r"ends_of_turn must be below .*, got \[256, -1\]"),
    (with_bytes(lambda ids: ids + 1), "test_optional_members_agree", "encode_bytes and encode differ for 'a'"),
    (
        with_ends(lambda ids: (ids + 1, ids)),
        "test_optional_members_agree",
        "encode_with_ends and encode differ for 'a'",
    ),
    (
        with_ends(lambda ids: (ids, ids[1:])),
        "test_optional_members_agree",
        r"an end for each id, in their order, got \[\]",
    ),
    (
        with_ends(lambda ids: (ids, np.zeros(len(ids)))),
        "test_optional_members_agree",
        "the last end of 'a' must be 1, got 0",
    ),
    (Beginning, "test_saved_is_the_same", "has the begin_of_document None, not 256"),
    (Nameless, "test_saved_is_the_same", "must return a table with the key name, got {}"),
    (Counted, "test_saved_is_the_same", "built from what save wrote has the fingerprint"),
]


@pytest.mark.parametrize(("tokenizer", "check", "sentence"), FAULTS)
def test_a_fault_is_found_and_told(tmp_path, tokenizer, check, sentence):
    case = Case()
    case.tokenizer = tokenizer
    given = {"base": tmp_path} | ({"tmp_path": tmp_path} if check == "test_saved_is_the_same" else {})

    with pytest.raises(AssertionError, match=sentence):
        getattr(case, check)(**given)


def test_every_check_has_a_fault_that_it_finds():
    checks = {name for name in vars(TokenizerConformance) if name.startswith("test_")}

    assert {check for _, check, _ in FAULTS} == checks
