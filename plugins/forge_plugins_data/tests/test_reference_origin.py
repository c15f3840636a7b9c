"""The checkpoint that a reference was made with, and those that a run begins with."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from forge_plugins_data.preference_config import PreferencePairsConfig
from forge_plugins_data.preference_reference import digest_of, write_reference
from forge_plugins_data.reference_origin import ReferenceOrigin


@pytest.fixture
def said(tmp_path):
    """What is said of a run that begins with some folders, of which ``own`` has made the reference."""
    for name in ("own", "moved", "another", "of_huggingface"):
        (tmp_path / name).mkdir()
        if name != "of_huggingface":
            (tmp_path / name / "manifest.json").write_text("two" if name == "another" else "one")
    made = {"path": "own", "step": 3, "digest": digest_of(tmp_path / "own")}
    write_reference(tmp_path / "r.npz", [b"k" * 16], np.zeros((1, 2)), "tokenizer", made)

    def said(loaded, rank=0):
        (tmp_path / "loaded.json").write_text(json.dumps(loaded).replace("FOLDER", str(tmp_path)))
        lines = []
        config = PreferencePairsConfig(path="pairs.jsonl", tokenizer=None, reference=str(tmp_path / "r.npz"))
        job = SimpleNamespace(data=SimpleNamespace(config=config))
        run = SimpleNamespace(job=job, rank=rank, run_dir=tmp_path, log=lines.append)
        ReferenceOrigin().step_start(run, 1)
        return len(lines)

    return said


@pytest.mark.parametrize(
    ("sources", "lines"),
    [(["own"], 0), (["moved"], 0), (["another"], 1), (["another", "own"], 0), (["of_huggingface"], 0)],
)
def test_it_is_said_where_none_of_them_is_the_one(said, sources, lines):
    """A folder of another format is no checkpoint, and cannot be told from one that was converted."""
    loads = [{"source": f"FOLDER/{name}"} for name in sources]

    assert said(loads[0] if len(loads) == 1 else {"loads": loads}) == lines
    assert said({"loads": loads}, rank=1) == 0
