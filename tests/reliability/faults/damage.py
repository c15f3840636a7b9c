"""A checkpoint changed by a disk, or by somebody who knows its format."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from torch.distributed.checkpoint.metadata import Metadata

from forge_core.checkpoint.manifest import FILE_NAME, describe_files, read_manifest, write_manifest


def flip_bit(file: Path, bit: int) -> None:
    """Bit 0 is the lowest of the first byte."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def sign(folder: Path) -> None:
    """Make the manifest fit what is there now: its digests keep accidents out, not people."""
    manifest = read_manifest(folder)
    files = [folder / name for name in manifest.files]
    write_manifest(folder, attrs.evolve(manifest, files=describe_files(folder, files)))


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change its JSON, and sign it; what ``change`` does may not be what a manifest can say."""
    body = json.loads((folder / FILE_NAME).read_text())
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / FILE_NAME).write_text(json.dumps({**body, "sha256": digest}))


def rewrite_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Change the description of the tensors, and sign it; what ``change`` returns, if anything, is written instead."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))
    sign(folder)
