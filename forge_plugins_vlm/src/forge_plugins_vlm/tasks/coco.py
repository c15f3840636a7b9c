"""Captions of COCO in the splits of Karpathy (Karpathy & Fei-Fei 2015, arXiv 1412.2306)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_core.errors import ConfigError
from forge_plugins_vlm.tasks.task_folder import TaskFolder


def write_coco(annotations: Path, images: Path, out: Path, *, splits: Sequence[str], samples: int) -> dict[str, int]:
    """Write a file for each split: a line for each caption, with its image, all captions of that, and its id.

    Args:
        annotations: ``dataset_coco.json``.
        images: the folder with ``train2014`` and ``val2014``.
        splits: which to write; none: all.
        samples: the most images of a split, the first ones; 0: all.

    Returns:
        How many images each has.

    Raises:
        ConfigError: the file is another one, or has no such split; an image is not there; ``out`` has something in it.
    """
    found = _by_split(annotations)
    for split in splits:
        if split not in found:
            raise ConfigError(f"{annotations} has no split {split!r}; it has {', '.join(found)}")
    chosen = {split: found[split][: samples or None] for split in splits or found}
    missing = [one["image"] for entries in chosen.values() for one in entries if not (images / one["image"]).is_file()]
    if missing:
        raise ConfigError(f"{len(missing)} images are not in {images}, of which the first is {missing[0]}")
    folder = TaskFolder(out)
    for split, entries in chosen.items():
        folder.messages(split, ({"caption": caption, **one} for one in entries for caption in one["references"]))
    return {split: len(entries) for split, entries in chosen.items()}


def _by_split(annotations: Path) -> Mapping[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for image in json.loads(annotations.read_text(encoding="utf-8"))["images"]:
            found.setdefault(image["split"], []).append({
                "image": f"{image['filepath']}/{image['filename']}",
                "image_id": image["cocoid"],
                "references": [sentence["raw"].strip() for sentence in image["sentences"]],
            })  # fmt: skip
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {annotations}: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{annotations} is no dataset_coco.json of Karpathy: {error}") from error
    return found
