"""The lines that docs/image-data.md shows are read in their formats."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forge_core.config.builder import ComponentBuilder
from forge_core.registry.discovery import discover
from forge_plugins_vlm.data.formats import sample_of
from forge_plugins_vlm.data.rows import Row
from forge_plugins_vlm.data.sample import ASSISTANT

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "image-data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^`(\w+)`[,:][^`](?:(?!^```).)*?^```json\n(.*?)^```$", PAGE, re.M | re.S)
ANSWERS = {
    "messages": ["A circle."],
    "llava": ["A circle."],
    "captions": ["a red circle"],
    "turns": ["The first."],
    "interleaved": ["Here is", "a circle."],
    "webvid": ["A circle rolls."],
}


def test_each_format_has_a_line():
    assert [name for name, _ in EXAMPLES] == list(ANSWERS)


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_line_is_read(name, line):
    table = {"name": "image_text", "path": "a.jsonl", "format": name, "token_grid": [1, 1]}
    config = ComponentBuilder(discover(())).resolve("data_source", table).config

    sample = sample_of(Row(json.loads(line), "the page", "page:1", Path), config)

    answers = [
        part for one in sample.messages if one.role == ASSISTANT for part in one.content if isinstance(part, str)
    ]
    assert answers == ANSWERS[name]
    assert sample.references[0].where == {"webvid": "10/1066/106667/1066674784.mp4"}.get(name, "a.png")
