"""A plugin of pytest (``-p forked_ranks``): kits fork their ranks in a session that has no ``conftest.py`` of ours."""

import fork_server
from forge_testing import several_ranks

several_ranks.Popen = fork_server.Popen  # type: ignore[misc]
