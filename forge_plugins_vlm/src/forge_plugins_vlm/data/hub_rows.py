"""Rows of a data set of the ``datasets`` library, whose images are not decoded until they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from forge_core.errors import ConfigError
from forge_plugins_data.dataset_config import DatasetConfig
from forge_plugins_data.hub_dataset import load_rows
from forge_plugins_vlm.data.parquet_rows import Count, cells, counts_of, is_picture
from forge_plugins_vlm.data.references import DatasetCell
from forge_plugins_vlm.data.rows import Row

_AT_ONCE = 1000
"""Rows that are looked at together."""


def read_hub_rows(config: DatasetConfig) -> Iterator[Row]:
    """A row for each of the split. Columns of images are references, others are read.

    Raises:
        ConfigError: no such data set, subset or split, or the library is not installed; it is damaged.
    """
    loaded: Any = load_rows(config)
    schema = loaded.features.arrow_schema
    pictures = [field.name for field in schema if is_picture(field.type)]
    others = [name for name in loaded.column_names if name not in pictures]
    undecoded = loaded.with_format("arrow")
    split = config.split or "train"
    number = 0
    for start in range(0, len(loaded), _AT_ONCE):
        try:
            table = undecoded[start : start + _AT_ONCE]
            rows = table.select(others).to_pylist() if others else [{}] * len(table)
        except (OSError, ValueError) as error:  # what Arrow raises is one of them, and so is text that is no UTF-8
            raise ConfigError(f"{config.words} is damaged after row {start}: {error}") from error
        counts: dict[str, list[Count]] = {name: counts_of(table.column(name)) for name in pictures}
        for row, record in enumerate(rows):
            images = {
                name: cells(counts[name][row], partial(DatasetCell, undecoded, config.words, number, name))
                for name in pictures
            }
            number += 1
            yield Row({**record, **images}, f"row {number} of {config.words}", f"{split}:{number}", Path)
