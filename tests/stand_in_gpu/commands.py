"""Types commands of ``forge`` in one process: ``python commands.py FILE``, with a list of their arguments as JSON.

Each line that is printed is the exit code of one, and what it said.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from forge_core.cli import main

for arguments in json.loads(Path(sys.argv[1]).read_text()):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main(arguments)
    print(json.dumps({"code": int(code), "said": said.getvalue()}), flush=True)
