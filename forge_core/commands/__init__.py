"""The core's own sub-commands, described as a plugin's are: ``forge --help`` lists them and imports none.

The other modules of this folder hold one command each.
"""

from __future__ import annotations

from forge_core.component import Command

CORE_COMMANDS = (
    Command(name="run", summary="train what a TOML file describes", run="forge_core.commands.run:run"),
    Command(
        name="validate",
        summary="check a configuration and report every problem at once",
        run="forge_core.commands.validate:validate",
    ),
    Command(
        name="config",
        summary="print the resolved configuration, its JSON Schema, or the difference of two",
        run="forge_core.commands.config:config",
    ),
    Command(
        name="plugins",
        summary="list what is installed, and what is broken and why",
        run="forge_core.commands.plugins:plugins",
    ),
    Command(
        name="checkpoint",
        summary="list, show, verify and prune the checkpoints of a run",
        run="forge_core.commands.checkpoint:checkpoint",
    ),
)
"""In the order in which they are listed. A plugin cannot replace one."""
