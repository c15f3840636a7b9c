"""The plugins: those that do not load, and names that several of them have."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.contracts.check import CheckContext, Finding


def look(surroundings: CheckContext) -> Iterator[Finding]:
    """Same as ``forge plugins``, which says more."""
    catalog = surroundings.catalog
    fine = [plugin for plugin in catalog.plugins if plugin.status == "ok"]
    if fine:
        yield Finding("plugins", "fine", ", ".join(str(plugin) for plugin in fine))
    else:
        yield Finding("plugins", "wrong", "none is installed", "install some; `forge validate` says which a job needs")
    for plugin in catalog.plugins:
        if plugin.status in ("broken", "incompatible"):
            advice = "`forge plugins --debug` shows where; upgrade it, or switch it off with plugins.disable"
            yield Finding(plugin.distribution, "wrong", f"{plugin.version} is {plugin.status}: {plugin.reason}", advice)
        elif plugin.heavy:
            advice = "tell its authors: a plugin module imports nothing large"
            found = f"importing it imports {', '.join(plugin.heavy)}, for which every command waits"
            yield Finding(plugin.distribution, "warning", found, advice)
        elif plugin.is_slow:
            found = f"importing it takes {plugin.import_seconds:.1f} s, for which every command waits"
            yield Finding(plugin.distribution, "warning", found, "tell its authors: a plugin module only describes")
    for conflict in catalog.conflicts():
        found, _, advice = str(conflict).partition("; ")
        yield Finding("names", "warning", found, advice)
