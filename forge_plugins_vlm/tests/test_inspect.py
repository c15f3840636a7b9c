"""``forge vlm inspect``: the page shows what a step sees, and nothing of the data gets out of its text."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from forge_core.cli import main

JOB = """
[model]
name = "transformer"
dim = 16
n_layers = 1
n_heads = 2
[data]
name = "image_text"
path = "{path}"
token_grid = [1, 2]
processor = {{name = "square", size = 8}}
shuffle = false
[train]
steps = 5
batch_size = 2
seq_len = 96
[optimizer]
name = "adamw"
lr = 1e-3
[eval]
interval = 0
"""
HOSTILE = "<script>alert('x')</script>&amp;"


class Reader(HTMLParser):
    """Tags, and the texts of spans by their class."""

    def __init__(self):
        super().__init__()
        self.tags, self.spans, self._kind = [], [], None

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._kind = dict(attrs).get("class") if tag == "span" else None

    def handle_data(self, data):
        if self._kind:
            self.spans.append((self._kind, data))

    def handle_endtag(self, tag):
        self._kind = None


@pytest.fixture
def job(tmp_path, picture):
    lines = []
    for number in range(4):
        content = [
            {"type": "image", "image": picture(f"{number}.png", number)},
            {"type": "text", "text": " " + HOSTILE},
        ]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": f"{HOSTILE} {number}"}]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(path=tmp_path / "a.jsonl"), encoding="utf-8")
    return path


def read(page):
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


def test_a_page_has_the_images_and_the_masked_text_of_its_step(job, tmp_path):
    assert main(["vlm", "inspect", str(job), "--step", "2", "--out", str(tmp_path / "new/page.html")]) == 0

    page = tmp_path / "new/page.html"
    spans = read(page).spans[3:]  # behind the legend
    assert spans == [
        ("image", "[tile 0: 2 positions]"),
        ("prompt", f" {HOSTILE} "),
        ("learned", f"{HOSTILE} 2 ⟨end⟩"),
        ("image", "[tile 0: 2 positions]"),
        ("prompt", f" {HOSTILE} "),
        ("learned", f"{HOSTILE} 3 ⟨end⟩"),
    ]
    images = re.findall(r"data:image/png;base64,([^\"]+)", page.read_text(encoding="utf-8"))
    for number, content in zip((2, 3), images, strict=True):
        found = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))
        assert np.array_equal(found, np.asarray(Image.open(tmp_path / f"{number}.png")))


def test_a_page_is_called_by_its_job_and_step(job, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert main(["vlm", "inspect", str(job), "--step", "2"]) == 0

    said = capsys.readouterr().out
    assert f"{job.stem}_step_2.html: " in said
    assert re.search(r"^[\d,]+ conversations, 0 cut, 0 skipped, 0 unreadable$", said, re.MULTILINE)
    assert read(tmp_path / f"{job.stem}_step_2.html").spans


def test_what_data_say_is_text_on_the_page(job, tmp_path):
    main(["vlm", "inspect", str(job), "--out", str(tmp_path / "page.html")])

    assert "script" not in read(tmp_path / "page.html").tags
    assert "http" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_packed_documents_and_targets_alone_are_shown(job, tmp_path):
    out = tmp_path / "page.html"
    main(["vlm", "inspect", str(job), "--out", str(out), "data.packing=true", "--train.seq_len=168"])
    packed = read(out)
    # image, prompt, answer and end of one conversation, of which the end is a target alone
    whole = 2 + len(f" {HOSTILE} ") + len(f"{HOSTILE} 0")
    main(["vlm", "inspect", str(job), "--out", str(out), f"train.seq_len={whole}"])
    alone = read(out)

    assert [words for kind, words in packed.spans[3:] if kind == "image"][:2] == [
        "[tile 0: 2 positions]",
        "[tile 1: 2 positions]",
    ]
    assert [words for kind, words in alone.spans[3:] if kind == "learned"] == [
        f"{HOSTILE} 0",
        "⟨end⟩",
        f"{HOSTILE} 1",
        "⟨end⟩",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "page.htm"], "must end with .html"),
        (["--out", "page.html", "--data.name=text_files", "data.pattern=a"], "data"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments, words, job, capsys):
    assert main(["vlm", "inspect", str(job), *arguments]) == 2
    assert words in capsys.readouterr().err
