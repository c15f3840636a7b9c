"""One rank of two: what is done on the first one alone may fail there, with whatever error."""

from datetime import timedelta

import torch.distributed as dist

from forge_core.distributed.collective_errors import from_first_rank, on_all_ranks
from forge_core.errors import ConfigError, ExitCode, ForgeError
from forge_core.run.process import leave


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
        on_all_ranks(lambda error=error: from_first_rank(fails_with(error)))
    except ForgeError as raised:
        print(raised.exit_code is expected, str(raised) == ("" if dist.get_rank() else words))
print(from_first_rank(lambda: "told"))
dist.destroy_process_group()
leave()
