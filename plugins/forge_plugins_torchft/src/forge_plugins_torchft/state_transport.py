"""How a replica's state travels to another: torchft's HTTP server, from rank to rank."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any
from urllib.request import urlopen

from torch.distributed._serialization import _streaming_load
from torchft.checkpointing import HTTPTransport  # type: ignore[import-untyped]  # it has no types


class StateTransport(HTTPTransport[Any]):  # type: ignore[misc]  # torchft's
    """Reading executes nothing: torchft's own would unpickle all that the other side sends.

    Args:
        host: under which others reach this machine; torchft's own takes the host's name.
    """

    failure: Exception | None = None
    """Why the state of another replica could not be had."""

    def __init__(self, timeout: timedelta, host: str) -> None:
        super().__init__(timeout, num_chunks=0)
        self._host = host
        self._server.RequestHandlerClass.log_message = lambda *_: None  # else each request is a line on stderr

    def address(self) -> str:
        # torchft logs it from the constructor, before there is a host
        host = getattr(self, "_host", "")
        return f"http://{host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        # of tensors that are only copied from
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        with urlopen(address, timeout=timeout.total_seconds()) as answer:
            return _streaming_load(answer, weights_only=True)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        try:
            return super().recv_checkpoint(src_rank, metadata, step, timeout)
        except Exception as error:
            self.failure = error  # torchft would go on without it
            raise
