"""The data source follows its contract."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from forge_testing.data_source import DataSourceConformance


class ImageTextConformance(DataSourceConformance):
    component = "forge-plugins-vlm:image_text"
    seq_len = 24
    more: ClassVar[dict] = {}

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        lines = []
        for number in range(40):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
            lines.append(json.dumps({"image": str(tmp_path / f"{number}.png"), "caption": f"{number * 7919}"}))
        (tmp_path / "captions.jsonl").write_text("\n".join(lines), encoding="utf-8")
        self.config = {
            "path": str(tmp_path / "captions.jsonl"),
            "format": "captions",
            "processor": {"name": "square", "size": 8},
            "token_grid": [1, 2],
            "validation": 0.2,
            "max_images": 1,
            **self.more,
        }


class TestImageText(ImageTextConformance):
    pass


class TestPacked(ImageTextConformance):
    more: ClassVar[dict] = {"packing": True}


class TestStreaming(ImageTextConformance):
    component = "forge-plugins-vlm:image_text_streaming"
    holds_out = False

    @pytest.fixture(autouse=True)
    def streamed(self, files):
        pytest.importorskip("datasets")
        own = {"streams": 4, "shuffle_buffer": 5, **self.more}
        dataset = {"path": "json", "data_files": self.config.pop("path")}
        del self.config["validation"]
        self.config |= {**own, "dataset": dataset}


class TestPackedStreaming(TestStreaming):
    more: ClassVar[dict] = {"packing": True, "shuffle_buffer": 8}


class TestPadded(ImageTextConformance):
    more: ClassVar[dict] = {"processor": {"name": "naflex", "size": 8, "patch": 4, "max_patches": 4}}
