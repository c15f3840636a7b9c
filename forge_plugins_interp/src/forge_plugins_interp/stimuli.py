"""Stimuli: texts of a table, each a sample by itself, with an id and what else the table says of it."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.contracts.loss import IGNORED
from forge_core.contracts.tokenizer import Tokenizer
from forge_core.errors import ConfigError, and_more, nearest_hint
from forge_plugins_interp.tidy_table import read_csv


class Stimuli:
    """A data source of texts, padded on the right.

    Args:
        path: ``.csv`` with a header, or ``.jsonl`` with an object a line.
        column: the one that has the texts.
        tokenizer: of the model.
        longest: positions that the model takes.
        multiple: the length of samples is a multiple of it.

    Raises:
        ConfigError: the file cannot be read, has no such column, an empty text, an id twice, a column that a store
            has no room for, or a list in place of a value.
    """

    def __init__(self, path: Path, column: str, tokenizer: Tokenizer, *, longest: int, multiple: int) -> None:
        self._rows = _rows(path)
        self._path = path
        if not self._rows:
            raise ConfigError(f"--stimuli {path}: it has no stimulus")
        for key in (column, "stimulus_id"):
            self._refuse_lacking(key)
        self._ids = [tokenizer.encode(str(row[column])).tolist() for row in self._rows]
        self._width = -(-max(map(len, self._ids)) // multiple) * multiple
        for number, ids in enumerate(self._ids):
            if not ids:
                raise ConfigError(f"--stimuli {path}: row {number + 1} has an empty {column}")
            if len(ids) > longest or self._width > longest:
                raise ConfigError(
                    f"--stimuli {path}: row {number + 1} has {len(ids)} tokens, and the model takes {longest}"
                )
        self.columns = self._columns(column)
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer: Tokenizer | None = tokenizer
        digest = hashlib.sha256(json.dumps([self._ids, [str(one) for one in self.columns["stimulus_id"]]]).encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Same as ``DataSource.read``; ``positions`` are −1 at padding."""
        tokens = np.zeros((len(indices), self._width), np.int64)
        targets, positions = np.full_like(tokens, IGNORED), np.full_like(tokens, -1)
        for row, number in enumerate(indices.tolist()):
            ids = self._ids[number]
            tokens[row, : len(ids)], positions[row, : len(ids)] = ids, np.arange(len(ids))
            targets[row, : len(ids) - 1] = ids[1:]
        return {"tokens": tokens, "targets": targets, "positions": positions}

    def _refuse_lacking(self, key: str) -> None:
        for number, row in enumerate(self._rows):
            if row.get(key) in (None, ""):
                hint = nearest_hint(key, row)
                raise ConfigError(
                    f"--stimuli {self._path}: row {number + 1} has no {key!r}; it has {', '.join(row)}{hint}"
                )

    def _columns(self, column: str) -> dict[str, np.ndarray]:
        """All but the texts, a column an array."""
        names = [name for name in self._rows[0] if name != column or name == "stimulus_id"]
        if "length" in names:
            raise ConfigError(
                f"--stimuli {self._path}: a store calls the number of tokens 'length'; give this column another name"
            )
        for number, row in enumerate(self._rows):
            if several := next((name for name in names if isinstance(row.get(name), list | dict)), None):
                raise ConfigError(
                    f"--stimuli {self._path}: row {number + 1}: {several} must be one value, got {row[several]!r}"
                )
        found = {name: np.array([row.get(name) for row in self._rows]) for name in names}
        for name, values in found.items():
            if values.dtype == object:
                found[name] = np.array([str(row.get(name, "")) for row in self._rows])
        ids, counts = np.unique(found["stimulus_id"], return_counts=True)
        if len(twice := ids[counts > 1]):
            more = and_more(len(twice), 1)
            raise ConfigError(f"--stimuli {self._path}: stimulus_id {str(twice[0])!r}{more} is there more than once")
        return found


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    if path.suffix not in (".csv", ".jsonl"):
        raise ConfigError(f"--stimuli {path}: must end with .csv or .jsonl")
    try:
        if path.suffix == ".csv":
            return read_csv(path)
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [_object(path, number, line) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--stimuli {path}: cannot be read: {error}") from error


def _object(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--stimuli {path}:{number}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"--stimuli {path}:{number}: must be an object, got {type(row).__name__}")
    return row
