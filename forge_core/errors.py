"""Errors that are sentences for the person who can mend them, and the exit codes of ``forge run``."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """How a process of ours ends. 0 only when the run reached its end."""

    COMPLETED = 0
    UNEXPECTED = 1
    INVALID = 2
    """The configuration, the data or a plugin is wrong; nothing was started."""
    STOPPED = 3
    """Stopped early, with a checkpoint saved."""
    NON_FINITE = 4
    LOST_PEER = 5


INTERRUPTED = 130
"""Exit code after Ctrl-C has been pressed twice, as shells have it: 128 + SIGINT."""


class ForgeError(Exception):
    """An error whose message is meant for the user; printed without a traceback unless ``--debug`` is given."""

    exit_code = ExitCode.UNEXPECTED
    is_on_all_ranks = False
    """All ranks raise it; none waits to hear of it."""


def exit_code_of(error: BaseException) -> int:
    """How a process ends that ``error`` has ended."""
    if isinstance(error, SystemExit) and error.code == INTERRUPTED:
        return INTERRUPTED
    unexpected = ExitCode.INVALID if path_problem(error) else ExitCode.UNEXPECTED
    return int(error.exit_code if isinstance(error, ForgeError) else unexpected)


def path_problem(error: BaseException) -> str:
    """A sentence about a path that the user gave, if ``error`` is that there can be no such path; else nothing."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"the path {error.filename!r} cannot be: {error.strerror}"
    if isinstance(error, RuntimeError) and str(error) == "Could not determine home directory.":
        from traceback import walk_tb

        frame = [frame for frame, _ in walk_tb(error.__traceback__)][-1]  # of Path.expanduser
        return f"the path '{frame.f_locals.get('self', '~')}' begins with a user whom this machine does not have"
    return ""


def place_of(error: BaseException) -> str:
    """Where it was raised, or what called torch there, or the exit that another package has put in place of ours."""
    from traceback import extract_tb

    others = ("<", *(f"{path}/" for path in getattr(sys.modules.get("torch"), "__path__", ())))  # generated or torch's
    frames = extract_tb(error.__traceback__)
    ours = [one for one in frames if not one.filename.startswith(others) and one.name != "exit"] or frames
    return f"{ours[-1].filename}:{ours[-1].lineno}, in {ours[-1].name}"


class ConfigError(ForgeError):
    """Something the user wrote or pointed at is wrong: a configuration, an override, a data file."""

    exit_code = ExitCode.INVALID


class PluginError(ForgeError):
    """A plugin is wrong: it cannot be imported, or breaks the contract. The message says whose bug it is."""

    exit_code = ExitCode.INVALID


class NonFiniteError(ForgeError):
    """A loss or gradient is not finite, and the policy says to stop."""

    exit_code = ExitCode.NON_FINITE


class LostPeerError(ForgeError):
    """Another rank ended or does not answer."""

    exit_code = ExitCode.LOST_PEER


class NotJoinedError(LostPeerError):
    """The ranks of a group do not come together."""


class LeaseLostError(ForgeError):
    """Another attempt at the same run has taken over."""


class SaveError(ForgeError):
    """A checkpoint could not be written; those before it are as they were."""


class MirrorError(ForgeError):
    """The mirror of a run's checkpoints cannot be reached, read or written. Starting again later may help."""


@contextmanager
def noting(note: str, *, ours: bool = False) -> Iterator[None]:
    """Add a note to what a component raises, which names it.

    Args:
        ours: also to a ``ForgeError``, most of which say themselves whom they are about.
    """
    try:
        yield
    except StopIteration as error:  # a loop around the component would just end
        stopped = RuntimeError("StopIteration left the component")
        stopped.add_note(note)
        raise stopped.with_traceback(error.__traceback__) from None  # contextlib would raise its cause instead
    except Exception as error:
        if ours or not isinstance(error, ForgeError):
            error.add_note(note)
        raise


@contextmanager
def retelling(tell: Callable[[str], ForgeError]) -> Iterator[None]:
    """Raise in place of what a component raises the error that ``tell`` makes of its words; a ``ForgeError`` stays."""
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:
        raise tell(f"{type(error).__name__}: {error}") from error


def with_article(words: str) -> str:
    """``"an optimizer"``, ``"a router"``."""
    return f"{'an' if words[0].lower() in 'aeiou' else 'a'} {words}"


def and_more(n: int, shown: int, before: str = " ") -> str:
    """``" and 3 more"``, behind a list that shows fewer than ``n``; else nothing."""
    return f"{before}and {n - shown} more" if n > shown else ""


def nearest_hint(word: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, behind a sentence about ``word``, or nothing."""
    return f"; did you mean {near!r}?" if (near := nearest(word, names)) else ""


def did_you_mean(word: str, names: Iterable[str], likeness: float = 0.6) -> str:
    """``" Did you mean 'x'?"`` with a space in front, or nothing.

    Args:
        likeness: the least that counts, 0 to 1; more than usual where all names share a prefix.
    """
    return f" Did you mean '{near}'?" if (near := nearest(word, names, likeness)) else ""


def nearest(word: str, names: Iterable[str], likeness: float = 0.6) -> str | None:
    """The name that was probably meant by ``word``: the most alike in any case of letters, one that it begins, or the
    only one that it abbreviates (``hf``, ``lr``).

    Args:
        likeness: the least that counts as alike, 0 to 1.
    """
    import difflib  # only a mistake pays for it
    import re

    meant = {name.lower(): name for name in names}
    begun = [name for name in meant if len(word) > 1 and name.startswith(word.lower())]
    matches = difflib.get_close_matches(word.lower(), meant, n=1, cutoff=likeness) or sorted(begun, key=len)
    if not matches and 1 < len(word) <= 3:  # letters of an abbreviation
        matches = [name for name in meant if re.match(".*".join(map(re.escape, word.lower())), name)]
        matches = matches if len(matches) == 1 else []
    return meant[matches[0]] if matches else None
