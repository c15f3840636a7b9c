"""The data source ``mixture``: samples of several sources, in proportion to their weights."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import attrs
import numpy as np

from forge_core.contracts.batch import Entry
from forge_core.contracts.builder import Builder
from forge_core.contracts.data_source import CheckedSource, DataSource, PositionedSource, Source, Split, StreamedSource
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_plugins_data.interleaving import InterleavingInPhases
from forge_plugins_data.mixture_config import MixtureConfig, MixturePhase, MixtureSource
from forge_plugins_data.windows import TokenWindows


def open_mixture(
    config: MixtureConfig,
    /,
    *,
    seq_len: int,
    split: Split,
    build: Builder,
    seed: int,
    samples_per_step: int,
    phases: Sequence[tuple[int, MixturePhase]] = (),
) -> Mixture | MixtureSet:
    """Open all sources; for validation, those that hold something out.

    Raises:
        ConfigError: a source cannot be opened; sources of different tokenizers or entries; nothing is held out.
    """
    chosen = [one for one in config.sources if split != "validation" or one.holds_out]
    if not chosen:
        raise ConfigError("no source holds anything out; set validation in one, or name data under [eval.data]")
    parts = []
    for one in chosen:
        own_seed = _seed_of(seed, one.name)
        given = {"seq_len": seq_len, "split": split, "seed": own_seed, "samples_per_step": samples_per_step}
        try:
            source = build(one.source, **given)
            if isinstance(source, StreamedSource):
                raise ConfigError("it is read as streams, which a mixture cannot take samples of; use other data")
            parts.append(Part(one, source, own_seed))
        except ConfigError as error:
            raise ConfigError(f"source {one.name!r}: {error}") from error
    names = tuple(one.name for one in config.sources)
    common = _Common.of(parts, names)
    if split != "train":
        return MixtureSet(common)
    return Mixture(common, config.shares(), [(start, config.shares(phase)) for start, phase in phases])


_BLOCK = 4096
"""Positions whose samples are found at once, and kept for the microbatches after."""


class Part:
    """One source of a mixture, and its own stream: epoch after epoch, each in an order of its own."""

    def __init__(self, described: MixtureSource, source: Source, seed: int) -> None:
        self.name = described.name
        self.loss_weight = described.loss_weight
        self.source = source
        self.stream = SampleStream(source, seed=seed, shuffle=True)


@attrs.frozen(kw_only=True)
class _Common:
    """What the parts of a mixture have together."""

    parts: Sequence[Part]
    names: tuple[str, ...]
    numbers: np.ndarray
    """``(parts,)`` int64: where each is among ``names``."""
    windows: Sequence[TokenWindows]
    """The sources, if a sample of each is its tokens and targets alone; or nothing."""
    vocab_size: int
    tokenizer: Tokenizer | None
    entries: Mapping[str, Entry]
    loss_weights: np.ndarray | None
    """``(parts,)`` fp32: of the targets of each part. ``None`` if no target has a weight."""

    @classmethod
    def of(cls, parts: Sequence[Part], names: tuple[str, ...]) -> _Common:
        first, *others = parts
        tokenizers = [(part.name, part.source.tokenizer) for part in parts if part.source.tokenizer is not None]
        for name, tokenizer in tokenizers:
            if tokenizer.fingerprint != tokenizers[0][1].fingerprint:
                raise ConfigError(
                    f"source {name!r} has another tokenizer than {tokenizers[0][0]!r}, so that their ids do not mean "
                    "the same; prepare both with one tokenizer"
                )
        found = {part.name: set(part.stream.read(np.zeros(1, np.int64))) for part in parts}
        described = dict(
            pair for part in parts if hasattr(part.source, "entries") for pair in part.source.entries().items()
        )
        has_weights = any("weights" in names_of_part for names_of_part in found.values())
        replaced = {"weights", *(name for name, entry in described.items() if entry.absent is not None)}
        for names_of_part in found.values():
            names_of_part.difference_update(replaced)  # a part that does not have them has them from `gathered`
        for part in others:
            if differing := sorted(found[part.name] ^ found[first.name]):
                is_packed = differing[0] in ("document", "positions")
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
            entries={**described, "source": Entry(dims=("sample",), wanted_by="engine")},
            loss_weights=np.float32([part.loss_weight for part in parts]) if has_weights else None,
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
        every entry with an ``absent``, also those without a sample of a source that has it."""
        batch: dict[str, np.ndarray] = {}
        parts = [
            (rows, read(part, rows)) for part in np.unique(which).tolist() for rows in [np.flatnonzero(which == part)]
        ]
        for name in dict.fromkeys(name for _, found in parts for name in found):
            arrays = [(rows, found[name]) for rows, found in parts if name in found]
            shape = np.max([values.shape[1:] for _, values in arrays], axis=0, initial=0).astype(int)
            absent = 1 if name == "weights" else getattr(self.entries.get(name), "absent", None) or 0
            batch[name] = np.full((len(which), *shape), absent, arrays[0][1].dtype)
            for rows, values in arrays:
                batch[name][rows] = 0
                batch[name][(rows, *map(slice, values.shape[1:]))] = values
        for name, entry in self.entries.items():
            if entry.absent is not None and name not in batch:
                sizes = entry.shape(*batch["tokens"].shape)
                batch[name] = np.full([size or 1 for size in sizes], entry.absent, entry.dtype)
        if self.loss_weights is not None:
            own = batch.get("weights", np.ones(batch["targets"].shape, np.float32))
            batch["weights"] = own * self.loss_weights[which][:, None]
        return {**batch, "source": self.numbers[which]}


