"""What ``forge doctor`` looks at, one file a subject. Plugins describe theirs as these are, with ``forge_checks``."""

from __future__ import annotations

from forge_core.component import Check

CORE_CHECKS = (
    Check(name="software", summary="Python, torch, CUDA, NCCL", run="forge_core.doctor.software:look"),
    Check(name="gpus", summary="driver, memory, health, how they reach each other", run="forge_core.doctor.gpus:look"),
    Check(name="gloo", summary="two processes add a tensor", run="forge_core.doctor.gloo:look"),
    Check(name="network", summary="names, interfaces, what launchers set", run="forge_core.doctor.network:look"),
    Check(name="storage", summary="space, speed, what the file system keeps to", run="forge_core.doctor.storage:look"),
    Check(name="plugins", summary="broken, incompatible, in conflict", run="forge_core.doctor.plugins:look"),
)
"""In the order of the report."""
