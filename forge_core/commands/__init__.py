"""The core's own sub-commands of ``forge``, one a module. ``forge --help`` lists them and imports none."""
