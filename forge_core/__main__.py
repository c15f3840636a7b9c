"""``forge``, and ``python -m forge_core``."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109  # before imports
    del sys.path[0]  # `python -m` puts it there, and a file random.py in it would be taken for Python's own

import atexit

from forge_core import cli
from forge_core.errors import ExitCode
from forge_core.run.process import hard_exit


def main() -> int:
    """The process of a command. Functions that are registered with ``atexit`` are called; but torch is not unloaded."""
    code: object = None

    def leave_torch() -> None:
        if isinstance(code, int) and "torch" in sys.modules:
            hard_exit(code)

    atexit.register(leave_torch)  # the first that is registered is the last that is called
    try:
        code = ended = cli.main()
    except SystemExit as left:
        code = left.code
        raise
    if ended == ExitCode.LOST_PEER:
        leave_torch()  # what others have registered may wait for ranks that are gone
    return ended


if __name__ == "__main__":
    sys.exit(main())
