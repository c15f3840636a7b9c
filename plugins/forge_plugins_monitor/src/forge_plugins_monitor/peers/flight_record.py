"""The last collectives of this rank, as torch's flight recorder has them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed


class FlightRecord:
    """Writes them once: those of NCCL as a pickle, which ``torchfrtrace`` reads, and those of gloo, which it does not
    read, as JSON.

    torch records the last 2,000 unless ``TORCH_FR_BUFFER_SIZE`` says otherwise.

    Args:
        folder: gets ``rank_<n>``, or ``rank_<n>.json``.
        of_nccl: whether ranks talk by NCCL.
    """

    def __init__(self, folder: Path, rank: int, *, of_nccl: bool) -> None:
        self._path = folder / (f"rank_{rank}" if of_nccl else f"rank_{rank}.json")
        bindings: Any = torch._C._distributed_c10d
        self._dump = getattr(bindings, "_dump_nccl_trace" if of_nccl else "_dump_fr_trace_json", None)
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
