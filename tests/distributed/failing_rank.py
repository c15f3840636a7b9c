"""One rank of two: what is done on the first one alone may fail there, with whatever error."""

from datetime import timedelta

import torch.distributed as dist

from forge_core.distributed.collective_errors import run_on_all_ranks, run_on_rank0
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
dist.destroy_process_group()
hard_exit()
