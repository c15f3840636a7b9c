"""Shards on their way to the disk."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from queue import Queue

import attrs
import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.shard_file import ShardFile
from forge_plugins_interp.store import TOKENS


@attrs.frozen(kw_only=True, eq=False)
class ShardPart:
    """Rows of some samples of a shard."""

    shard: int
    rows: Mapping[str, torch.Tensor]
    """By site, on the CPU."""
    beside_tokens: Mapping[str, torch.Tensor]
    """Of each sample its ``length`` in tokens and, if only some tokens are kept, of each token its ``position``. Empty
    where another rank writes the tokens."""
    is_last: bool
    """No rows of this shard come after it."""

    @property
    def n_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


_WAITING_BYTES = 64 * 2**20
"""So much may wait for the disk, or else one part."""


class ShardWriter:
    """Writes shards of a store in a thread, while the next rows are computed. It holds few rows at a time, and takes
    no more memory for large stores."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._queue: Queue[ShardPart | None] = Queue()
        self._n_waiting, self._has_room = 0, threading.Condition()
        self._error: BaseException | None = None
        self._files: dict[str, ShardFile] = {}
        self._beside_tokens: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
        self._thread = threading.Thread(target=self._run, name="activation store")

    def __enter__(self) -> ShardWriter:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if kind is None:
            self.refuse_failed()

    def put(self, part: ShardPart) -> None:
        """Hand over the next part; waits while earlier ones are not written."""
        with self._has_room:
            self._has_room.wait_for(lambda: not self._n_waiting or self._n_waiting + part.n_bytes <= _WAITING_BYTES)
            self._n_waiting += part.n_bytes
        self._queue.put(part)

    def refuse_failed(self) -> None:
        """
        Raises:
            ConfigError: a shard could not be written.
        """
        if self._error is not None:
            raise ConfigError(f"{self._out}: cannot be written: {self._error}") from self._error

    def _run(self) -> None:
        while (part := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._write(part)
            except BaseException as error:  # noqa: BLE001  # told by the thread that computes
                self._error = error
            with self._has_room:
                self._n_waiting -= part.n_bytes
                self._has_room.notify()
        for file in self._files.values():
            file.discard()

    def _write(self, part: ShardPart) -> None:
        for site, rows in part.rows.items():
            if site in self._files:
                self._files[site].append(rows)
            else:
                self._files[site] = ShardFile(self._out, site, part.shard, rows)
        for name, values in part.beside_tokens.items():
            self._beside_tokens[name].append(values)
        if part.is_last:
            beside = {name: torch.cat(parts) for name, parts in self._beside_tokens.items()}
            self._beside_tokens.clear()
            for site in list(self._files):
                self._files[site].commit(beside if site == TOKENS else {})
                del self._files[site]
