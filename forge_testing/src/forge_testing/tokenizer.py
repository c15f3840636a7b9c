"""Conformance of tokenizers (contract: ``forge_core.contracts.tokenizer``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tomli_w

from forge_core.contracts.tokenizer import Tokenizer
from forge_testing.component_case import ComponentCase

CORPUS = """Straße, ŒUVRE, ǅ and İstanbul: Capitals and ACCENTS, e\u0301 composed and é in one.
\tTabs\u00a0and\u2003spaces that are no blanks,\r\nlines of both kinds, \u200bnothing between, \ufeff and the end.
Ελληνικά, русский, हिन्दी, العربية, עברית, 日本語, 한국어, ไทย; 👩🏽‍🚀 is one emoji of four, 🇪🇺 of two. ½ ﬁ Ⅷ ℌ
[UNK] <pad> &amp; %20 \\u0041 are text as any other. \x00\x07\x1b[0m\x7f
"""
"""Capitals, accents in two forms, scripts, emoji of several code points, control characters, and what looks like
markup: whoever lower-cases, normalises, strips or leaves something out does not give it back."""


class TokenizerConformance(ComponentCase):
    """Subclass it, name the component, and pytest runs every check below on it."""

    kind = "tokenizer"
    texts: ClassVar[tuple[str, ...]] = (
        "",
        "a",
        "def f(x):\n    return x + 1\n",
        "  two  spaces\t",
        "naïve – 東京 🦀",
        CORPUS,
    )
    """What is encoded and decoded again; restrict it for a tokenizer that cannot express everything."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        """The directory that relative paths in ``config`` start from. Override it to put files there."""
        return tmp_path

    def rebuild(self, table: Mapping[str, Any], base: Path) -> Tokenizer:
        """Build a tokenizer from the table that ``save`` returned, as the core does."""
        build = self.builder()
        tokenizer: Tokenizer = build(build.resolve("tokenizer", table), base=base)
        return tokenizer

    def test_states_its_sizes(self, base: Path) -> None:
        tokenizer = self.make(base=base)

        size, end = tokenizer.vocab_size, tokenizer.end_of_document
        assert isinstance(size, int), f"vocab_size must be an int, got {type(size).__name__}"
        assert size > 0, f"vocab_size must be positive, got {size}"
        assert 0 <= end < size, f"end_of_document must be an id below vocab_size = {size}, got {end}"
        fingerprint = tokenizer.fingerprint
        assert isinstance(fingerprint, str), f"fingerprint must be a string, got {type(fingerprint).__name__}"
        assert fingerprint, "fingerprint is empty"

    def test_ids_are_valid(self, base: Path) -> None:
        tokenizer = self.make(base=base)

        for text in self.texts:
            ids = tokenizer.encode(text)
            assert isinstance(ids, np.ndarray), f"encode must return a numpy array, got {type(ids).__name__}"
            assert ids.dtype == np.int64, f"encode must return int64, got {ids.dtype} for {text!r}"
            assert ids.ndim == 1, f"encode must return ids of shape (N,), got {ids.shape} for {text!r}"
            assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all(), (
                f"encode returns ids outside of 0 to {tokenizer.vocab_size - 1} for {text!r}"
            )

    def test_adds_nothing(self, base: Path) -> None:
        tokenizer = self.make(base=base)

        assert len(tokenizer.encode("")) == 0, "encode('') must be empty; nothing is added at either end"
        for text in self.texts:
            assert tokenizer.end_of_document not in tokenizer.encode(text).tolist(), (
                f"encode adds end_of_document to {text!r}; the data source does that"
            )

    def test_text_survives(self, base: Path) -> None:
        tokenizer = self.make(base=base)

        for text in self.texts:
            again = tokenizer.decode(tokenizer.encode(text).tolist())
            assert again == text, f"decode(encode(text)) is {again!r} for {text!r}{_difference(again, text)}"

    def test_end_of_document_has_no_text(self, base: Path) -> None:
        tokenizer = self.make(base=base)

        text = tokenizer.decode([tokenizer.end_of_document])
        assert text == "", f"decode must make nothing of end_of_document, got {text!r}"

    def test_is_deterministic(self, base: Path) -> None:
        first, second = self.make(base=base), self.make(base=base)

        assert first.fingerprint == second.fingerprint, "two tokenizers of one configuration differ in fingerprint"
        for text in self.texts:
            assert np.array_equal(first.encode(text), second.encode(text)), (
                f"two tokenizers encode {text!r} differently"
            )

    def test_saved_is_the_same(self, base: Path, tmp_path: Path) -> None:
        tokenizer = self.make(base=base)
        written, moved = tmp_path / "written", tmp_path / "moved"
        written.mkdir()

        table = tokenizer.save(written)
        assert table.get("name"), f"save must return a table with the key name, got {dict(table)}"
        table = tomllib.loads(tomli_w.dumps(table))  # what a sidecar or a checkpoint keeps
        written.rename(moved)  # as a checkpoint that is copied elsewhere
        again = self.rebuild(table, moved)

        assert again.fingerprint == tokenizer.fingerprint, (
            f"the tokenizer built from what save wrote has the fingerprint {again.fingerprint}, not "
            f"{tokenizer.fingerprint}"
        )
        for text in self.texts:
            assert np.array_equal(again.encode(text), tokenizer.encode(text)), (
                f"the tokenizer built from what save wrote encodes {text!r} differently"
            )
        own, theirs = (getattr(one, "begin_of_document", None) for one in (tokenizer, again))
        assert own == theirs, f"the tokenizer built from what save wrote has the begin_of_document {theirs}, not {own}"

    def test_optional_members_agree(self, base: Path) -> None:
        """``encode_bytes``, ``encode_with_ends``, ``begin_of_document`` and ``ends_of_turn``, where they are there."""
        tokenizer: Any = self.make(base=base)
        begin, size = getattr(tokenizer, "begin_of_document", None), tokenizer.vocab_size

        for name, ids in {
            "begin_of_document": [begin or 0],
            "ends_of_turn": getattr(tokenizer, "ends_of_turn", ()),
        }.items():
            assert all(0 <= one < size for one in ids), f"{name} must be below vocab_size = {size}, got {[*ids]}"
        for text in self.texts:
            ids = tokenizer.encode(text)
            assert begin is None or begin not in ids, (
                f"encode adds begin_of_document to {text!r}; the data source does that"
            )
            if hasattr(tokenizer, "encode_bytes"):
                of_bytes = tokenizer.encode_bytes(text.encode())
                assert np.array_equal(of_bytes, ids), f"encode_bytes and encode differ for {text!r}"
            if hasattr(tokenizer, "encode_with_ends"):
                same, ends = tokenizer.encode_with_ends(text)
                assert np.array_equal(same, ids), f"encode_with_ends and encode differ for {text!r}"
                is_wrong = len(ends) != len(ids) or bool((np.diff(ends) < 0).any())
                assert not is_wrong, (
                    f"encode_with_ends must give an end for each id, in their order, got {ends} for {text!r}"
                )
                assert not len(ids) or ends[-1] == len(text), (
                    f"the last end of {text!r} must be {len(text)}, got {ends[-1]}"
                )


def _difference(again: str, text: str) -> str:
    """Where it begins, in a text of more than a line."""
    if text.count("\n") < 2:
        return ""
    place = next((i for i, (one, other) in enumerate(zip(again, text, strict=False)) if one != other), len(again))
    return f"; from character {place} on {again[place : place + 20]!r} in place of {text[place : place + 20]!r}"
