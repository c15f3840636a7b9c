"""A plugin of pytest (``-p forked_ranks``): kits fork their ranks in a session that has no ``conftest.py`` of ours, and
that may be forked itself. What they start to see what it imports begins with nothing."""

import subprocess

import fork_server
from forge_testing import several_ranks

several_ranks.Popen = fork_server.Popen  # type: ignore[misc]
subprocess.Popen = fork_server.Subprocess  # type: ignore[misc]
