"""Extraction: the values of sites for all samples of a source, written to a store, in any layout.

Whole shards are dealt to the data-parallel ranks, so that a store is the same for any number of them. Of the ranks that
share a model, the first one along ``tp`` and ``cp`` writes, on each pipeline stage what its layers have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from forge_core.checkpoint.fsync import make_folder
from forge_core.checkpoint.manifest import as_size, lack_of_room
from forge_core.contracts.data_source import DataSource
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError
from forge_plugins_interp.host_copy import begin_copy, wait_for_copies
from forge_plugins_interp.observation import observe
from forge_plugins_interp.placement import whole
from forge_plugins_interp.principal_components import Moments, PrincipalComponents
from forge_plugins_interp.reduction import Reduction, token_mask
from forge_plugins_interp.sample_check import refuse_several_tiles, refuse_short_samples
from forge_plugins_interp.session import ObservedModel, read_batch, refuse_unseen
from forge_plugins_interp.shard_writer import ShardPart, ShardWriter
from forge_plugins_interp.sites import PlacedSite
from forge_plugins_interp.store import (
    TOKENS,
    Manifest,
    StoredSite,
    components_file,
    missing_shards,
    stored_lengths,
    write_index,
)

_SHARD_BYTES = 128 * 2**20
"""Of all sites together. After a kill, so much is computed again."""


@attrs.frozen(kw_only=True)
class Request:
    """What is to be extracted, and where to."""

    out: Path
    sites: Sequence[str]
    reduction: Reduction
    samples: int = 0
    """The first so many; 0 is all."""
    columns: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    """Facts about samples, with ``stimulus_id``; by default their numbers."""
    origin: Mapping[str, Any] = attrs.field(factory=dict)
    shard_samples: int = 0
    """0 chooses by size."""


def extract(session: ObservedModel, source: DataSource, request: Request, log: Callable[[str], None]) -> Path:
    """Fill the store. All ranks call it together. One that is there already is gone on with.

    Raises:
        ConfigError: a site is not there; the store is one of something else; or the disk has not enough room.
    """
    extraction = _Extraction(session, source, request, log)
    extraction.run()
    return request.out


class _Extraction:
    def __init__(
        self, session: ObservedModel, source: DataSource, request: Request, log: Callable[[str], None]
    ) -> None:
        self.session, self.source, self.request, self.log = session, source, request, log
        self.is_kept, self.n_kept = torch.zeros(0, 0, dtype=torch.bool), 0
        self.mesh: Mesh = session.mesh
        self.n_samples = min(request.samples or len(source), len(source))
        self.batch_size = session.batch_size
        self.chosen: list[PlacedSite] = session.sites.chosen(request.sites)
        self.values: dict[str, torch.Tensor] = {}
        """Rows of the batch that runs, on ranks that write."""
        self.sizes: dict[str, torch.Size] = {}
        """Of rows of the first batch."""
        self.components: dict[str, PrincipalComponents] = {}
        """Of the sites of this rank, if rows are projected on them."""
        self.moments: dict[str, Moments] | None = None
        """In place of rows, while components are fitted."""

    def run(self) -> None:
        """Check the samples, find shapes, claim the folder, write all shards that are missing, and then the index."""
        request = self.request
        ids = request.columns.get("stimulus_id", np.arange(self.n_samples))[: self.n_samples]
        how: Any = {"batch_size": self.batch_size, "mesh": self.mesh, "log": self.log}
        if "position" in self.session.batch_dims:
            refuse_short_samples(self.source, request.reduction, ids, **how)
        of_tiles = [placed.name for placed in self.chosen if placed.site.dims[0] == "tile"]
        refuse_several_tiles(self.source, of_tiles, ids, **how)
        with torch.no_grad(), observe(self.chosen, self._take):
            if request.reduction.directions == "principal":
                self._fit_components()
            began = time.monotonic()
            stored = self._first_shapes()
            manifest = self._claim(stored, time.monotonic() - began)
            self._share_components()
            shards = self._agreed(lambda: missing_shards(request.out, manifest, list(manifest.sites)))
            self._write_shards(manifest, shards)
        dist.barrier()
        if self.mesh.rank == 0:
            lengths = stored_lengths(request.out, manifest)
            if (tokens := request.reduction.tokens) is not None:
                self.log(f"{lengths.sum():,} tokens match {tokens.text!r}")
            ids = np.arange(self.n_samples)
            write_index(request.out, {"stimulus_id": ids, **request.columns, "length": lengths})
            attrs.evolve(manifest, complete=True).write(request.out)
        dist.barrier()

    def _take(self, placed: PlacedSite, value: torch.Tensor) -> None:
        made_whole = whole(value, placed.cuts)
        if placed.site.dims[0] == "tile" and len(made_whole) != self.batch_size:
            raise ConfigError(
                f"site {placed.name}: a store has a row for each sample, and samples of this data have several images "
                "or tiles; leave the site out, or read it with run.observe"
            )
        if not self._writes():
            return
        kept, is_kept, reduction = made_whole[: self.n_kept], self.is_kept[: self.n_kept], self.request.reduction
        if self.moments is not None:
            self.moments.setdefault(placed.name, Moments(placed.name)).add(reduction.kept(placed.site, kept, is_kept))
            return
        components = self.components.get(placed.name)
        rows, lack = reduction.cast(reduction.rows(placed.site, kept, is_kept, self.session.seed, components))
        if lack:
            raise ConfigError(f"--dtype float16: site {placed.name} has {lack}; take bfloat16 or float32")
        own, first = rows.shape[1:], self.sizes.setdefault(placed.name, rows.shape[1:])
        if own != first:
            _, *dims = reduction.dims(placed.site)
            raise ConfigError(
                f"site {placed.name}: a store has rows of one size, and those of {', '.join(dims)} are {_by(first)} in "
                f"the first batch and {_by(own)} in another, as its samples have more or fewer images; leave the site "
                "out, or read it with run.observe"
            )
        self.values[placed.name] = begin_copy(rows)

    def _forward(self, numbers: np.ndarray, n_kept: int) -> torch.Tensor:
        """Run the model on a batch of samples, and keep rows of the first ``n_kept``. Returns their token ids, of which
        there are none where the model reads something else."""
        batch = read_batch(self.source, numbers)
        first = batch.get("tokens", next(iter(batch.values())))
        n_positions = first.shape[1] if "position" in self.session.batch_dims else 1
        is_token = token_mask(batch, len(first), n_positions)
        self.is_kept, self.n_kept = self.request.reduction.kept_tokens(batch, is_token), n_kept
        self.session.run_batch(self.source, batch)
        wait_for_copies()
        if "tokens" not in batch:
            return torch.zeros(0, dtype=torch.int64)
        return first[:n_kept][self.is_kept[:n_kept]]

    def _fit_components(self) -> None:
        """Fit them on the first samples, the same on all ranks that have a site. A store that is gone on with has
        them."""
        names = [placed.name for placed in self.chosen] if self._writes() else []
        files = {name: components_file(self.request.out, name) for name in names}
        if self._everywhere(all(file.exists() for file in files.values())):
            self.components = {name: PrincipalComponents.read(file) for name, file in files.items()}
            return
        self.moments = {}
        n_samples = min(self.request.reduction.fit_samples, self.n_samples)
        for start in range(0, n_samples, self.batch_size):
            numbers = np.minimum(start + np.arange(self.batch_size), self.n_samples - 1)
            self._forward(numbers, min(self.batch_size, n_samples - start))
        moments, self.moments = self.moments, None
        n = self.request.reduction.features
        self.components = {name: one.components(n) for name, one in moments.items()}

    def _share_components(self) -> None:
        """Replicas of the model take those of one of them, to the last bit."""
        files = {name: components_file(self.request.out, name) for name in self.components}
        if self.mesh.dp_rank == 0:
            for name, file in files.items():
                self.components[name].write(file)
        dist.barrier()
        self.components = {name: PrincipalComponents.read(file) for name, file in files.items()}
        shares: list[list[float]] = [[] for _ in range(self.mesh.world_size)]
        dist.all_gather_object(shares, [float(one.explained.sum()) for one in self.components.values()])
        if known := sorted(share for of_rank in shares for share in of_rank):
            n = self.request.reduction.features
            self.log(f"{n} principal components have {known[0]:.0%} to {known[-1]:.0%} of the variance of a site")

    def _everywhere(self, holds: bool) -> bool:
        box = torch.tensor(int(holds))
        dist.all_reduce(box, dist.ReduceOp.MIN)
        return bool(box)

    def _first_shapes(self) -> dict[str, tuple[StoredSite, float]]:
        """How each site of this rank is stored, and how many rows a sample has."""
        n = min(self.batch_size, self.n_samples)
        self._forward(np.minimum(np.arange(self.batch_size), self.n_samples - 1), n)
        if self._writes():
            refuse_unseen(self.chosen, self.values)
        reduction, found = self.request.reduction, {}
        for placed in self.chosen if self._writes() else ():
            rows = self.values[placed.name]
            dims = reduction.dims(placed.site)
            dtype = str(rows.dtype).removeprefix("torch.")
            stored = StoredSite(dims=dims, sizes=tuple(rows.shape[1:]), dtype=dtype, reduced=reduction.words())
            found[placed.name] = stored, max(len(rows) / n, 1.0)  # the first samples may have none that match
        return found

    def _claim(self, own: Mapping[str, tuple[StoredSite, float]], seconds: float) -> Manifest:
        """The manifest, written by rank 0, of the sites of all ranks."""
        gathered: list[Any] = [None] * self.mesh.world_size
        dist.all_gather_object(gathered, dict(own))
        sites: dict[str, tuple[StoredSite, float]] = {}
        for one in gathered:
            sites |= one
        request = self.request
        order = [name for pattern in request.sites for name in self.session.sites.names(pattern)]
        sites = {name: sites[name] for name in dict.fromkeys(order)}
        of_sample = {name: stored.row_bytes() * rows for name, (stored, rows) in sites.items()}
        by_size = max(1, int(_SHARD_BYTES // max(sum(of_sample.values()), 1)))
        per_shard = request.shard_samples or min(-(-by_size // self.batch_size) * self.batch_size, self.n_samples)
        manifest = Manifest(
            sites={name: stored for name, (stored, _) in sites.items()},
            n_samples=self.n_samples,
            shard_samples=per_shard,
            origin=request.origin,
        )
        size = int(sum(of_sample.values()) * self.n_samples)

        def claim() -> None:
            batches = -(-self.n_samples // (self.batch_size * self.mesh.dp_size))
            self.log(
                f"{self.n_samples:,} samples of {len(sites)} sites: about {as_size(size)} in "
                f"{_shards(manifest.n_shards())} a site, about {_time(seconds * batches)}"
            )
            if (request.out / "manifest.json").exists():
                manifest.refuse_other(Manifest.read(request.out), request.out)
            elif request.out.exists() and (not request.out.is_dir() or any(request.out.iterdir())):
                raise ConfigError(
                    f"--out {request.out}: is a file or has other files in it; give a folder that is empty or new"
                )
            make_folder(request.out)
            left = len(missing_shards(request.out, manifest, list(sites))) / manifest.n_shards()
            if problem := lack_of_room(request.out, int(size * left), "the store"):
                raise ConfigError(f"--out: {problem}")
            if not (request.out / "manifest.json").exists():
                manifest.write(request.out)

        self._agreed(claim)
        return manifest

    def _write_shards(self, manifest: Manifest, shards: Sequence[int]) -> None:
        mesh = self.mesh
        if len(shards) < manifest.n_shards():
            self.log(f"{_shards(manifest.n_shards() - len(shards))} a site done before")
        rounds = -(-len(shards) // mesh.dp_size)
        with ShardWriter(self.request.out) as writer:
            for number in range(rounds):
                index = number * mesh.dp_size + mesh.dp_rank
                own = shards[index] if index < len(shards) else None
                self._shard(manifest, own, writer)
                writer.refuse_failed()

    def _shard(self, manifest: Manifest, shard: int | None, writer: ShardWriter) -> None:
        """Hand over the rows of a shard. Without one, this rank runs as many forwards as the others, for nothing."""
        samples = range(0) if shard is None else manifest.samples_of(shard)
        for start in range(0, manifest.shard_samples, self.batch_size):
            numbers = start + np.arange(self.batch_size) + (samples.start if samples else 0)
            n_kept = max(0, min(self.batch_size, (samples.stop if samples else 0) - int(numbers[0])))
            tokens = self._forward(np.minimum(numbers, self.n_samples - 1), n_kept)
            if shard is not None and n_kept and self._writes():
                has_tokens = self._has_first_stage()
                writer.put(
                    ShardPart(
                        shard=shard,
                        rows={**({TOKENS: tokens} if has_tokens else {}), **self.values},
                        beside_tokens=self._beside_tokens() if has_tokens else {},
                        is_last=int(numbers[0]) + n_kept == samples.stop,
                    )
                )

    def _beside_tokens(self) -> dict[str, torch.Tensor]:
        is_kept = self.is_kept[: self.n_kept]
        where = {} if self.request.reduction.tokens is None else {"position": is_kept.nonzero()[:, 1]}
        return {"length": is_kept.sum(1), **where}

    def _writes(self) -> bool:
        """Return whether this rank is the one that writes, of those with the same samples and layers."""
        one = self.mesh.device_mesh
        return one.get_local_rank("tp") == 0 and one.get_local_rank("cp") == 0

    def _has_first_stage(self) -> bool:
        return self.mesh.device_mesh.get_local_rank("pp") == 0

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """What ``work`` gives on rank 0, on all ranks; its error, too."""
        box: list[Any] = [None, None]
        if self.mesh.rank == 0:
            try:
                box[0] = work()
            except ConfigError as error:
                box[1] = str(error)
        dist.broadcast_object_list(box)
        if box[1] is not None:
            raise ConfigError(box[1])
        return box[0]


def _by(sizes: Sequence[int]) -> str:
    return " × ".join(map(str, sizes))


def _shards(number: int) -> str:
    return "1 shard" if number == 1 else f"{number:,} shards"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
