"""Several mirrors as one: what each of them has, and what fails in one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.checkpoint.manifest import DamagedError, Manifest
from forge_core.config.sections import CheckpointSection
from forge_core.contracts.checkpoint_mirror import CheckpointMirror, MirrorContext
from forge_core.contracts.component_ref import ComponentRef
from forge_core.errors import ConfigError, MirrorError
from forge_plugins_mirror.config import SeveralMirrorsConfig
from forge_plugins_mirror.several import SeveralMirrors

FILES = {name: {"bytes": 1, "xxh3_128": "0" * 32} for name in (".metadata", "state.json", "job.toml")}
WHOLE = Manifest(step=2, tokens=0, mesh={}, versions={}, files=FILES, written="2026-01-01T00:00:00+00:00")
DAMAGED = DamagedError("cut off")


class Kept(CheckpointMirror):
    """In a dictionary. ``fails`` has what its methods raise."""

    def __init__(self, place, listed):
        self.place, self.listed, self.fails, self.calls = place, listed, {}, []
        self.is_cut_off = False

    def _do(self, name):
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def available(self):
        self._do("available")
        return self.listed

    def fetch(self, step, folder):
        self._do("fetch")
        folder.mkdir()
        if self.is_cut_off:
            return "a file is cut off"
        return None if isinstance(self.listed[step], Manifest) else "cut off"

    def begin(self, start):
        self._do("begin")

    def saved(self, path):
        self._do("saved")

    def may_remove(self, steps, sizes):
        return [step for step in steps if step in self.listed]

    def close(self):
        self._do("close")


@pytest.fixture
def three():
    return {
        "a": Kept("here", {2: WHOLE, 4: DAMAGED}),
        "b": Kept("there", {2: WHOLE, 4: WHOLE}),
        "c": Kept("far", {6: WHOLE}),
    }


@pytest.fixture
def said():
    return []


@pytest.fixture
def several(three, said):
    def made(on_failure="continue"):
        context = MirrorContext(
            run_name="run",
            folder=Path("checkpoints"),
            section=CheckpointSection(on_failure=on_failure),
            say=said.append,
            run_on_rank0=lambda work: work(),
        )
        config = SeveralMirrorsConfig(
            mirrors=tuple(
                ComponentRef(kind="checkpoint_mirror", name=name, provider=f"acme-{name}", factory="", config=name)
                for name in three
            )
        )
        return SeveralMirrors(config, context=context, build=lambda use, context: three[use.name])

    return made


def test_it_has_what_any_has_and_reads_the_first_that_is_whole(several, three, tmp_path):
    one = several()

    assert one.place == "here and there and far"
    assert one.available() == {2: WHOLE, 4: WHOLE, 6: WHOLE}
    for step in (2, 4, 6):
        assert one.fetch(step, tmp_path / "to") is None
    assert [mirror.calls.count("fetch") for mirror in three.values()] == [1, 1, 1]
    three["a"].fails["fetch"] = MirrorError("gone")
    assert one.fetch(2, tmp_path / "to") is None
    three["b"].fails["fetch"] = MirrorError("gone, too")
    with pytest.raises(MirrorError, match="gone"):
        one.fetch(2, tmp_path / "to")


def test_what_is_damaged_at_one_comes_from_the_next(several, three, tmp_path):
    """Its listing does not tell. The first has left files in the folder."""
    one = several()
    one.available()
    three["a"].is_cut_off = True

    assert one.fetch(2, tmp_path / "to") is None

    three["b"].is_cut_off = True
    assert one.fetch(2, tmp_path / "to") == "a file is cut off"


def test_one_that_cannot_be_listed_is_left_out_or_ends_the_start(several, three, said):
    three["b"].fails["available"] = MirrorError("b is away")

    assert several().available() == {2: WHOLE, 4: DAMAGED, 6: WHOLE}
    assert said == ["b is away; going by the other mirrors"]
    with pytest.raises(MirrorError, match="b is away"):
        several("stop").available()
    three["a"].listed = three["c"].listed = {}
    with pytest.raises(MirrorError, match="b is away"):
        several().available()


def test_a_checkpoint_may_go_once_all_have_it(several, three):
    one = several()
    one.begin(None)

    assert one.may_remove([2, 4, 6], {}) == []
    three["c"].listed = {2: WHOLE}
    assert one.may_remove([2, 4, 6], {}) == [2]


def test_all_are_asked_before_an_error_of_one_is_raised(several, three):
    one = several()
    three["a"].fails["saved"] = KeyError("x")
    one.begin(None)

    with pytest.raises(MirrorError, match=r"'a' fails: KeyError: 'x'. This is a bug in acme-a\.") as raised:
        one.saved(Path("step_00000002"))

    assert isinstance(raised.value.__cause__, KeyError)
    assert [mirror.calls for mirror in three.values()] == [["begin", "saved"]] * 3


def test_a_refusal_ends_the_start_and_what_has_not_begun_is_not_closed(several, three):
    one = several()
    three["b"].fails["begin"] = ConfigError("no room")

    with pytest.raises(ConfigError, match="no room"):
        one.begin(None)
    one.close()

    assert [mirror.calls for mirror in three.values()] == [["begin", "close"], ["begin", "close"], []]


def test_the_last_job_is_that_of_the_first_which_knows(several, three):
    three["b"].last_job, three["c"].last_job = lambda: "[run]", lambda: "[other]"
    assert several().last_job() == "[run]"

    def away():
        raise MirrorError("a is away")

    three["a"].last_job = away
    assert several().last_job() == "[run]"
    three["b"].last_job = three["c"].last_job = lambda: None
    with pytest.raises(MirrorError, match="a is away"):
        several().last_job()


def test_each_error_has_its_own_cause(several, three):
    one = several()
    three["a"].fails["saved"], three["b"].fails["saved"] = MirrorError("away"), KeyError("x")
    one.begin(None)

    with pytest.raises(MirrorError, match="away") as raised:
        one.saved(Path("step_00000002"))

    assert raised.value.__cause__ is None
