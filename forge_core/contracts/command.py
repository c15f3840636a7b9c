"""Commands: sub-commands of ``forge``.

A ``Command`` names an object of type ``click.Command`` (also a ``click.Group``) by import path. Its module is imported
when the command is called and not before, so it may import torch; ``forge --help`` shows the summary from the
description. Raise ``forge_core.errors.ConfigError`` for what the user can mend: it is printed as a sentence, and the
exit code is 2.
"""
