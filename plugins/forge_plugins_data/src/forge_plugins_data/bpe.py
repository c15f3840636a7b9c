"""Training a byte-level BPE tokenizer on the input that it is going to be used for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from forge_core.errors import ConfigError
from forge_plugins_data.config import EncodingErrors
from forge_plugins_data.documents import Unit, read_documents
from forge_plugins_data.encoding import valid_text

END_OF_DOCUMENT = "<|endoftext|>"
SAMPLE_BYTES = 512 * 2**20
"""At most so much text is learned from: the trainer holds its words in memory, and more hardly changes the merges."""
_UNIT_BYTES = 2**20
"""At least so much from each part of the input that is looked at."""


def train_bpe(units: Sequence[Unit], vocab_size: int, field: str, errors: EncodingErrors) -> tokenizers.Tokenizer:
    """Train as GPT-2 did (Radford et al. 2019): merges within words, starting from all 256 bytes, nothing unknown.

    Learns from the beginnings of evenly spaced units, up to ``SAMPLE_BYTES``; the same input gives the same tokenizer.

    Args:
        vocab_size: ids wanted, the end of a document included; fewer come out if the text has too few pairs.

    Raises:
        ConfigError: ``vocab_size`` has no room for the bytes and the end of a document.
    """
    smallest = 256 + 1
    if vocab_size < smallest:
        raise ConfigError(f"a BPE vocabulary needs at least {smallest} ids (256 bytes, the end of a document)")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(units, field, errors), trainer)
    return tokenizer


def _sample(units: Sequence[Unit], field: str, errors: EncodingErrors) -> Iterator[str]:
    most_units = SAMPLE_BYTES // _UNIT_BYTES
    chosen = units[:: -(-len(units) // most_units)]
    budget = SAMPLE_BYTES // len(chosen)
    for unit in chosen:
        taken = 0
        for document in read_documents(unit, field, errors):
            text = valid_text(document.content, errors, document.where)
            if text is None:
                continue
            yield text[: budget - taken]
            taken += len(text)
            if taken >= budget:
                break
