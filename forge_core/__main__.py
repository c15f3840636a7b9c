"""``forge``, and ``python -m forge_core``."""

import atexit
import os
import sys

from forge_core import cli
from forge_core.errors import ExitCode


def main() -> int:
    """The process of a command. Whatever has been registered to be done at its end is done; but torch is not unloaded:
    its threads sometimes wait, or abort the process, when a process group has been given up for lost."""
    code: object = None

    def leave() -> None:
        if isinstance(code, int) and "torch" in sys.modules:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    atexit.register(leave)  # the first that is registered is the last that is called
    try:
        code = ended = cli.main()
    except SystemExit as left:
        code = left.code
        raise
    if ended == ExitCode.LOST_PEER:
        leave()  # what others have registered may wait for ranks that are gone
    return ended


if __name__ == "__main__":
    sys.exit(main())
