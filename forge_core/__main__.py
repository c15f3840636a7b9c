"""``forge``, and ``python -m forge_core``."""

import os
import sys

from forge_core import cli
from forge_core.errors import ExitCode


def main() -> int:
    """The process of a command."""
    code = cli.main()
    if code == ExitCode.LOST_PEER:
        # everything is closed; torch, as it is unloaded, would wait for collectives of which no end comes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
