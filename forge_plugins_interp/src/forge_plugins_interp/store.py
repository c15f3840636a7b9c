"""A store of activations: a folder of safetensors shards, an index of samples and a manifest.

``<site>/shard-00000.safetensors`` has the tensor ``values`` of the samples of that shard, in their order. A site that
keeps its positions has a row for each token of a sample, without padding; any other has a row for each sample.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from forge_core.checkpoint.fsync import flush, make_folder, write_durably
from forge_core.errors import ConfigError, nearest_hint
from forge_plugins_interp.aliases import canonical_site
from forge_plugins_interp.site_pattern import listed, matches

VERSION = 1
TOKENS = "tokens"
"""Beside the sites, the token ids of each sample, a row for each token."""


@attrs.frozen(kw_only=True)
class StoredSite:
    """How a site is stored."""

    dims: tuple[str, ...]
    """The names of the dimensions of ``values``; the first one is ``"token"`` or ``"sample"``."""
    sizes: tuple[int, ...]
    """How large they are, but the first."""
    dtype: str
    """Its name in torch."""
    reduced: str = ""
    """What was done to values before they were written, in words."""

    def words(self) -> str:
        """Such as ``token × 32 width of float32, 8 random features``."""
        rows = " × ".join([self.dims[0], *map("{} {}".format, self.sizes, self.dims[1:])])
        return f"{rows} of {self.dtype}" + (f", {self.reduced}" if self.reduced else "")

    def row_bytes(self) -> int:
        """Bytes of a row."""
        itemsize = torch.empty(0, dtype=getattr(torch, self.dtype)).itemsize
        return int(np.prod(self.sizes, dtype=np.int64)) * itemsize


@attrs.frozen(kw_only=True)
class Manifest:
    """All that a store is made of, so that another one does not go on with it."""

    sites: Mapping[str, StoredSite]
    n_samples: int
    shard_samples: int
    """Samples of a shard; the last one may have fewer."""
    origin: Mapping[str, Any]
    """Run, step and manifest of the checkpoint, its job, data, tokenizer and the versions of packages."""
    complete: bool = False

    def n_shards(self) -> int:
        """Shards of each site."""
        return -(-self.n_samples // self.shard_samples)

    def samples_of(self, shard: int) -> range:
        """The numbers of the samples of a shard."""
        return range(shard * self.shard_samples, min((shard + 1) * self.shard_samples, self.n_samples))

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` in one go."""
        write_durably(folder / "manifest.json", json.dumps({"version": VERSION, **attrs.asdict(self)}, indent=1))
        flush(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """
        Raises:
            ConfigError: there is no store, or one that is damaged or of another version.
        """
        path = folder / "manifest.json"
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{folder} is no store of activations: it has no manifest.json") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        version = table.pop("version", None) if isinstance(table, dict) else None
        if version != VERSION:
            raise ConfigError(f"{path}: a store of version {version!r}, and this package reads version {VERSION}")
        try:
            sites = {name: StoredSite(**_tuples(site)) for name, site in table.pop("sites").items()}
            return cls(sites=sites, **table)
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is no manifest of a store: {error}") from error

    def refuse_other(self, other: Manifest, folder: Path) -> None:
        """
        Raises:
            ConfigError: ``other``, which is in ``folder``, is a store of something else.
        """
        for what, ours, theirs in (
            *((key, self.origin[key], other.origin.get(key)) for key in self.origin),
            ("sites", sorted(self.sites), sorted(other.sites)),
            *(
                (f"form of {site}", ours.words(), other.sites[site].words())
                for site, ours in self.sites.items()
                if site in other.sites
            ),
            ("number of samples", self.n_samples, other.n_samples),
            ("samples of a shard", self.shard_samples, other.shard_samples),
        ):
            if ours != theirs:
                raise ConfigError(
                    f"--out {folder}: a store is there already, of another {what}: {_short(theirs)} in place of "
                    f"{_short(ours)}; give another folder"
                )


def _tuples(site: Mapping[str, Any]) -> dict[str, Any]:
    return {**site, "dims": tuple(site["dims"]), "sizes": tuple(site["sizes"])}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def shard_file(folder: Path, site: str, shard: int) -> Path:
    """Where a shard of a site is."""
    return folder / site / f"shard-{shard:05}.safetensors"


def components_file(folder: Path, site: str) -> Path:
    """Where the principal components of a site are, if its rows are projected on them."""
    return folder / site / "components.safetensors"


def write_shard(folder: Path, site: str, shard: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a shard in one go: it has its name once all of it is on the disk."""
    write_tensors(shard_file(folder, site, shard), tensors)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file, with its folder, in one go."""
    make_folder(path.parent)
    temporary = path.with_suffix(".new")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def write_index(folder: Path, columns: Mapping[str, np.ndarray]) -> None:
    """Write ``index.npz`` in one go, a column an array."""
    temporary = folder / "index.new.npz"
    with zipfile.ZipFile(temporary, "w") as archive:  # a column may have the name of an argument of np.savez
        for name, values in columns.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, values, allow_pickle=False)
    flush(temporary)
    temporary.replace(folder / "index.npz")


def _read_index(path: Path) -> dict[str, np.ndarray]:
    """
    Raises:
        ConfigError: it is not there, or damaged.
    """
    try:
        # opened here: NumPy leaves a damaged file open
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as index:
            return {name: index[name] for name in index.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def stored_lengths(folder: Path, manifest: Manifest) -> np.ndarray:
    """The number of tokens of each sample."""
    found = []
    for shard in range(manifest.n_shards()):
        with safe_open(shard_file(folder, TOKENS, shard), framework="np") as file:
            found.append(file.get_tensor("length"))
    return np.concatenate(found)


def missing_shards(folder: Path, manifest: Manifest, sites: Sequence[str]) -> list[int]:
    """The shards that some of the sites lack."""
    names = [*sites, TOKENS]
    return [
        shard
        for shard in range(manifest.n_shards())
        if not all(shard_file(folder, name, shard).exists() for name in names)
    ]


class Store:
    """A store that is complete, to be read.

    Raises:
        ConfigError: there is none, or it is not complete.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.read(self.folder)
        if not self.manifest.complete:
            raise ConfigError(f"{folder} is not complete; the same forge extract goes on with it")
        self.columns: dict[str, np.ndarray] = _read_index(self.folder / "index.npz")
        """The index: ``stimulus_id`` and ``length`` of each sample, in tokens, and other facts about them."""
        self._offsets = np.concatenate([[0], np.cumsum(self.columns["length"])])

    @property
    def ids(self) -> np.ndarray:
        """The id of each sample, ``(n,)``."""
        return self.columns["stimulus_id"]

    @property
    def sites(self) -> list[str]:
        """Names of the sites."""
        return list(self.manifest.sites)

    @property
    def match(self) -> str | None:
        """The regular expression of the tokens that are kept; ``None`` where all are."""
        return self.manifest.origin.get("match")

    def __len__(self) -> int:
        """Samples."""
        return self.manifest.n_samples

    def read(self, site: str, sample: int) -> torch.Tensor:
        """The values of a sample: ``(length, …)``, or without positions ``(…)``."""
        manifest = self.manifest
        if not 0 <= sample < manifest.n_samples:
            raise IndexError(f"sample {sample} of {manifest.n_samples}")
        shard = sample // manifest.shard_samples
        values, first = self._values(site, shard), manifest.samples_of(shard)[0]
        if self._stored(site).dims[0] == "sample":
            return values[sample - first]
        start = self._offsets[sample] - self._offsets[first]
        return values[start : start + self.columns["length"][sample]]

    def shards(self, site: str) -> Iterator[torch.Tensor]:
        """The values of one shard after the other, ``(rows, …)``, mapped from the disk."""
        for shard in range(self.manifest.n_shards()):
            yield self.shard(site, shard)

    def shard(self, site: str, number: int) -> torch.Tensor:
        """The values of one shard ``(rows, …)``, mapped from the disk."""
        return self._values(site, number)

    def array(self, site: str) -> torch.Tensor:
        """All values ``(rows, …)`` in memory; of a store with one shard, mapped from the disk."""
        parts = list(self.shards(site))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def batches(self, site: str, rows: int) -> Iterator[torch.Tensor]:
        """All values, ``rows`` at a time; the last batch may have fewer."""
        left: torch.Tensor | None = None
        for values in self.shards(site):
            whole = values if left is None else torch.cat((left, values))
            n_full = len(whole) // rows * rows
            yield from whole[:n_full].view(n_full // rows, rows, *whole.shape[1:])
            left = whole[n_full:] if n_full < len(whole) else None
        if left is not None:
            yield left

    def tokens(self, sample: int) -> torch.Tensor:
        """The token ids of a sample ``(length,)``."""
        return self._of_sample(sample, lambda shard: self._values(TOKENS, shard))

    def positions(self, sample: int) -> torch.Tensor:
        """Where the tokens of a sample, ``(length,)``, stand in it: 0, 1, …, unless only some tokens are kept."""
        return self._of_sample(sample, self.shard_positions)

    def shard_positions(self, number: int) -> torch.Tensor:
        """Where the tokens of one shard stand in their samples, one sample after the other."""
        with safe_open(shard_file(self.folder, TOKENS, number), framework="pt") as file:
            if "position" in file.keys():  # noqa: SIM118  # it is no mapping
                found: torch.Tensor = file.get_tensor("position")
                return found
            return torch.cat([torch.arange(int(length)) for length in file.get_tensor("length")])

    def _of_sample(self, sample: int, of_shard: Callable[[int], torch.Tensor]) -> torch.Tensor:
        shard = sample // self.manifest.shard_samples
        start = self._offsets[sample] - self._offsets[self.manifest.samples_of(shard)[0]]
        return of_shard(shard)[start : start + self.columns["length"][sample]]

    def chosen(self, patterns: str) -> list[str]:
        """The sites that names or patterns with commas between them mean; ``*`` is all.

        Raises:
            ConfigError: one means no site of the store, or there is none.
        """
        if patterns == "*":
            return self.sites
        if not listed(patterns):
            raise ConfigError(f"--sites {patterns!r}: names no site; {self.folder} has {', '.join(self.sites)}")
        wanted: set[str] = set()
        for pattern in listed(patterns):
            found = [site for site in self.sites if matches(site, canonical_site(pattern))]
            if not found:
                self._stored(pattern)
            wanted |= {*found}
        return [site for site in self.sites if site in wanted]

    def _stored(self, site: str) -> StoredSite:
        if site not in self.manifest.sites:
            hint = nearest_hint(site, self.manifest.sites) or ";"
            raise ConfigError(f"{self.folder} has no site {site!r}{hint} It has {', '.join(self.sites)}")
        return self.manifest.sites[site]

    def _values(self, site: str, shard: int) -> torch.Tensor:
        if site != TOKENS:
            self._stored(site)
        path = shard_file(self.folder, site, shard)
        try:
            with safe_open(path, framework="pt") as file:
                values: torch.Tensor = file.get_tensor("values")
        except Exception as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        return values
