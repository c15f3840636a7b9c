"""Requirements on installed distributions, such as ``"acme-routers>=0.3,<0.4"``, in the versions of PEP 440."""

from __future__ import annotations

from packaging.requirements import InvalidRequirement, Requirement

from forge_core.registry.entry_points import installed


def unmet(requirement: str) -> str | None:
    """Say in a sentence why the installed distribution does not meet ``requirement``, or that this is not a name with
    version clauses; ``None`` if it does."""
    try:
        asked = Requirement(requirement)
    except InvalidRequirement:
        asked = None
    if asked is None or asked.extras or asked.marker or asked.url:
        return f"'{requirement}' is not a requirement such as \"acme-routers>=0.3,<0.4\""
    install = f"pip install '{requirement}'"
    if (version := installed(asked.name)) is None:
        return f"{asked.name} is not installed: {install}"
    if asked.specifier.contains(version, prereleases=True):
        return None
    return f"asks for {requirement.strip()}, and {asked.name} {version} is installed: {install}"
