"""The data source ``preference_pairs``: two answers to each prompt, of which one is preferred."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from forge_core.contracts.batch import Entry
from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import Split
from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError
from forge_plugins_data.answers import Answered, chosen_records, tokenizer_of, tokens_and_learned
from forge_plugins_data.best_fit import best_fit
from forge_plugins_data.chat import ASSISTANT, clock, template_of
from forge_plugins_data.chat_template import ChatTemplate
from forge_plugins_data.preference_config import PreferencePairsConfig
from forge_plugins_data.preference_reference import ReferenceFile
from forge_plugins_data.prompt_completion import text_of


def open_preference_pairs(
    config: PreferencePairsConfig, /, *, seq_len: int, split: Split, build: Builder, **_: object
) -> PreferencePairs:
    """Read and tokenise the pairs of a split.

    Raises:
        ConfigError: no such files; by file and line, a line that is not JSON or UTF-8, or lacks a key, one whose two
            answers are equal or answer two prompts, and one that is too long, if those are refused; there is none; the
            reference is not there, or is one of other pairs.
    """
    tokenizer = tokenizer_of(config, build)
    pairs = []
    lines = {"lines": 0, "cut": 0, "skipped": 0}
    for record, where in chosen_records(config, split):
        lines["lines"] += 1
        answers = _answered(record, config, tokenizer, where)
        pair = Pair.of([tokens_and_learned(one, tokenizer) for one in answers], where)
        if pair.length > seq_len:
            if config.too_long == "refuse":
                raise ConfigError(
                    f"{where} has {pair.length:,} tokens in its two answers with their prompt, and a sample takes "
                    f'train.seq_len = {seq_len:,}; raise train.seq_len, or set too_long to "cut" or "skip"'
                )
            cut = pair.cut(seq_len) if config.too_long == "cut" else None
            lines["cut" if cut else "skipped"] += 1
            if cut is None:
                continue
            pair = cut
        pairs.append(pair)
    if not pairs:
        part = "" if split == "all" else f"the {split} part of "
        left = f", as all {lines['skipped']} are too long for train.seq_len = {seq_len}" if lines["lines"] else ""
        raise ConfigError(f"{config.place}: {part}the data has no pairs{left}")
    reference = None
    if config.reference is not None:
        reference = ReferenceFile.read(config.reference).of([one.key for one in pairs], tokenizer.fingerprint)
    return PreferencePairs(config, pairs, tokenizer, seq_len, reference, lines)


@attrs.frozen(eq=False)
class Pair:
    """Two answers with their prompt, the chosen one first."""

    tokens: Sequence[np.ndarray]
    """Two ``(N,)`` int64."""
    learned: Sequence[np.ndarray]
    """Two ``(N,)`` bool: which of them are the answer."""
    where: object
    """For messages: file and line."""

    @classmethod
    def of(cls, two: Sequence[tuple[np.ndarray, np.ndarray]], where: object) -> Pair:
        """
        Raises:
            ConfigError: the answers are equal.
        """
        (chosen, of_chosen), (rejected, of_rejected) = two
        if np.array_equal(chosen, rejected):
            raise ConfigError(f"{where}: the chosen and the rejected answer are equal, so that none is preferred")
        return cls((chosen, rejected), (of_chosen, of_rejected), where)

    @property
    def length(self) -> int:
        """Positions in a sample."""
        return sum(map(len, self.tokens))

    @property
    def key(self) -> bytes:
        """Tells it from other pairs."""
        parts = (tokens.astype("<i8").tobytes() for tokens in self.tokens)
        learned = (np.packbits(one).tobytes() for one in self.learned)
        return hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in (*parts, *learned))).digest()[:16]

    def cut(self, room: int) -> Pair | None:
        """The pair without the ends of its answers, each of which keeps half of the room, or what the other leaves;
        ``None`` if that leaves no answer, or the same one twice."""
        first, second = map(len, self.tokens)
        first = min(first, max(room // 2, room - second))
        stops = (first, room - first)
        chosen, rejected = tokens = [one[:stop] for one, stop in zip(self.tokens, stops, strict=True)]
        learned = [one[:stop] for one, stop in zip(self.learned, stops, strict=True)]
        if np.array_equal(chosen, rejected) or not all(one[1:].any() for one in learned):
            return None
        return Pair(tokens, learned, self.where)


class PreferencePairs:
    """Samples of whole pairs. In a sample, documents 2k and 2k + 1 are the answers of a pair, the chosen one first.

    Besides ``tokens``, ``document`` and ``positions``, a batch has ``answers`` ``(B, S)`` int64, the targets of both
    answers, and in ``targets`` one of each pair, the last of the chosen answer. With a reference it has ``reference``
    ``(B, S)`` fp32, the log-probability of an answer where the answer ends, in nats; without, ``pair`` ``(B, S)``
    int64, the number of the pair there.
    """

    def __init__(
        self,
        config: PreferencePairsConfig,
        pairs: Sequence[Pair],
        tokenizer: Tokenizer,
        seq_len: int,
        reference: np.ndarray | None,
        lines: Mapping[str, int],
    ) -> None:
        """Args:
        reference: ``(N, 2)`` fp32, log-probabilities of the chosen and the rejected answers.
        lines: how many there are, and how many of them have been cut or skipped.
        """
        self._config = config
        self.pairs = pairs
        self.tokenizer: Tokenizer | None = tokenizer
        self.vocab_size, self._end_of_document = tokenizer.vocab_size, tokenizer.end_of_document
        self.lines = lines
        self._seq_len = seq_len
        self._reference = reference
        keys = hashlib.sha256(b"".join(one.key for one in pairs)).hexdigest()
        values = "" if reference is None else hashlib.sha256(reference.tobytes()).hexdigest()
        identity = json.dumps(["preference_pairs", tokenizer.fingerprint, seq_len, keys, values])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._order, self._bounds = best_fit(np.array([one.length for one in pairs], dtype=np.int64), seq_len)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def entries(self) -> Mapping[str, Entry]:
        """Entries that need a description."""
        return self._config.entries()

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        shape = (len(indices), self._seq_len)
        batch = {
            "tokens": np.full(shape, self._end_of_document, dtype=np.int64),
            "targets": np.full(shape, IGNORED, dtype=np.int64),
            "document": np.empty(shape, dtype=np.int64),
            "positions": np.empty(shape, dtype=np.int64),
            "answers": np.full(shape, IGNORED, dtype=np.int64),
        }
        if self._reference is None:
            batch["pair"] = np.full(shape, -1, dtype=np.int64)
        else:
            batch["reference"] = np.zeros(shape, dtype=np.float32)
        for row, index in enumerate(indices.tolist()):
            self._fill(index, {name: entry[row] for name, entry in batch.items()})
        return batch

    def _fill(self, index: int, rows: Mapping[str, np.ndarray]) -> None:
        """Write a sample into rows ``(S,)``; what is left of it is a document of its own, with positions of −1."""
        end = document = 0
        for number in self._order[self._bounds[index] : self._bounds[index + 1]].tolist():
            pair = self.pairs[number]
            for side, (tokens, learned) in enumerate(zip(pair.tokens, pair.learned, strict=True)):
                here = slice(end, end + len(tokens))
                rows["tokens"][here], rows["document"][here] = tokens, document
                rows["positions"][here] = np.arange(len(tokens))
                rows["answers"][end : here.stop - 1] = np.where(learned[1:], tokens[1:], IGNORED)
                last = end + int(np.flatnonzero(learned[1:])[-1])
                if side == 0:
                    rows["targets"][last] = rows["answers"][last]
                if self._reference is None:
                    rows["pair"][last] = number
                else:
                    rows["reference"][last] = self._reference[number, side]
                end, document = here.stop, document + 1
        rows["document"][end:], rows["positions"][end:] = document, -1


def _answered(
    record: dict[str, Any], config: PreferencePairsConfig, tokenizer: Tokenizer, where: object
) -> tuple[Answered, Answered]:
    """The chosen and the rejected answer, each with its prompt."""
    for field, key in ((config.chosen_field, "chosen_field"), (config.rejected_field, "rejected_field")):
        if field not in record:
            keys = ", ".join(record)
            raise ConfigError(f"{where} has no {field!r}; its keys are {keys} (choose with the key {key})")
    if isinstance(record[config.chosen_field], str):
        prompt = text_of(record, config.prompt_field, "prompt_field", where)
        chosen = text_of(record, config.chosen_field, "chosen_field", where)
        rejected = text_of(record, config.rejected_field, "rejected_field", where)
        return _completed(prompt, chosen, where), _completed(prompt, rejected, where)
    template = template_of(config, tokenizer)
    (before, chosen_turns), (other, rejected_turns) = (
        _conversation(record, field, config.prompt_field, where)
        for field in (config.chosen_field, config.rejected_field)
    )
    if before != other:
        equal = [one == two for one, two in zip(before, other, strict=False)]
        number = [*equal, False].index(False) + 1
        raise ConfigError(
            f"{where}: the chosen and the rejected answer have two prompts, which differ at message {number}; a pair "
            "answers one"
        )
    tools = record.get("tools")
    return tuple(  # type: ignore[return-value]  # of two
        _rendered(before, turns, tools, template, config, where) for turns in (chosen_turns, rejected_turns)
    )


def _completed(prompt: str, answer: str, where: object) -> Answered:
    return Answered(prompt + answer, [(len(prompt), len(prompt) + len(answer))], where, is_ended=True)


Messages = list[dict[str, Any]]


def _conversation(record: dict[str, Any], field: str, prompt_field: str, where: object) -> tuple[Messages, Messages]:
    """The messages of the prompt, and the answer: what follows the prompt, or the last message of a whole
    conversation, whose record has no prompt or one in words."""
    messages, prompt = _messages(record, field, where), record.get(prompt_field)
    if isinstance(prompt, list):
        before, answer = _messages(record, prompt_field, where), messages
    else:
        before, answer = messages[:-1], messages[-1:]
    if wrong := [one["role"] for one in answer if one["role"] != ASSISTANT]:
        raise ConfigError(f"{where}: the answer in {field!r} must be of the role {ASSISTANT!r}, it is of {wrong[0]!r}")
    return before, answer


def _messages(record: dict[str, Any], field: str, where: object) -> Messages:
    messages = record[field]
    if not isinstance(messages, list) or not messages:
        said = json.dumps(messages)[:80]
        raise ConfigError(f"{where}: {field!r} must be text, or an array of messages as the others are; it is {said}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            said = json.dumps(message)[:80]
            raise ConfigError(f"{where}: message {number} of {field!r} must be an object with a role, it is {said}")
    return messages


def _rendered(
    before: Messages,
    answer: Messages,
    tools: Any,
    template: ChatTemplate,
    config: PreferencePairsConfig,
    where: object,
) -> Answered:
    """An answer is what the template adds to the prompt for it, with the token that ends the turn."""
    try:
        now = clock(config.date)
        prompt = template.render(before, tools=tools, add_generation_prompt=True, now=now).text
        whole = template.render([*before, *answer], tools=tools, now=now).text
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not whole.startswith(prompt):
        raise ConfigError(
            f"{where}: the template's turns do not add up: the prompt is written otherwise when an answer follows, so "
            "that the tokens of the answer cannot be told; use another template"
        )
    return Answered(whole, [(len(prompt), len(whole))], where)
