"""Types commands of ``forge`` in one process: ``python commands.py FILE``, with a list of their arguments as JSON.

Each line that is printed is the exit code of one, what it said, and how often the host waited for the GPU, by place.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from forge_core.cli import main

if "TORCH_STAND_IN_GPU" in os.environ:
    import torch  # noqa: F401  # the stand-in comes with it
    from stand_in_gpu import waits
else:

    def waits():
        return contextlib.nullcontext({})


for arguments in json.loads(Path(sys.argv[1]).read_text()):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), waits() as counted:
        code = main(arguments)
    print(json.dumps({"code": int(code), "said": said.getvalue(), "waits": counted}), flush=True)
