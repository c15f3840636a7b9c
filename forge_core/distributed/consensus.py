"""Consensus: a request of any rank is carried out by all, at the same step."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist

from forge_core.contracts.callback import Requests


@attrs.frozen
class Votes:
    """The answer of all ranks, the same on each."""

    save: bool
    stop: bool
    is_writing: bool
    """A checkpoint is still being written by one of them."""


class Consensus:
    """Exchanges requests over gloo, so that no device has to be waited for.

    Args:
        requests: this rank's.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._alone = dist.get_world_size() == 1
        self._group = None if self._alone else dist.new_group(backend="gloo")
        self._flags = torch.zeros(3, dtype=torch.int32)
        self._under_way: dist.Work | None = None

    def exchange(self, *, is_writing: bool) -> Votes:
        """Exchange what is asked for, and whether this rank is writing a checkpoint.

        With several ranks the answer is to what was asked one step ago: the exchange overlaps with a step.
        """
        requests = self._requests
        if self._alone:
            votes = Votes(requests.save_now, bool(requests.stop), is_writing)
            requests.save_now = False
            return votes
        votes = Votes(save=False, stop=False, is_writing=True)
        if self._under_way is not None:
            self._under_way.wait()
            votes = Votes(*(bool(flag) for flag in self._flags.numpy()))
        if votes.save:
            requests.save_now = False
        self._flags = torch.tensor([requests.save_now, bool(requests.stop), is_writing], dtype=torch.int32)
        self._under_way = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return votes

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank says so, now; all ranks wait for each other."""
        if self._alone:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return bool(flags.numpy()[0])

    def reason(self) -> str:
        """Return why to stop, once all know that they do. Where ranks were told different things, the lowest rank's."""
        if self._alone:
            return self._requests.stop
        reasons: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(reasons, self._requests.stop, group=self._group)
        return next(filter(None, reasons))

    def finish(self) -> None:
        """Wait for an exchange that is under way."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
