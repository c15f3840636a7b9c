"""Files on their way from the memory of one node to that of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

from forge_core.checkpoint.fsync import HashedFile

_PIECE = 2**24
"""Bytes of a message."""


@attrs.frozen
class Transfer:
    """A file that one rank reads and sends, and another one writes."""

    source: int
    target: int
    name: str
    """Path below the folder of both."""
    n_bytes: int


def exchange(transfers: Sequence[Transfer], folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Send and receive. All ranks of the group call it together, with the same transfers in the same order.

    A rank sends and receives at the same time, each in the order of ``transfers``: the first transfer that has not
    ended is always the next one of both of its ranks.

    Returns:
        Entries of a manifest for what this rank has received, by name.

    Raises:
        OSError: a file cannot be read or written.
        RuntimeError: another rank is gone, or does not come in time.
    """
    rank = dist.get_rank(group)
    with ThreadPoolExecutor(1, "forge-memory-send") as beside:
        sent = beside.submit(_send, [one for one in transfers if one.source == rank], folder, group)
        received = {one.name: _receive(one, folder, group) for one in transfers if one.target == rank}
        sent.result()
    for entry in received.values():
        if isinstance(entry, OSError):
            raise entry
    return received


def _send(transfers: Sequence[Transfer], folder: Path, group: dist.ProcessGroup | None) -> None:
    """What cannot be read is sent as zeros, which the other rank waits for; its digest tells them."""
    problem: OSError | None = None
    for one in transfers:
        with ExitStack() as files:
            file: FileIO | None = None
            try:
                file = files.enter_context((folder / one.name).open("rb", buffering=0))
            except OSError as error:
                problem = error
            for size in _pieces(one.n_bytes):
                piece = bytearray(size)
                try:
                    if file is not None:
                        file.readinto(piece)
                except OSError as error:
                    problem = error
                dist.send(torch.frombuffer(piece, dtype=torch.uint8), group_dst=one.target, group=group)
    if problem is not None:
        raise problem


def _receive(one: Transfer, folder: Path, group: dist.ProcessGroup | None) -> dict[str, Any] | OSError:
    """Under another name until it is there. What cannot be written is received all the same, and so are the files
    after it: other ranks wait until they have sent them."""
    unfinished, pieces = folder / f".{one.name}.received", _received(one, group)
    try:
        with HashedFile(unfinished) as file:
            for piece in pieces:
                file.write(piece)
        unfinished.replace(folder / one.name)
    except OSError as error:
        for _ in pieces:
            pass
        return error
    return {"bytes": file.n_bytes, "xxh3_128": file.digest.hexdigest()}


def _received(one: Transfer, group: dist.ProcessGroup | None) -> Iterator[np.ndarray]:
    for size in _pieces(one.n_bytes):
        piece = torch.empty(size, dtype=torch.uint8)
        dist.recv(piece, group_src=one.source, group=group)
        yield piece.numpy()


def _pieces(n_bytes: int) -> Iterator[int]:
    while n_bytes > 0:
        yield min(n_bytes, _PIECE)
        n_bytes -= _PIECE
