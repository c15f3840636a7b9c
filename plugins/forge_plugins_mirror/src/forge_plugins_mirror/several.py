"""Several mirrors of a run at once, such as the memory of its nodes and a bucket."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from forge_core.checkpoint.manifest import DamagedError, Manifest
from forge_core.checkpoint.saver import Snapshot
from forge_core.checkpoint.store import Checkpoint
from forge_core.contracts.builder import Builder
from forge_core.contracts.checkpoint_mirror import CheckpointMirror, MirrorContext, MirrorStart
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ForgeError, MirrorError
from forge_plugins_mirror.config import SeveralMirrorsConfig

T = TypeVar("T")


@attrs.define(eq=False)
class _Member:
    """One of them."""

    use: ComponentRef
    mirror: CheckpointMirror
    listed: Mapping[int, Manifest | DamagedError] = attrs.field(factory=dict)
    """What it has listed last."""

    def has_whole(self, step: int) -> bool:
        return isinstance(self.listed.get(step), Manifest)


class SeveralMirrors(CheckpointMirror):
    """Asks each of them, in the order of the configuration. An error of one is raised once the others were asked."""

    def __init__(self, config: SeveralMirrorsConfig, /, *, context: MirrorContext, build: Builder) -> None:
        self._context = context
        self._members = [_Member(use, build(use, context=context)) for use in config.mirrors]
        self._begun: list[_Member] = []
        self._wanting: list[_Member] = []
        self.place = " and ".join(one.mirror.place for one in self._members)

    def available(self) -> Mapping[int, Manifest | DamagedError]:
        found: dict[int, Manifest | DamagedError] = {}
        failed: MirrorError | None = None
        for member in self._members:
            member.listed = {}
            try:
                self._ask([member], _list)
            except MirrorError as error:
                failed = failed or error
            for step, one in member.listed.items():
                if not isinstance(found.get(step), Manifest):
                    found[step] = one
        if failed is not None:
            if not found or self._context.section.on_failure == "stop":
                raise failed
            self._context.say(f"{failed}; going by the other mirrors")
        return dict(sorted(found.items()))

    def last_job(self) -> str | None:
        failed: MirrorError | None = None
        for member in self._members:
            try:
                answer = self._ask([member], lambda one: one.mirror.last_job())[0]
            except MirrorError as error:
                failed = failed or error
                continue
            if answer is not None:
                return answer
        if failed is not None:
            raise failed
        return None

    def open(self, step: int) -> Checkpoint | None:
        answers = (self._ask([one], lambda one: one.mirror.open(step))[0] for one in self._with(step))
        return next((answer for answer in answers if answer is not None), None)

    def fetch(self, step: int, folder: Path) -> str | None:
        problem, failed = "no mirror has it whole", None
        for member in self._with(step):
            # what the one before has left
            self._context.run_on_rank0(lambda: shutil.rmtree(folder, ignore_errors=True))
            try:
                answer = self._ask([member], lambda one: one.mirror.fetch(step, folder))[0]
            except MirrorError as error:
                failed = error
                continue
            if answer is None:
                return None
            problem = answer
        if failed is not None:
            raise failed
        return problem

    def problem(self, step: int, *, reads: bool) -> str | None:
        holders = [one for one in self._members if step in one.listed]
        problems = self._ask(holders, lambda one: one.mirror.problem(step, reads=reads))
        return None if None in problems else "; ".join(filter(None, problems))

    def begin(self, start: MirrorStart) -> None:
        self._begun = []

        def begin(member: _Member) -> None:
            self._begun.append(member)  # it is closed, also if it fails
            member.mirror.begin(start)

        self._ask(self._members, begin)

    def saved(self, path: Path) -> None:
        self._ask(self._begun, lambda one: one.mirror.saved(path))

    def wants(self, step: int) -> bool:
        self._wanting = []

        def ask(member: _Member) -> None:
            if member.mirror.wants(step):
                self._wanting.append(member)

        self._ask(self._begun, ask)
        return bool(self._wanting)

    def keep(self, snapshot: Snapshot) -> None:
        self._ask(self._wanting, lambda one: one.mirror.keep(snapshot))

    def wait_until_copied(self) -> None:
        self._ask(self._begun, lambda one: one.mirror.wait_until_copied())

    def look(self) -> None:
        self._ask(self._begun, lambda one: one.mirror.look())

    def may_remove(self, steps: Sequence[int], sizes: Mapping[int, int]) -> list[int]:
        answers = self._ask(self._begun, lambda one: one.mirror.may_remove(steps, sizes))
        return [step for step in steps if all(step in answer for answer in answers)]

    def rolled_back(self, to: int) -> None:
        self._ask(self._begun, lambda one: one.mirror.rolled_back(to))

    def finish(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._ask(self._begun, lambda one: one.mirror.finish(max(0.0, deadline - time.monotonic())))

    def try_again(self) -> bool:
        return any(self._ask(self._begun, lambda one: one.mirror.try_again()))

    def close(self) -> None:
        self._ask(self._begun, lambda one: one.mirror.close())

    def _with(self, step: int) -> Iterator[_Member]:
        return (one for one in self._members if one.has_whole(step))

    def _ask(self, members: Sequence[_Member], call: Callable[[_Member], T]) -> list[T]:
        """The answers of some members.

        Raises:
            MirrorError: the first one that a member has raised, after all others have been asked.
            ForgeError: at once; the run is to end.
        """
        answers: list[T] = []
        failed: MirrorError | None = None
        for member in members:
            try:
                answers.append(call(member))
            except MirrorError as error:
                failed = failed or error
            except ForgeError:
                raise
            except Exception as error:  # noqa: BLE001  # told with the name of the one that has it
                use = member.use
                sentence = f"checkpoint.mirror: '{use.name}' fails: {type(error).__name__}: {error}"
                bug = MirrorError(f"{sentence}. This is a bug in {use.provider}.")
                bug.__cause__ = error
                failed = failed or bug
        if failed is not None:
            raise failed
        return answers


def _list(member: _Member) -> None:
    member.listed = member.mirror.available()
