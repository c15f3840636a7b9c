"""Which data set of the Hugging Face ``datasets`` library is meant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from attrs.validators import min_len, optional


def not_empty(_: object, attribute: attrs.Attribute[Any], value: str | tuple[str, ...]) -> None:
    """Validate one path or several.

    Raises:
        ValueError: there is none, or one is empty.
    """
    paths = (value,) if isinstance(value, str) else value
    if not paths or "" in paths:
        raise ValueError(f"'{attribute.name}' must name at least one file or folder, and no empty one: {value!r}")


@attrs.frozen(kw_only=True, slots=False)  # of two bases of a class, one at most may have slots
class DatasetConfig:
    """A data set of the Hugging Face ``datasets`` library. Needs the extra ``huggingface``."""

    path: str = attrs.field(validator=not_empty)
    """A folder of ``save_to_disk``, a folder of files, a name of the Hugging Face Hub, or, with ``data_files``, a
    format (``parquet``, ``json``, ``csv``, ``text``). Relative to the working directory; ``~`` is the home
    directory."""
    subset: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """Which configuration of a data set that has several, such as a language."""
    split: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """Which split, by default ``train``. For a folder that has a single one, there is nothing to choose."""
    data_files: str | tuple[str, ...] | None = attrs.field(default=None, validator=optional(not_empty))
    """Files of the folder or the format, by their names or globs."""
    revision: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    """A commit, tag or branch of a data set on the hub. A run that goes on should find what it began with."""

    @property
    def words(self) -> str:
        """For messages."""
        return f"the data set {self.path!r}" + (f" ({self.subset})" if self.subset is not None else "")

    def missing(self) -> Iterable[str]:
        """The library, or a path that can be no name of the hub."""
        from forge_plugins_data.hub_dataset import what_is_missing  # validation does not need it

        yield from what_is_missing(self)
