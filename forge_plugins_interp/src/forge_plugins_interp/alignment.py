"""Samples that two stores have in common, in one order."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from forge_core.errors import ConfigError, and_more
from forge_plugins_interp.store import Store


@attrs.frozen(eq=False)
class Alignment:
    """Two stores, and the numbers of their common samples, in the order of the first one."""

    stores: tuple[Store, Store]
    samples: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, first: Store, second: Store) -> Alignment:
        """
        Raises:
            ConfigError: they have no common ``stimulus_id``, or one of them twice.
        """
        mine, theirs = (refuse_repeated(store.folder, store.ids.astype(str)) for store in (first, second))
        _, of_first, of_second = np.intersect1d(mine, theirs, return_indices=True)
        if not len(of_first):
            raise ConfigError(
                f"{first.folder} and {second.folder} have no stimulus_id in common; the first one has "
                f"{str(mine[0])!r}, and the second {str(theirs[0])!r}"
            )
        order = np.argsort(of_first)
        return cls((first, second), (of_first[order], of_second[order]))

    def values(self, which: int, site: str) -> torch.Tensor:
        """The rows ``(n, …)`` of the common samples, of the first store (0) or the second (1)."""
        return rows_of(self.stores[which], site, self.samples[which])

    def refuse_other_rows(self, sites: Sequence[Sequence[str]]) -> None:
        """
        Args:
            sites: of both stores, the ones to compare.

        Raises:
            ConfigError: their rows are not the same things: tokens of one and samples of another, or samples that have
                other numbers of tokens in the two.
        """
        kinds = {
            store.manifest.sites[site].dims[0]
            for store, names in zip(self.stores, sites, strict=True)
            for site in names
        }
        if len(kinds) > 1:
            raise ConfigError(
                "some sites have a row a token, and some a row a sample; choose by --sites, or reduce all"
            )
        first, second = self.stores
        if kinds == {"token"} and first.match != second.match:
            raise ConfigError(
                f"{first.folder} keeps {_kept(first)}, and {second.folder} {_kept(second)}; extract both with the same "
                "--match, or with --reduce mean or last"
            )
        lengths = [store.columns["length"][numbers] for store, numbers in zip(self.stores, self.samples, strict=True)]
        if kinds == {"token"} and not np.array_equal(*lengths):
            number = int((lengths[0] != lengths[1]).argmax())
            name = self.stores[0].ids[self.samples[0][number]]
            raise ConfigError(
                f"stimulus {name} has {lengths[0][number]} tokens in {self.stores[0].folder}, and {lengths[1][number]} "
                f"in {self.stores[1].folder}; extract both with --reduce mean or last"
            )


def _kept(store: Store) -> str:
    return "all tokens" if store.match is None else f"tokens that match {store.match!r}"


def refuse_repeated(where: object, ids: np.ndarray) -> np.ndarray:
    """
    Returns:
        The ids.

    Raises:
        ConfigError: one is there twice.
    """
    names, counts = np.unique(ids, return_counts=True)
    if len(twice := names[counts > 1]):
        raise ConfigError(f"{where}: stimulus_id {str(twice[0])!r}{and_more(len(twice), 1)} is there more than once")
    return ids


def rows_of(store: Store, site: str, samples: np.ndarray) -> torch.Tensor:
    """The rows ``(n, …)`` of some samples, one after the other."""
    values = store.array(site)
    if np.array_equal(samples, np.arange(len(store))):
        return values
    if store.manifest.sites[site].dims[0] == "sample":
        return values[torch.from_numpy(samples)]
    ends = np.cumsum(store.columns["length"])
    starts = ends - store.columns["length"]
    rows = np.concatenate([np.arange(starts[number], ends[number]) for number in samples])
    return values[torch.from_numpy(rows)]
