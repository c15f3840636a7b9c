"""One rank of two: work on the first one alone may fail there, with any error; work on both may take one long."""

import time
from datetime import timedelta

import torch.distributed as dist

from forge_core.distributed.collective_errors import any_rank, run_on_all_ranks, run_on_rank0, run_slowly_on_all_ranks
from forge_core.errors import ConfigError, ExitCode, ForgeError
from forge_core.run.process import hard_exit


def fails_with(error):
    def work():
        assert dist.get_rank() == 0
        raise error

    return work


dist.init_process_group("gloo", timeout=timedelta(seconds=60))
for error, expected, words in (
    (ConfigError("no such file"), ExitCode.INVALID, "no such file"),
    (OSError(116, "Stale file handle"), ExitCode.UNEXPECTED, "OSError: [Errno 116] Stale file handle"),
):
    try:
        run_on_all_ranks(lambda error=error: run_on_rank0(fails_with(error)))
    except ForgeError as raised:
        print(raised.exit_code is expected, str(raised) == ("" if dist.get_rank() else words))
print(run_on_rank0(lambda: "told"))
beats = []


def slow_on_the_second():
    if dist.get_rank() == 1:
        time.sleep(2.5)
        raise ConfigError("the second cannot")
    return "done"


try:
    run_slowly_on_all_ranks(slow_on_the_second, lambda: beats.append(1))
except ConfigError as raised:
    print(len(beats) >= 2, str(raised) == ("" if dist.get_rank() else "the second cannot"))
print(run_slowly_on_all_ranks(lambda: dist.get_rank(), lambda: None) == dist.get_rank())


def fails_where_others_ask():
    """The first asks all a question; the second fails before it does."""
    if dist.get_rank() == 1:
        raise ConfigError("no folder for its board")
    any_rank(False)


try:
    run_on_all_ranks(fails_where_others_ask)
except ConfigError as raised:
    print("while asked", str(raised) == ("" if dist.get_rank() else "no folder for its board"))


def fails_between(error):
    """The first opens a file and then another one; the second fails between the two."""
    run_slowly_on_all_ranks(lambda: None, lambda: None)
    if dist.get_rank() == 1:
        raise error
    try:
        run_slowly_on_all_ranks(lambda: None, lambda: None)
    except ConfigError as caught:
        raise ConfigError(f"eval.data: {caught}") from caught


for error in (ConfigError("the second has other files"), OSError(5, "Input/output error")):
    try:
        run_on_all_ranks(lambda error=error: run_on_all_ranks(lambda: fails_between(error)))
    except ForgeError as raised:
        words = "eval.data: the second has other files" if isinstance(error, ConfigError) else "OSError: [Errno 5]"
        print(str(raised).startswith("" if dist.get_rank() else words))


def fails_after_all_did():
    """All learn that one cannot; of this the second alone makes an error of its own."""
    try:
        run_on_all_ranks(lambda: run_on_rank0(fails_with(ConfigError("no such file"))))
    except ConfigError as caught:
        if dist.get_rank() == 1:
            raise OSError("no other file") from caught


try:
    run_on_all_ranks(fails_after_all_did)
except ForgeError as raised:
    print("alone", str(raised) == ("" if dist.get_rank() else "OSError: no other file"))
print(run_on_rank0(lambda: "together"))
dist.destroy_process_group()
hard_exit()
