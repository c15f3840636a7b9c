"""One rank of two, of which the second gets two files of two messages each, and cannot write the first file."""

import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from forge_plugins_mirror.host_memory.transfers import Transfer, exchange

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
folder = Path(sys.argv[1]) / str(dist.get_rank())
folder.mkdir()
content = bytes(range(250)) * 100_000
transfers = [Transfer(0, 1, name, len(content)) for name in ("first", "second")]
if dist.get_rank() == 0:
    for one in transfers:
        (folder / one.name).write_bytes(content)
    exchange(transfers, folder)
    print("sent")
else:
    (folder / ".first.received").mkdir()
    try:
        exchange(transfers, folder)
    except OSError as error:
        print(type(error).__name__, (folder / "second").read_bytes() == content)
dist.destroy_process_group()
