"""The sources of a mixture: what they have together, and batches that are gathered from several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from forge_core.contracts.batch import Entry
from forge_core.contracts.data_source import CheckedSource, PositionedSource, Source, StreamedSource
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.data.counts import counted_entry, with_counts
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_plugins_data.mixed_entries import has_several_sizes, mixed_entries, sides_of
from forge_plugins_data.mixture_config import MixtureSource
from forge_plugins_data.windows import TokenWindows


class Part:
    """One source of a mixture. An indexed one has a stream of its own: epoch after epoch, each in another order."""

    def __init__(self, described: MixtureSource, source: Source | StreamedSource, seed: int) -> None:
        self.name = described.name
        self.loss_weight = described.loss_weight
        self.source = source
        self._counted_in = counted_entry(source)
        self.streams = source if isinstance(source, StreamedSource) else None
        self.n_streams = 0 if self.streams is None else self.streams.n_streams
        self._stream = None if isinstance(source, StreamedSource) else SampleStream(source, seed=seed, shuffle=True)
        self._has_own_order = isinstance(source, PositionedSource)  # asked once, as protocols take their time to answer

    @property
    def samples(self) -> int | None:
        """How many samples an epoch has; ``None`` of a source that has no epochs, or is read as streams."""
        return None if isinstance(self.source, PositionedSource | StreamedSource) else len(self.source)

    def read(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Of an indexed source, the samples ``numbers`` ``(B,)`` of its stream."""
        return self._indexed.read(numbers)

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """Of an indexed source, which samples those are: int64 ``(B,)``. One with an order of its own has no others
        than ``numbers``."""
        return numbers if self._has_own_order else self._indexed.indices(numbers)

    def entry_names(self) -> set[str]:
        """The entries of its first sample, with the ones that the engine counts by.

        Raises:
            ConfigError: a stream has no sample.
        """
        if self.streams is None:
            return set(self.read(np.zeros(1, np.int64)))
        for sample, _ in self.streams.open(0, None):
            return set(self.as_batch(sample))
        raise ConfigError(self.without_samples(0))

    def as_batch(self, sample: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A sample of a stream as a batch of one, with the entries that the engine counts by."""
        return with_counts({name: values[None] for name, values in sample.items()}, self._counted_in)

    def without_samples(self, stream: int) -> str:
        """A sentence about a stream that has none."""
        return f"source {self.name!r}: stream {stream} of {self.n_streams} (from 0) has no sample; use fewer streams"

    @property
    def _indexed(self) -> SampleStream:
        assert self._stream is not None, "it is read as streams"
        return self._stream


@attrs.frozen(kw_only=True)
class MixtureParts:
    """The parts of a mixture, and what they have together."""

    parts: Sequence[Part]
    names: tuple[str, ...]
    numbers: np.ndarray
    """``(parts,)`` int64: where each is among ``names``."""
    windows: Sequence[TokenWindows]
    """The sources, if a sample of each is its tokens and targets alone; or nothing."""
    vocab_size: int
    tokenizer: Tokenizer | None
    entries: Mapping[str, Entry]
    has_positions: bool
    """Whether a part has the entry ``positions``: all samples of the mixture then do."""
    loss_weights: np.ndarray | None
    """``(parts,)`` fp32: of the targets of each part. ``None`` if no target has a weight."""

    @classmethod
    def of(cls, parts: Sequence[Part], names: tuple[str, ...]) -> MixtureParts:
        first, *others = parts
        tokenizers = [(part.name, part.source.tokenizer) for part in parts if part.source.tokenizer is not None]
        for name, tokenizer in tokenizers:
            if tokenizer.fingerprint != tokenizers[0][1].fingerprint:
                raise ConfigError(
                    f"source {name!r} has another tokenizer than {tokenizers[0][0]!r}, so that their ids do not mean "
                    "the same; prepare both with one tokenizer"
                )
        found = {part.name: part.entry_names() for part in parts}
        described = mixed_entries(part.source.entries() for part in parts if hasattr(part.source, "entries"))
        for name, entry in described.items():
            if has_several_sizes(described, name) and not sides_of(entry):
                raise ConfigError(
                    f"sources give {name} of several sizes, and one does not say which its own are (entries), so that "
                    "which is which cannot be seen; leave it out, or give all of them one size"
                )
        has_weights, has_positions = (any(name in own for own in found.values()) for name in ("weights", "positions"))
        replaced = {"weights", "positions", *(name for name, entry in described.items() if entry.absent is not None)}
        for names_of_part in found.values():
            names_of_part.difference_update(replaced)  # a part that does not have them has them from `gathered`
        for part in others:
            if differing := sorted(found[part.name] ^ found[first.name]):
                is_packed = differing[0] == "document"
                hint = (
                    "set document_mask or packing alike in all of them"
                    if is_packed
                    else "use one kind of source for both"
                )
                with_it, without = (part.name, first.name)[:: 1 if differing[0] in found[part.name] else -1]
                raise ConfigError(
                    f"batches of source {with_it!r} have the entry {differing[0]!r}, and those of {without!r} have "
                    f"not; {hint}"
                )
        has_weights |= any(part.loss_weight != 1 for part in parts)
        windows = [part.source for part in parts if isinstance(part.source, TokenWindows) and part.source.is_plain]
        return cls(
            parts=parts,
            windows=windows if len(windows) == len(parts) and not has_weights else (),
            names=names,
            numbers=np.array([names.index(part.name) for part in parts]),
            vocab_size=max(part.source.vocab_size for part in parts),
            tokenizer=tokenizers[0][1] if tokenizers else None,
            has_positions=has_positions,
            entries={**described, "source": Entry(dims=("sample",), wanted_by="engine")},
            loss_weights=np.array([part.loss_weight for part in parts], np.float32) if has_weights else None,
        )

    def fingerprint(self, *more: Any) -> str:
        content = json.dumps(["mixture", [[part.name, part.source.fingerprint] for part in self.parts], *more])
        return hashlib.sha256(content.encode()).hexdigest()

    def read_windows(self, which: np.ndarray, indices: np.ndarray) -> dict[str, Any]:
        """One batch of plain windows: of each part in ``which`` ``(B,)`` the sample at ``indices`` ``(B,)``."""
        shape = (len(which), self.windows[0].seq_len)
        tokens, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        rows_of = [(source, np.flatnonzero(which == number)) for number, source in enumerate(self.windows)]
        for source, rows in rows_of:
            if len(rows):
                source.read_into(indices[rows], tokens, targets, rows.tolist())
        largest = max(ids.view(np.uint64).max(initial=0) for ids in (tokens, targets[:, -1:]))
        if largest >= min(source.vocab_size for source in self.windows):
            for source, rows in rows_of:
                source.refuse_strangers(indices[rows], tokens[rows], targets[rows])
        return {"tokens": tokens, "targets": targets, "source": self.numbers[which]}

    def gathered(self, which: np.ndarray, read: Callable[[int, np.ndarray], dict[str, np.ndarray]]) -> dict[str, Any]:
        """One batch of the rows that ``read(part, rows)`` gives for each part in ``which`` ``(B,)``. Where parts differ
        in another dimension, such as the number of images, the smaller ones are filled up with zeros. All batches have
        every entry with an ``absent``, also those without a sample of a source that has it. Pictures have one size in
        all batches, where that is known."""
        batch: dict[str, np.ndarray] = {}
        parts = [
            (rows, self._with_positions(read(part, rows)))
            for part in np.unique(which).tolist()
            for rows in [np.flatnonzero(which == part)]
        ]
        for name in dict.fromkeys(name for _, found in parts for name in found):
            arrays = [(rows, found[name]) for rows, found in parts if name in found]
            shape = np.max([values.shape[1:] for _, values in arrays], axis=0, initial=0).astype(int)
            if has_several_sizes(self.entries, name):
                sides = sides_of(self.entries[name])
                shape[np.array([*sides]) - 1] = [*sides.values()]
                sizes_B2 = batch[f"{name}_sizes"] = np.zeros((len(which), 2), np.int64)
                for rows, values in arrays:
                    sizes_B2[rows] = [values.shape[side] for side in sides]
            absent = 1 if name == "weights" else getattr(self.entries.get(name), "absent", None) or 0
            batch[name] = np.full((len(which), *shape), absent, arrays[0][1].dtype)
            for rows, values in arrays:
                batch[name][rows] = 0
                place: tuple[np.ndarray | slice, ...] = (rows, *map(slice, values.shape[1:]))
                batch[name][place] = values
        for name, entry in self.entries.items():
            if entry.absent is not None and name not in batch:
                sizes = entry.shape(*batch["tokens"].shape)
                batch[name] = np.full([size or 1 for size in sizes], entry.absent, entry.dtype)
        if self.loss_weights is not None:
            own = batch.get("weights", np.ones(batch["targets"].shape, np.float32))
            batch["weights"] = own * self.loss_weights[which][:, None]
        return {**batch, "source": self.numbers[which]}

    def _with_positions(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Samples of a part without padding and without documents have the positions of a whole sequence."""
        if not self.has_positions or "positions" in batch:
            return batch
        return {**batch, "positions": np.broadcast_to(np.arange(batch["tokens"].shape[1]), batch["tokens"].shape)}


class WatchedParts:
    """``CheckedSource``, for all parts that are."""

    def __init__(self, parts: MixtureParts) -> None:
        self._parts = parts
        self.names, self.vocab_size, self.tokenizer = parts.names, parts.vocab_size, parts.tokenizer
        self.parts = parts.parts

    def entries(self) -> Mapping[str, Entry]:
        """Same as ``DescribedSource.entries``."""
        return self._parts.entries

    def refuse_damaged(self) -> None:
        """Same as ``CheckedSource.refuse_damaged``."""
        for source in self._checked():
            source.refuse_damaged()

    def watch(self, report: Callable[[str], None]) -> None:
        """Same as ``CheckedSource.watch``."""
        for source in self._checked():
            source.watch(report)

    def _checked(self) -> Iterator[CheckedSource]:
        return (part.source for part in self._parts.parts if isinstance(part.source, CheckedSource))
