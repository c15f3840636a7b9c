"""Shards on their way to the disk."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue

import torch

from forge_core.errors import ConfigError
from forge_plugins_interp.store import TOKENS, write_shard


class ShardWriter:
    """Writes shards of a store in a thread, while the next one is computed."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._queue: Queue[tuple[int, dict[str, list[torch.Tensor]]] | None] = Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="activation store")

    def __enter__(self) -> ShardWriter:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if kind is None:
            self.refuse_failed()

    def put(self, shard: int, rows: dict[str, list[torch.Tensor]]) -> None:
        """Hand over a shard; waits while the one before last is not written."""
        self._queue.put((shard, rows))

    def refuse_failed(self) -> None:
        """
        Raises:
            ConfigError: a shard could not be written.
        """
        if self._error is not None:
            raise ConfigError(f"{self._out}: cannot be written: {self._error}") from self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._error is not None:
                continue
            shard, rows = item
            try:
                lengths = rows.pop("length", None)
                for site, parts in rows.items():
                    more = {} if site != TOKENS or lengths is None else {"length": torch.cat(lengths)}
                    write_shard(self._out, site, shard, {"values": torch.cat(parts), **more})
            except BaseException as error:  # noqa: BLE001  # told by the thread that computes
                self._error = error