class _Watching:
    """``CheckedSource``, for all parts that are."""

    def __init__(self, common: _Common) -> None:
        self._common = common
        self.names, self.vocab_size, self.tokenizer = common.names, common.vocab_size, common.tokenizer

    def entries(self) -> Mapping[str, Entry]:
        """Same as ``DescribedSource.entries``."""
        return self._common.entries

    def refuse_damaged(self) -> None:
        """Same as ``CheckedSource.refuse_damaged``."""
        for source in self._checked():
            source.refuse_damaged()

    def watch(self, report: Callable[[str], None]) -> None:
        """Same as ``CheckedSource.watch``."""
        for source in self._checked():
            source.watch(report)

    def _checked(self) -> Iterator[CheckedSource]:
        return (part.source for part in self._common.parts if isinstance(part.source, CheckedSource))


class Mixture(_Watching):
    """Position ``p`` is sample number ``k`` of one source's own stream, both as ``Interleaving`` has them."""

    def __init__(
        self, common: _Common, shares: Sequence[float], phases: Sequence[tuple[int, Sequence[float]]] = ()
    ) -> None:
        """
        Args:
            shares: of each source, from position 0.
            phases: positions from which on they are others, in order, and the shares. Each source goes on where it was.
        """
        super().__init__(common)
        self.shares = tuple(shares)
        self.fingerprint = common.fingerprint(self.shares)
        self._interleavings = InterleavingInPhases([(0, shares), *phases])
        self._block = functools.lru_cache(maxsize=8)(
            lambda number: self._samples(np.arange(number * _BLOCK, (number + 1) * _BLOCK))
        )

    def read_at(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``PositionedSource.read_at``."""
        if self._common.windows:
            first = int(positions[0]) // _BLOCK if len(positions) else 0
            offsets = positions - first * _BLOCK
            is_within = offsets.min(initial=0) >= 0 and offsets.max(initial=0) < _BLOCK
            which, indices = self._block(first) if is_within else self._samples(positions)
            chosen = offsets if is_within else slice(None)
            return self._common.read_windows(which[chosen], indices[chosen])
        which, numbers = self._interleavings.at(positions)
        return self._common.gathered(which, lambda part, rows: self._common.parts[part].stream.read(numbers[rows]))

    def _samples(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part at each of ``positions`` ``(N,)``, and which of its samples: both int64 ``(N,)``."""
        which, numbers = self._interleavings.at(positions)
        indices = np.empty_like(numbers)
        for part in np.unique(which).tolist():
            rows = which == part
            indices[rows] = self._common.parts[part].stream.indices(numbers[rows])
        return which, indices

    def counts(self, position: int) -> list[int]:
        """Same as ``MixedSource.counts``."""
        return self._interleavings.counts(position)

    def lengths(self) -> list[int | None]:
        """Samples in an epoch of each source; ``None`` where it has none."""
        return [None if isinstance(part.source, PositionedSource) else len(part.source) for part in self._common.parts]


class MixtureSet(_Watching):
    """All samples of all parts, in an order that is pseudo-random and always the same: the first of them are of each
    part in proportion to its length."""

    def __init__(self, common: _Common) -> None:
        super().__init__(common)
        self.fingerprint = common.fingerprint()
        self._sources = [_with_an_end(part) for part in common.parts]
        self._starts = np.array([0, *accumulate(map(len, self._sources))])
        self._order = SampleStream(_Numbers(len(self)), seed=0, shuffle=True)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``."""
        numbers = self._order.indices(indices)
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        offsets = numbers - self._starts[which]
        return self._common.gathered(which, lambda part, rows: self._sources[part].read(offsets[rows]))


class _Numbers:
    """A source of nothing but its length, whose order is asked for."""

    vocab_size, tokenizer, fingerprint = 1, None, ""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": indices[:, None], "targets": indices[:, None]}


def _with_an_end(part: Part) -> DataSource:
    if isinstance(part.source, PositionedSource):
        raise ConfigError(f"source {part.name!r} has no end, so that it cannot be evaluated")
    return part.source


def _seed_of(seed: int, name: str) -> int:
    """Sources of one run are shuffled apart from each other, and the same whatever others there are."""
    return int.from_bytes(hashlib.sha256(f"forge.mixture/{seed}/{name}".encode()).digest()[:8], "big")
