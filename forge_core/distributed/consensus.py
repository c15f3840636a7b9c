"""Consensus: a request of any rank is carried out by all, at the same step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from forge_core.contracts.callback import Requests


class Consensus:
    """Exchanges requests over gloo, so that no device has to be waited for."""

    def __init__(self) -> None:
        self._alone = dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo")
        self._flags = torch.zeros(3, dtype=torch.int32)
        self._under_way: dist.Work | None = None

    def exchange(self, requests: Requests, *, is_writing: bool) -> tuple[bool, bool, bool]:
        """Return whether to save, whether to stop, and whether a checkpoint is still being written, as all ranks
        know it.

        With several ranks the answer is to what was asked one step ago: the exchange overlaps with a step.
        """
        if self._alone:
            answer = requests.save_now, bool(requests.stop), is_writing
            requests.save_now = False
            return answer
        save, stop, writing = False, False, True
        if self._under_way is not None:
            self._under_way.wait()
            save, stop, writing = (bool(flag) for flag in self._flags.numpy())
        if save:
            requests.save_now = False
        self._flags = torch.tensor([requests.save_now, bool(requests.stop), is_writing], dtype=torch.int32)
        self._under_way = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return save, stop, writing

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank says so, now; all ranks wait for each other."""
        if self._alone:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return bool(flags.numpy()[0])

    def reason(self, requests: Requests) -> str:
        """Why to stop, once all know that they do. Where ranks were told different things, the first one's."""
        if self._alone:
            return requests.stop
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, requests.stop, group=self._group)
        return next(filter(None, reasons))

    def finish(self) -> None:
        """Wait for an exchange that nobody asked after."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
