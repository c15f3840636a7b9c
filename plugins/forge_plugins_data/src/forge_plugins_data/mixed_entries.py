"""The entries of batches that have samples of several sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from forge_core.contracts.batch import Entry

_SIDES = ("height", "width")
_SIZES = Entry(dims=("sample", "side"), sizes=(None, 2), absent=0)


def mixed_entries(parts: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Those of all parts. Of an entry that several have, each size is the largest, if all know it.

    Where parts give pictures of different ``height`` or ``width``, as of ``pixels``, there is an entry
    ``pixels_sizes`` ``(B, 2)`` besides: both of each sample, without what fills it up; 0, if it has no pictures.
    """
    mixed: dict[str, Entry] = {}
    known: dict[str, dict[int, int]] = {}
    for name, entry in (pair for entries in parts for pair in entries.items()):
        before = mixed.get(name, entry)
        if (sides := sides_of(entry)) and known.setdefault(name, sides) != sides:
            mixed[f"{name}_sizes"] = _SIZES
        sizes = zip(before.sizes, entry.sizes, strict=True) if before.sizes and entry.sizes else ()
        largest = tuple(None if one is None or other is None else max(one, other) for one, other in sizes)
        mixed[name] = attrs.evolve(entry, sizes=largest)
    return mixed


def has_several_sizes(entries: Mapping[str, Entry], name: str) -> bool:
    """Whether ``mixed_entries`` has found that sources give pictures ``name`` of several sizes."""
    return entries.get(f"{name}_sizes") == _SIZES


def sides_of(entry: Entry) -> dict[int, int]:
    """Height and width of an entry of pictures, by the number of the dimension, if both are known; else nothing."""
    sizes = enumerate(zip(entry.dims, entry.sizes, strict=False))
    found = {number: size for number, (dim, size) in sizes if dim in _SIDES and size is not None}
    return found if len(found) == len(_SIDES) else {}
