"""Dissemination: all ranks learn what any of them knows, with a few short messages of each."""

from __future__ import annotations

import torch
import torch.distributed as dist

_FLAGS = 8
"""All messages have as many: ranks that ask different questions at a time would else receive messages of another
length, at which gloo ends the process."""


def disseminate(*flags: bool, group: dist.ProcessGroup | None = None) -> list[bool]:
    """Return for each of up to eight flags whether it is set on any rank. All ranks call it together.

    Dissemination (Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988): in round k each rank
    tells the one ``2**k`` further on what it knows. After ``ceil(log2(N))`` rounds, of N ranks, all know all. gloo's
    all-reduce sends ``2 (N - 1)`` messages, one after the other.

    Args:
        group: of which ranks; by default all.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    known = torch.tensor([*flags, *[False] * (_FLAGS - len(flags))], dtype=torch.uint8)
    distance = 1
    while distance < ranks:
        heard = torch.zeros_like(known)
        sending = dist.isend(known, group_dst=(rank + distance) % ranks, group=group)
        dist.recv(heard, group_src=(rank - distance) % ranks, group=group)
        assert sending is not None, "this rank is in the group"
        sending.wait()
        known = known | heard
        distance *= 2
    return [bool(flag) for flag in known[: len(flags)].tolist()]
