"""The contracts of components, one file a kind.

Each file has the kind's protocol (what the factory returns) and the factory's own signature as ``…Factory``. Every
factory takes its config first and everything else by keyword; new keywords arrive with a minor version of the
contract, so a factory that wants to outlive one ends its signature with ``**_``.
"""
