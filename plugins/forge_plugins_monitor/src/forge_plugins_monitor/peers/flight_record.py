"""The last collectives of this rank, as torch's flight recorder has them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed


class FlightRecord:
    """Writes, once, for ``torchfrtrace``, which compares the files of ranks: the collectives of which order, shape or
    state differ.

    torch records the last 2,000 unless ``TORCH_FR_BUFFER_SIZE`` says otherwise: those of NCCL on a GPU, and of gloo on
    a CPU.

    Args:
        path: the file. Its name has to end with the rank.
        device: the run's kind of device.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        bindings: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]  # torch has no other door to it
        name = "_dump_nccl_trace" if device == "cuda" else "_dump_fr_trace"
        self._dump = getattr(bindings, name, None)
        self._is_begun = False

    def write(self, wait: float = 2.0) -> None:
        """Write what there is, without an error if that is nothing, or cannot be written.

        Args:
            wait: seconds at most; a device that hangs may keep torch from answering.
        """
        if self._is_begun or self._dump is None:
            return
        self._is_begun = True
        writing = threading.Thread(target=self._write, name="forge-flight-record", daemon=True)
        writing.start()
        writing.join(wait)

    def _write(self) -> None:
        assert self._dump is not None, "there is one, or no thread"
        try:
            record = self._dump()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(record)
        except (OSError, RuntimeError):  # a full disk, or a recorder that is switched off; the run ends in any case
            return
