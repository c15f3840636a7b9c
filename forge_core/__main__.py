"""``forge``, and ``python -m forge_core``."""

import sys

from forge_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
