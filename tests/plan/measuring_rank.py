"""One of several ranks: measures the machine together with the others, and prints what collectives took."""

import json

import torch
import torch.distributed as dist

from forge_plugins_plan.measuring import Sizes, measure

TINY = Sizes(
    rows=(8, 16), widths=(8, 16), queries=(8, 16), heads=(8, 16), bytes_moved=(2**12, 2**14), bytes_sent=(64, 4096)
)

dist.init_process_group("gloo")
measured = measure(torch.device("cpu"), TINY)
print(
    json.dumps([(one.kind, one.ranks, one.ranks_of_node, one.seconds.values) for one in measured.collectives]),
    measured.ranks,
)
dist.destroy_process_group()
