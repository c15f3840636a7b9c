"""Samples of documents that are tokenised in memory when a source is opened."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import attrs
import numpy as np

from forge_core.contracts.data_source import Split
from forge_core.contracts.tokenizer import Tokenizer
from forge_plugins_data.best_fit import PackedDocuments, find_documents
from forge_plugins_data.config import EncodingErrors, Packing
from forge_plugins_data.documents import Document
from forge_plugins_data.encoding import encode_document
from forge_plugins_data.token_format import smallest_dtype
from forge_plugins_data.token_samples import TokenFacts, TokenSamples
from forge_plugins_data.windows import Span, TokenWindows, count_windows, too_small


@attrs.frozen(kw_only=True)
class InMemory:
    """How documents become samples."""

    source: str
    """The name of the data source, which is part of the fingerprint."""
    tokenizer: Tokenizer
    encoding_errors: EncodingErrors
    document_mask: bool
    packing: Packing
    seq_len: int
    split: Split

    def samples(self, documents: Iterable[Document], what: str) -> TokenSamples:
        """Tokenise documents, in their order, and cut them; those without text are left out.

        Args:
            what: the origin of the documents, for a message: ``"3 files"``.

        Raises:
            ConfigError: a document is not UTF-8, or there is too little text for one sample.
        """
        tokens, n_documents = self._tokenise(documents)
        n_windows = count_windows(len(tokens), self.seq_len)
        if n_windows == 0:
            part = "the text" if self.split == "all" else f"the {self.split} part of the text"
            raise too_small(f"{part} ({what})", self.seq_len, len(tokens))
        end = self.tokenizer.end_of_document
        facts = TokenFacts(
            seq_len=self.seq_len,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer=self.tokenizer,
            separator=end if self.document_mask else None,
            identity=[self.source, self.tokenizer.fingerprint, hashlib.sha256(tokens.data).hexdigest()],
            documents=n_documents,
        )
        if self.packing == "best_fit":
            return PackedDocuments([find_documents(tokens, end)], facts, end_of_document=end)
        return TokenWindows([Span(tokens, 0, n_windows)], facts)

    def _tokenise(self, documents: Iterable[Document]) -> tuple[np.ndarray, int]:
        """All tokens ``(N,)``, and how many documents they are of."""
        dtype = smallest_dtype(self.tokenizer.vocab_size)
        end = np.array([self.tokenizer.end_of_document], dtype=dtype)
        parts: list[np.ndarray] = []
        number = 0
        for document in documents:
            ids = encode_document(self.tokenizer, document.content, self.encoding_errors, document.where)
            if ids is not None and len(ids):
                parts += [ids.astype(dtype), end]
                number += 1
        return np.concatenate([np.empty(0, dtype=dtype), *parts]), number


def unit_hash(name: str) -> float:
    """Uniform in [0, 1): what is held out is chosen by it. Names of files may be any bytes."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big") / 2**48
