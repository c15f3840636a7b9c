"""Consensus: a request of any rank is carried out by all, at the same step."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist

from forge_core.contracts.callback import Requests
from forge_core.distributed.collective_errors import any_rank, gather
from forge_core.distributed.host_copy import HostCopy


@attrs.frozen
class Votes:
    """The answer of all ranks, the same on each."""

    save: bool
    stop: bool
    is_writing: bool
    """A checkpoint is still being written by one of them."""


class Consensus:
    """Sends requests along with a reduction that each step has anyway.

    Args:
        requests: this rank's.
        device: the run's.
    """

    is_writing: bool = False
    """This rank is writing a checkpoint. It is sent along, too."""

    def __init__(self, requests: Requests, device: torch.device) -> None:
        self._requests = requests
        self._alone = dist.get_world_size() == 1
        self._n_late = int(device.type == "cuda")
        """Reductions that are not waited for: the host would wait for the step."""
        self._under_way: list[HostCopy] = []
        self._n_answered = 0
        """How many of those under way were sent before the last save was agreed on."""

    def reduce(self, flag: torch.Tensor) -> torch.Tensor:
        """Return whether ``flag`` is 1 on any rank, on its device; what is asked for until now goes with it. The host
        does not wait.

        Args:
            flag: 1 or 0, fp32, a scalar.
        """
        if self._alone:
            return flag
        flags = flag.new_zeros(4)  # filled on the device: a copy from pageable memory may wait for it
        flags[0] = flag
        for i, asked in enumerate((self._requests.save_now, self._requests.stop, self.is_writing), start=1):
            if asked:
                flags[i] = 1.0
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        self._under_way.append(HostCopy(flags[1:]))
        return flags[0]

    def votes(self) -> Votes:
        """Return what all ranks have asked for until the last ``reduce``; on GPUs, until the one before."""
        requests = self._requests
        if self._alone:
            votes = Votes(requests.save_now, bool(requests.stop), self.is_writing)
            requests.save_now = False
            return votes
        n = max(0, len(self._under_way) - self._n_late)
        asked, self._under_way = [copy.values() for copy in self._under_way[:n]], self._under_way[n:]
        save = any(save for save, _, _ in asked[self._n_answered :])
        self._n_answered = max(0, self._n_answered - n)
        if save:
            requests.save_now, self._n_answered = False, len(self._under_way)
        return Votes(save, any(stop for _, stop, _ in asked), not asked or bool(asked[-1][2]))

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank says so, now; all ranks wait for each other."""
        return flag if self._alone else any_rank(flag)[0]

    def reason(self) -> str:
        """Return why to stop, once all know that they do. Where ranks were told different things, the lowest rank's."""
        return next(filter(None, gather(self._requests.stop)), "")
