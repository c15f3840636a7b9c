"""What operations take on a machine that has been measured, and the file in which that is kept."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import cattrs

from forge_core.contracts.gpu import PEAK_BF16_TFLOPS, Gpu
from forge_core.errors import ConfigError
from forge_plugins_plan.machine import PUBLISHED, Links, link_seconds, published_links
from forge_plugins_plan.work import ALL_TO_ALL, ATTENTION, COLLECTIVES, PRODUCT, RECEIVE, SEND, Work

VERSION = 1


@attrs.frozen
class Grid:
    """A positive value that has been measured at the corners of a grid; between them its logarithm is linear in the
    logarithms of the coordinates, and outside it is that of the nearest point."""

    axes: tuple[tuple[float, ...], ...]
    """Coordinates of the corners, rising."""
    values: tuple[float, ...]
    """The last axis changes fastest."""

    def at(self, *point: float) -> float:
        return math.exp(self._log(point, 0, 0))

    def _log(self, point: Sequence[float], axis: int, offset: int) -> float:
        if axis == len(self.axes):
            return math.log(self.values[offset])
        corners = self.axes[axis]
        stride = math.prod(map(len, self.axes[axis + 1 :]))
        place = min(max(point[axis], corners[0]), corners[-1])
        above = next((i for i, corner in enumerate(corners) if corner >= place))
        below = max(0, above - 1)
        high = self._log(point, axis + 1, offset + above * stride)
        if above == below or corners[above] == place:
            return high
        low = self._log(point, axis + 1, offset + below * stride)
        part = math.log(place / corners[below]) / math.log(corners[above] / corners[below])
        return low + part * (high - low)


@attrs.frozen(kw_only=True)
class Collective:
    """Of one group of ranks: seconds by bytes of the whole tensor."""

    kind: str
    ranks: int
    ranks_of_node: int
    seconds: Grid


@attrs.frozen(kw_only=True)
class Calibration:
    """A ``Machine`` by what was measured on it."""

    version: int = VERSION
    device: str
    """``cpu`` or ``cuda``, and its name."""
    torch: str
    """The version of torch that measured."""
    date: str
    host: str
    ranks: int
    """Processes that measured at the same time. Those of a CPU share it."""
    threads: int
    """Of each of them."""
    host_seconds: float
    """For one operation, with autograd."""
    products: Mapping[str, Grid]
    """FLOP/s by ``dtype, form``, over m, n and k of a product that is ``straight``. One ``across`` is the gradient of
    such a one's weight."""
    attention: Mapping[str, Grid]
    """FLOP/s of the whole square by ``dtype, form``, over queries and the width of a head."""
    memory: Mapping[str, Grid]
    """Bytes a second by ``dtype, form``, over bytes."""
    collectives: tuple[Collective, ...] = ()

    @property
    def words(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        threads = f" of {self.threads} thread{'s' if self.threads > 1 else ''}" if self._is_cpu else ""
        return f"measured on {self.device.partition(' ')[2]}, {ranks}{threads}, torch {self.torch}, {self.date}"

    @property
    def _is_cpu(self) -> bool:
        return self.device.startswith("cpu")

    @property
    def runs_ahead(self) -> bool:
        return not self._is_cpu

    def peak_flops(self, dtype: str) -> float:
        """That of the GPU's data sheet; of a CPU, the fastest product that was measured."""
        names = [name for name in PEAK_BF16_TFLOPS if name in self.device]
        if names and not self._is_cpu:
            return PEAK_BF16_TFLOPS[max(names, key=len)] * 1e12
        return max(self._grid(self.products, f"{dtype}, straight").values)

    def seconds(self, work: Work) -> float:
        """Same as ``Machine.seconds``."""
        if work.kind in (*COLLECTIVES, SEND, RECEIVE):
            return self._link_seconds(work)
        if work.kind == PRODUCT and work.flops:
            _, m, n, k = work.shape
            sides = (m, n, k) if work.form == "straight" else (k, m, n)  # where the long side is the sum's
            return work.flops / self._grid(self.products, f"{work.dtype}, {work.form}").at(*sides)
        if work.kind == ATTENTION and work.flops:
            queries, _, width = work.shape
            return work.flops / self._grid(self.attention, f"{work.dtype}, {work.form}").at(queries, width)
        size = max(1, work.size)
        return size / self._grid(self.memory, f"{work.dtype}, {work.form or 'plain'}").at(size)

    def _grid(self, grids: Mapping[str, Grid], name: str) -> Grid:
        """That of the name, or of the same form in another dtype."""
        dtype, _, form = name.partition(", ")
        other = "bfloat16" if dtype in ("float16", "bfloat16") or dtype.startswith("float8") else "float32"
        return grids.get(name) or grids[f"{other}, {form}"]

    def _link_seconds(self, work: Work) -> float:
        """Of the group that is most like it: it crosses nodes like it, and has nearly as many ranks."""
        kind = ALL_TO_ALL if work.kind in (SEND, RECEIVE) else work.kind
        crosses = work.ranks > work.ranks_of_node
        like = [one for one in self.collectives if one.kind == kind]
        known = [one for one in like if (one.ranks > one.ranks_of_node) == crosses]
        if not known and crosses and self._published is not None:
            return link_seconds(work, *self._published)
        if not (known or like):
            return 0.0
        best = min(known or like, key=lambda one: abs(math.log(one.ranks / work.ranks)))
        sent, sent_there = (1 if work.kind in (SEND, RECEIVE) else 1 - 1 / work.ranks), 1 - 1 / best.ranks
        largest = best.seconds.axes[0][-1]
        size = work.size * sent / sent_there
        return best.seconds.at(max(1, size)) * max(1.0, size / largest)

    @cached_property
    def _published(self) -> tuple[Links, Links] | None:
        """What data sheets say of the GPU, for networks that were not measured."""
        names = [name for name in PUBLISHED if name.partition("-")[0].upper() in self.device]
        return published_links(PUBLISHED[names[0]]) if names else None

    def write(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(attrs.asdict(self), indent=1) + "\n")


def read_calibration(file: Path) -> Calibration:
    """
    Raises:
        ConfigError: there is no such file, or ``forge plan --calibrate`` has not written it.
    """
    if not file.is_file():
        raise ConfigError(
            f"--calibration {file}: there is no such file; forge plan --calibrate --out {file} writes one"
        )
    try:
        table = json.loads(file.read_text())
        if table["version"] != VERSION:
            raise ValueError(f"its version is {table['version']}, and this forge reads {VERSION}")
        return cattrs.Converter(forbid_extra_keys=True).structure(table, Calibration)
    except (ValueError, KeyError, TypeError, AttributeError, cattrs.BaseValidationError) as error:
        raise ConfigError(
            f"--calibration {file}: is not what forge plan --calibrate writes ({_first_line(error)}); measure again"
        ) from error


def default_file(device: str, ranks: int) -> Path:
    """Where a calibration of this device is kept, unless told: in the user's folder of caches."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "forge" / "calibrations" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', device)}-{ranks}.json"


def mismatches(
    calibration: Calibration, *, gpu: Gpu | None, device: str, torch_version: str, ranks: int
) -> Iterator[str]:
    """Why what was measured may not hold for the run, each with both sides.

    Args:
        gpu: what the run is to be on, if it is said.
        device: what this process would run on, as ``Calibration.device``.
        ranks: of a node of the run.
    """
    if gpu is not None:
        if gpu.name.partition("-")[0].upper() not in calibration.device:
            yield f"the calibration is of {calibration.device}, and the plan is for {gpu.name}"
    elif calibration.device != device and (calibration.device.startswith("cpu") or not device.startswith("cpu")):
        yield f"the calibration is of {calibration.device}, and this machine has {device}"
    if calibration.torch != torch_version:
        yield f"the calibration is of torch {calibration.torch}, and this is torch {torch_version}"
    if calibration.device.startswith("cpu") and calibration.ranks != ranks:
        yield f"the calibration is of {calibration.ranks} ranks that share a CPU, and the plan has {ranks} on a node"


def _first_line(error: BaseException) -> str:
    nested: Any = getattr(error, "exceptions", None)
    inner = nested[0] if nested else error
    return f"{type(inner).__name__}: {(str(inner).splitlines() or [''])[0]}"
