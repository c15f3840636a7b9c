"""The latents of a dictionary: how often each fires, how strongly, and on which tokens.

Shapes: F = latents, N = those with a card, D = width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.autoencoders.config import ActivationStoreConfig
from forge_plugins_interp.autoencoders.dictionary import Dictionary
from forge_plugins_interp.autoencoders.features_config import FeaturesConfig
from forge_plugins_interp.autoencoders.store_source import held_out_samples, width_of
from forge_plugins_interp.store import Store
from forge_plugins_interp.tidy_table import Row

_CODES = 2**24
"""Elements of a code in memory at a time."""


@attrs.frozen(kw_only=True)
class Context:
    """The tokens around the row at which a latent is strongest in a sample."""

    sample: int
    """Its number in the store."""
    stimulus_id: str
    activation: float
    position: int | None
    """Of that row in the sample; ``None`` where the store has one row a sample."""
    first: int
    """The position of the first of ``tokens``."""
    tokens: Sequence[int]
    activations: Sequence[float]
    """Of the latent at each of ``tokens``; empty where the store has one row a sample."""


@attrs.frozen(kw_only=True)
class Latent:
    """What is on the card of a latent. Activations are of scaled rows, whose mean norm is √D."""

    number: int
    density: float
    """The share of rows in which it fires."""
    mean: float
    """Over the rows in which it fires; 0 if there are none."""
    strongest: float
    counts: Sequence[int]
    """Rows in which it fires, by activation: ranges of equal length from 0 to ``strongest``."""
    contexts: Sequence[Context]
    """One a sample, the strongest first; of equal ones, the one that was read first."""


@attrs.frozen(kw_only=True, eq=False)
class Features:
    """The latents of a dictionary, over some rows of the store that it has learned from."""

    rows: int
    held_out: int
    """How many of them it has not learned from."""
    density: torch.Tensor
    """``(F,)`` float64, as of ``Latent``."""
    mean: torch.Tensor
    """``(F,)`` float64."""
    strongest: torch.Tensor
    """``(F,)`` float64."""
    latents: Sequence[Latent]

    @property
    def silent(self) -> float:
        """The share of latents that fire in none of the rows."""
        return float((self.density == 0).double().mean())

    def latent_rows(self) -> list[Row]:
        """A row for each latent of the dictionary."""
        columns = (self.density.tolist(), self.mean.tolist(), self.strongest.tolist())
        return [
            {"latent": number, "density": density, "mean": mean, "strongest": strongest}
            for number, (density, mean, strongest) in enumerate(zip(*columns, strict=True))
        ]

    def context_rows(self) -> list[Row]:
        """A row for each token of each context of the latents with a card."""
        return [
            {
                "latent": latent.number,
                "place": place,
                "stimulus_id": context.stimulus_id,
                "position": context.first + offset,
                "token": token,
                "activation": context.activations[offset] if context.activations else None,
            }
            for latent in self.latents
            for place, context in enumerate(latent.contexts, 1)
            for offset, token in enumerate(context.tokens)
        ]


@torch.no_grad()
def features(
    dictionary: Dictionary,
    data: ActivationStoreConfig,
    config: FeaturesConfig,
    chosen: Sequence[int] = (),
) -> Features:
    """Look at the latents. The store is read a shard at a time, twice.

    Args:
        data: of the run that has trained it.
        chosen: numbers of the latents that get a card; by default the rule of ``FeaturesConfig.latents`` decides.

    Raises:
        ConfigError: there is no store, it has no such site or another width; or there is no such latent.
    """
    width, n_latents = width_of(data, "site"), dictionary.config.latents
    store = Store(data.path)
    if width != dictionary.config.width:
        raise ConfigError(
            f"data.site: {data.site} of {data.path} has {width} features, and the dictionary reads "
            f"{dictionary.config.width}; the store is not the one that it has learned from"
        )
    if store.match is not None:
        raise ConfigError(
            f"data.path: {data.path} keeps only tokens that match {store.match!r}, and contexts are of all tokens; "
            "name a store that was extracted without --match"
        )
    for number in chosen:
        if not 0 <= number < n_latents:
            raise ConfigError(f"latent {number}: the dictionary has the latents 0 to {n_latents - 1}")
    rows = _Rows(store, data, config.rows)
    counts = _Counts(n_latents)
    for piece in rows:
        for code in _codes(dictionary, piece.values):
            counts.add(code)
    density = counts.fired / counts.rows
    numbers = list(chosen) or _chosen(density, counts.strongest, config)
    return Features(
        rows=counts.rows,
        held_out=rows.held_out,
        density=density,
        mean=counts.total / counts.fired.clamp(min=1),
        strongest=counts.strongest,
        latents=_cards(dictionary, rows, numbers, counts, config) if numbers else [],
    )


def _chosen(density: torch.Tensor, strongest: torch.Tensor, config: FeaturesConfig) -> list[int]:
    """The latents that reach the strongest activations, of those with a density between the bounds; of equal ones, the
    lower numbers."""
    between = (density >= config.least_density) & (density <= config.most_density) & (density > 0)
    order = strongest.where(between, -1.0).sort(descending=True, stable=True).indices
    return [int(number) for number in order[: min(config.latents, int(between.sum()))]]


@attrs.frozen(eq=False)
class _Piece:
    """Rows of whole samples, in their order."""

    values: torch.Tensor
    """``(rows, D)``, mapped from the disk."""
    samples: np.ndarray
    """The number of each sample, ``(n,)``; none of them is empty."""
    lengths: Sequence[int]
    """Rows of each."""


@attrs.define(eq=False)
class _Rows:
    """Held-out samples first, then the others, as many whole samples as have at most ``limit`` rows, but one."""

    store: Store
    data: ActivationStoreConfig
    limit: int
    held_out: int = 0
    """Rows of held-out samples among the last rows that were read."""

    @property
    def is_token(self) -> bool:
        """Whether each token of a sample has a row."""
        return self.store.manifest.sites[self.data.site].dims[0] == "token"

    def of_sample(self, sample: int, part: slice) -> torch.Tensor:
        """Some rows of a sample ``(rows, D)``."""
        return self.store.read(self.data.site, sample)[part].flatten(1)

    def __iter__(self) -> Iterator[_Piece]:
        n_samples = len(self.store)
        border = n_samples - held_out_samples(self.data, n_samples)
        left, self.held_out = self.limit, 0
        for part in (range(border, n_samples), range(border)):
            for shard in range(self.store.manifest.n_shards()):
                whole = self.store.manifest.samples_of(shard)
                samples = np.arange(max(whole.start, part.start), min(whole.stop, part.stop))
                lengths = self._lengths(np.asarray(whole))
                fits = np.cumsum(lengths[samples - whole.start]) <= left
                fits[:1] |= left == self.limit
                if len(samples) == 0:
                    continue
                if not fits.any():
                    return
                samples = samples[fits]
                start, stop = (int(lengths[: one - whole.start].sum()) for one in (samples[0], samples[-1] + 1))
                left -= stop - start
                self.held_out += (stop - start) * (part.start == border)
                of_samples = lengths[samples - whole.start]
                values = self.store.shard(self.data.site, shard)[start:stop].flatten(1)
                yield _Piece(values, samples[of_samples > 0], of_samples[of_samples > 0].tolist())
                if not fits.all():
                    return

    def _lengths(self, samples: np.ndarray) -> np.ndarray:
        return self.store.columns["length"][samples] if self.is_token else np.ones(len(samples), np.int64)


class _Counts:
    """Sums over rows, by latent."""

    def __init__(self, n_latents: int) -> None:
        self.rows = 0
        self.fired, self.total, self.strongest = torch.zeros(3, n_latents, dtype=torch.float64).unbind()

    def add(self, code: torch.Tensor) -> None:
        self.rows += len(code)
        self.fired += (code > 0).sum(0)
        self.total += code.sum(0, dtype=torch.float64)
        torch.maximum(self.strongest, code.amax(0).double(), out=self.strongest)


def _codes(dictionary: Dictionary, values: torch.Tensor) -> Iterator[torch.Tensor]:
    """The code ``(rows, F)`` of some rows after the other."""
    for rows in torch.split(values, max(1, _CODES // dictionary.config.latents)):
        yield dictionary.encode(rows.float())


def _cards(
    dictionary: Dictionary, rows: _Rows, numbers: list[int], counts: _Counts, config: FeaturesConfig
) -> list[Latent]:
    strongest = counts.strongest[numbers].tolist()
    histograms = torch.zeros(len(numbers), config.bins)
    best = _Best(len(numbers), config.contexts)
    for piece in rows:
        codes = torch.cat([code[:, numbers] for code in _codes(dictionary, piece.values)])
        for place, (column, most) in enumerate(zip(codes.T, strongest, strict=True)):
            if most > 0:
                histograms[place] += torch.histc(column[column > 0], config.bins, 0, most)
        best.add(codes, piece)
    return [
        Latent(
            number=number,
            density=float(counts.fired[number]) / counts.rows,
            mean=float(counts.total[number] / counts.fired[number].clamp(min=1)),
            strongest=strongest[place],
            counts=[int(count) for count in histograms[place]],
            contexts=[_context(dictionary, rows, number, where, config) for where in zip(*best.of(place), strict=True)],
        )
        for place, number in enumerate(numbers)
    ]


class _Best:
    """The samples in which each of N latents is strongest, with the row of the sample; C of them."""

    def __init__(self, n_latents: int, n_contexts: int) -> None:
        self._n = n_contexts
        self._values = torch.zeros(0, n_latents)
        self._samples = torch.zeros(0, n_latents, dtype=torch.int64)
        self._positions = torch.zeros(0, n_latents, dtype=torch.int64)

    def add(self, codes: torch.Tensor, piece: _Piece) -> None:
        """Look at the codes ``(rows, N)`` of a piece."""
        found = [of_sample.max(0) for of_sample in torch.split(codes, list(piece.lengths))]
        values = torch.cat((self._values, torch.stack([one.values for one in found])))
        numbers = torch.from_numpy(piece.samples)[:, None].expand(-1, values.shape[1])
        samples = torch.cat((self._samples, numbers))
        positions = torch.cat((self._positions, torch.stack([one.indices for one in found])))
        order = values.sort(dim=0, descending=True, stable=True).indices[: self._n]
        self._values, self._samples, self._positions = (one.gather(0, order) for one in (values, samples, positions))

    def of(self, place: int) -> tuple[list[float], list[int], list[int]]:
        """Activations, samples and positions of one latent, the strongest first."""
        fires = self._values[:, place] > 0
        values, samples, positions = (one[fires, place] for one in (self._values, self._samples, self._positions))
        return values.tolist(), samples.tolist(), positions.tolist()


def _context(
    dictionary: Dictionary, rows: _Rows, number: int, where: tuple[float, int, int], config: FeaturesConfig
) -> Context:
    activation, sample, position = where
    tokens = rows.store.tokens(sample).tolist()
    start = (
        max(0, position - config.before) if rows.is_token else max(0, len(tokens) - config.before - config.after - 1)
    )
    stop = position + config.after + 1 if rows.is_token else len(tokens)
    activations: list[float] = []
    if rows.is_token:
        activations = dictionary.encode(rows.of_sample(sample, slice(start, stop)).float())[:, number].tolist()
    return Context(
        sample=sample,
        stimulus_id=str(rows.store.ids[sample]),
        activation=activation,
        position=position if rows.is_token else None,
        first=start,
        tokens=tokens[start:stop],
        activations=activations,
    )


def logit_rows(weights: Mapping[int, torch.Tensor], top: int) -> list[Row]:
    """A row for each of the tokens that a latent raises most, and of the tokens that it lowers most.

    Args:
        weights: ``(V,)`` by latent.
        top: how many of each.
    """
    rows: list[Row] = []
    for number, values in weights.items():
        for effect, sign in (("raises", 1), ("lowers", -1)):
            order = (sign * values).sort(descending=True, stable=True).indices[:top].tolist()
            rows += [
                {"latent": number, "effect": effect, "place": place, "token": token, "weight": float(values[token])}
                for place, token in enumerate(order, 1)
            ]
    return rows
