"""A mirror from a distribution of its own: by name, and blamed by name."""

from __future__ import annotations

import shutil

import pytest

from forge_core.checkpoint.store import CheckpointStore
from forge_core.cli import main

PLUGIN = """
    from forge_core.api import Component, hookimpl

    FORGE_API = "1.0"

    @hookimpl
    def forge_checkpoint_mirrors():
        yield Component(
            name="shelf", summary="a folder", factory="acme_shelf.mirror:Shelf", config="acme_shelf.config:C"
        )
"""
CONFIG = """
    import attrs

    @attrs.frozen
    class C:
        folder: str
        breaks: bool = False
"""
MIRROR = """
    import shutil
    from pathlib import Path

    from forge_core.checkpoint.manifest import read_manifest
    from forge_core.checkpoint.store import CheckpointStore
    from forge_core.contracts.checkpoint_mirror import CheckpointMirror

    class Shelf(CheckpointMirror):
        def __init__(self, config, /, *, context):
            self._config = config
            self._store = CheckpointStore(Path(config.folder))
            self.place = config.folder

        def available(self):
            return {step: read_manifest(self._store.folder(step)) for step in self._store.steps()}

        def fetch(self, step, folder):
            shutil.copytree(self._store.folder(step), folder)

        def begin(self, start):
            self._store.path.mkdir(parents=True, exist_ok=True)

        def saved(self, path):
            if self._config.breaks:
                raise OSError("the shelf is full")
            shutil.copytree(path, self._store.path / path.name)
"""


@pytest.fixture
def shelf(make_distribution, tmp_path):
    files = {"acme_shelf/plugin.py": PLUGIN, "acme_shelf/config.py": CONFIG, "acme_shelf/mirror.py": MIRROR}
    make_distribution("acme-shelf", files=files)
    return ["checkpoint.mirror.name=shelf", f"checkpoint.mirror.folder={tmp_path / 'shelf'}", "checkpoint.interval=5"]


def test_a_run_is_mirrored_and_continued_from_there(tiny, tmp_path, shelf, training_values):
    whole = training_values(tiny.completed("run.name=whole"))

    tiny.completed(*shelf, "train.steps=5", "scheduler.warmup_steps=2")
    assert CheckpointStore(tmp_path / "shelf").steps() == [5]
    shutil.rmtree(tiny.path())
    assert main(["run", str(tiny.config), *shelf]) == 0

    assert CheckpointStore(tmp_path / "shelf").steps() == [5, 10]
    assert len(training_values(tiny.metrics())) == len(whole) - 5


@pytest.mark.parametrize(("on_failure", "code"), [("stop", 1), ("continue", 0)])
def test_one_that_raises_is_named_and_obeys_what_is_to_follow(tiny, shelf, capsys, on_failure, code):
    settings = [*shelf, "checkpoint.mirror.breaks=true", f"checkpoint.on_failure={on_failure}"]

    assert main(["run", str(tiny.config), *settings]) == code

    said = "".join(capsys.readouterr())
    assert "the shelf is full" in said
    assert "acme-shelf" in said


def test_a_name_that_nothing_has_is_explained(tiny, shelf, capsys):
    assert main(["validate", str(tiny.config), *shelf, "checkpoint.mirror.name=shelve"]) == 2

    assert "Did you mean 'shelf'?" in capsys.readouterr().err


def test_without_the_package_the_sentence_says_what_to_install(tiny, capsys):
    disabled = ["--disable-plugin", "forge-plugins-mirror"]

    assert main([*disabled, "validate", str(tiny.config), "checkpoint.mirror=/far"]) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert "'fsspec' is in forge-plugins-mirror, which was not imported" in said
