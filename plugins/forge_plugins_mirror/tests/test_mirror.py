"""A mirror holds whole checkpoints and nothing else that looks like one, wherever it is."""

import errno
import itertools
import json
import time
from pathlib import Path

import fsspec
import pytest

from faults.objects import Objects
from forge_core.checkpoint.manifest import Manifest, describe_files, write_manifest
from forge_core.checkpoint.store import CheckpointStore
from forge_core.config.sections import CheckpointSection
from forge_core.errors import LeaseLostError, MirrorError
from forge_plugins_mirror.mirror import open_mirror
from forge_plugins_mirror.uploader import Uploader

_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def all_is_well():
    Objects.well()
    yield
    Objects.well()


@pytest.fixture(params=["path", "file", "memory", "objects"])
def url(request, tmp_path):
    far = tmp_path / "far" / "run"
    return {
        "path": str(far),
        "file": f"file://{far}",
        "memory": f"memory://mirror{next(_NUMBERS)}/run",
        "objects": f"objects://{far}",
    }[request.param]


@pytest.fixture
def objects(tmp_path):
    return f"objects://{tmp_path}/far/run"


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def _checkpoint(store, step, text="", metrics=None):
    """Not one that torch could read, which a mirror does not try."""
    folder = store.folder(step)
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes([step]) * 100_000)
    (folder / ".metadata").write_bytes(b"m" * 5000)
    (folder / "state.json").write_text(json.dumps({"step": step, "text": text}))
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    files = describe_files(folder, sorted(path for path in folder.rglob("*") if path.is_file()))
    write_manifest(
        folder, Manifest(step=step, tokens=0, mesh={}, versions={}, files=files, written=_TIME, metrics=metrics or {})
    )
    return folder


_TIME = "2026-01-01T00:00:00+00:00"


def _taken(url, attempt="a1", keeps_until=1 << 60):
    mirror = open_mirror(url)
    mirror.take_over(attempt, "[run]\n", keeps_until)
    return mirror


def _always():
    pass


def _content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_copied_comes_back_bit_for_bit(url, store, tmp_path):
    folder = _checkpoint(store, 5)
    mirror = _taken(url)

    mirror.copy(folder, _always)

    assert [*open_mirror(url).checkpoints()] == [5]
    assert mirror.job_toml() == "[run]\n"
    again = open_mirror(url)
    again.checkpoints()
    assert again.visible_problem(5) is None
    assert again.problem(5) is None
    assert again.fetch(5, tmp_path / "fetched") is None
    assert _content(tmp_path / "fetched") == _content(folder)


def test_before_the_first_run_there_is_nothing(url):
    mirror = open_mirror(url)

    assert mirror.checkpoints() == {}
    assert mirror.job_toml() is None


def test_on_a_path_it_looks_like_the_directory_of_a_run(store, tmp_path):
    _taken(str(tmp_path / "far")).copy(_checkpoint(store, 5), _always)

    looks = CheckpointStore(tmp_path / "far" / "checkpoints")
    assert looks.steps() == [5]
    assert _content(looks.folder(5)) == _content(store.folder(5))
    assert sorted(path.name for path in looks.path.iterdir()) == ["latest", "step_00000005"]


def _damage(url, name, change):
    filesystem, root = fsspec.core.url_to_fs(url)
    (path,) = [path for path in filesystem.find(root) if path.endswith(name)]
    filesystem.pipe_file(path, change(filesystem.cat_file(path)))


@pytest.mark.parametrize(
    ("name", "change", "visible", "said"),
    [
        ("__0_0.distcp", lambda content: content[:-1], True, "__0_0.distcp has 99999 bytes, the manifest says 100000"),
        ("__0_0.distcp", lambda content: b"x" + content[1:], False, "the content of __0_0.distcp is not what was"),
        ("manifest.json", lambda content: content[:-9], True, "manifest.json is not a manifest"),
    ],
)
def test_damage_over_there_is_named_and_not_fetched(url, store, tmp_path, name, change, visible, said):
    mirror = _taken(url)
    mirror.copy(_checkpoint(store, 5), _always)

    _damage(url, name, change)
    mirror.checkpoints()

    assert (mirror.visible_problem(5) is not None) == visible
    assert said in mirror.problem(5)
    assert said in mirror.fetch(5, tmp_path / "fetched")
    assert not (tmp_path / "fetched" / "manifest.json").exists()


def test_a_connection_that_drops_at_any_point_leaves_nothing_that_counts(objects, store):
    """And what had arrived is not sent again."""
    folder = _checkpoint(store, 5)
    mirror = _taken(objects)
    for n_bytes in range(1, 100_000, 9_000):  # the largest file has more
        Objects.bytes_left = n_bytes
        with pytest.raises(MirrorError, match=r"cannot copy step_00000005 .* the other side has hung up"):
            mirror.copy(folder, _always)
        Objects.bytes_left = None
        assert mirror.checkpoints() == {}

    mirror.copy(folder, _always)
    assert [*mirror.checkpoints()] == [5]
    assert mirror.problem(5) is None
    assert Objects.put.count("__0_0.distcp") == 1
    assert Objects.put[-1] == "manifest.json"


def test_what_arrives_with_a_bit_turned_is_not_taken_for_whole(objects, store):
    mirror = _taken(objects)
    Objects.flips = True

    with pytest.raises(MirrorError, match=r"the content of \.metadata is not what was written"):
        mirror.copy(_checkpoint(store, 5), _always)

    assert mirror.checkpoints() == {}
    Objects.flips = False
    mirror.copy(store.folder(5), _always)
    assert [*mirror.checkpoints()] == [5]


def test_one_that_is_damaged_here_is_not_spread(url, store):
    folder = _checkpoint(store, 5)
    (folder / "state.json").write_text("{}")
    mirror = _taken(url)

    with pytest.raises(MirrorError, match=r"state\.json"):
        mirror.copy(folder, _always)

    assert mirror.checkpoints() == {}


def test_an_attempt_that_another_one_has_followed_commits_nothing_and_removes_nothing(url, store):
    old = _taken(url, "a1")
    old.copy(_checkpoint(store, 5), _always)
    new = _taken(url, "b2")

    with pytest.raises(LeaseLostError, match=r"another attempt .* now copies checkpoints to"):
        old.copy(_checkpoint(store, 6), _always)
    with pytest.raises(LeaseLostError):
        old.remove([5])
    with pytest.raises(LeaseLostError):
        old.put_aside(-1)

    assert [*new.checkpoints()] == [5]


def test_two_attempts_that_copy_the_same_step_do_not_write_into_each_others_files(url, store, tmp_path):
    """The old one sleeps in the middle of a copy, and goes on after the new one has finished its own."""
    other = CheckpointStore(tmp_path / "other")
    of_old, of_new = _checkpoint(store, 5, text="old"), _checkpoint(other, 5, text="new")
    old = _taken(url, "a1")
    files = itertools.count()

    def may_commit():
        if next(files) == 2:  # some have been copied, others not
            new = _taken(url, "b2")
            new.copy(of_new, _always)

    with pytest.raises(LeaseLostError):
        old.copy(of_old, may_commit)

    mirror = open_mirror(url)
    assert [*mirror.checkpoints()] == [5]
    assert mirror.fetch(5, tmp_path / "fetched") is None
    assert _content(tmp_path / "fetched") == _content(of_new)


def test_a_folder_that_goes_away_is_not_made_anew_and_is_gone_on_with_once_it_is_back(store, tmp_path):
    """The disk may be unmounted between two checkpoints, or between two files of one."""
    far, away = tmp_path / "far", tmp_path / "away"
    mirror = _taken(str(far / "run"))
    folder = _checkpoint(store, 5)
    files = itertools.count()

    def unmount_at_the_second():
        if next(files) == 1:
            far.rename(away)

    with pytest.raises(MirrorError, match=r"far/run is not there any more, .*; bring it back \(is it mounted\?\)"):
        mirror.copy(folder, unmount_at_the_second)
    with pytest.raises(MirrorError, match="is not there any more"):
        mirror.copy(folder, _always)
    with pytest.raises(MirrorError, match="is not there any more"):
        mirror.put_aside(3)
    assert not far.exists()

    away.rename(far)
    mirror.copy(folder, _always)
    assert [*open_mirror(str(far / "run")).checkpoints()] == [5]


def test_what_was_half_copied_is_collected_by_the_next_attempt(url, store):
    mirror = _taken(url, "a1")
    calls = itertools.count()

    def killed():
        if next(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mirror.copy(_checkpoint(store, 5), killed)
    filesystem, root = fsspec.core.url_to_fs(url)
    assert any("step_00000005" in path for path in filesystem.find(root))

    _taken(url, "b2")

    assert not any("step_00000005" in path for path in filesystem.find(root))


def test_later_ones_than_a_start_are_put_aside_and_not_lost(url, store):
    mirror = _taken(url, "a1")
    for step in (2, 4, 6):
        mirror.copy(_checkpoint(store, step), _always)

    mirror = _taken(url, "b2", keeps_until=4)

    assert [*mirror.checkpoints()] == [2, 4]
    filesystem, root = fsspec.core.url_to_fs(url)
    assert any("step_00000006" in path and path.endswith("__0_0.distcp") for path in filesystem.find(root))


def test_one_of_the_same_step_gives_way_to_the_one_that_is_copied_last(url, store, tmp_path):
    mirror = _taken(url, "a1")
    mirror.copy(_checkpoint(store, 5, text="first"), _always)
    again = CheckpointStore(tmp_path / "again")

    mirror.copy(_checkpoint(again, 5, text="second"), _always)

    mirror.checkpoints()
    assert mirror.fetch(5, tmp_path / "fetched") is None
    assert json.loads((tmp_path / "fetched" / "state.json").read_text())["text"] == "second"


def test_removed_ones_are_gone_for_good(url, store):
    mirror = _taken(url)
    for step in (2, 4):
        mirror.copy(_checkpoint(store, step), _always)

    mirror.remove([2])

    assert [*mirror.checkpoints()] == [4]
    filesystem, root = fsspec.core.url_to_fs(url)
    assert not any("step_00000002" in path for path in filesystem.find(root))


def test_what_an_earlier_attempt_tidies_up_at_the_same_moment_does_not_keep_a_later_one_from_taking_over(
    objects, tmp_path, monkeypatch
):
    """The earlier one is refused only when it looks, and removes or copies until then."""
    unfinished = tmp_path / "far/run/checkpoints/step_00000005-a1-0"
    unfinished.mkdir(parents=True)
    (unfinished / "state.json").write_text("{}")
    remove = Objects.rm

    def removed_meanwhile(self, path, **more):
        remove(self, path, **more)
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(Objects, "rm", removed_meanwhile)

    assert _taken(objects, "b2").job_toml() == "[run]\n"


class TestCopier:
    def _copier(self, store, url, **section):
        return Uploader(
            store,
            open_mirror(url),
            CheckpointSection(**section),
            attempt="a1",
            job_toml="",
            start=-1,
            may_commit=_always,
        )

    def _finished(self, copier):
        deadline = time.monotonic() + 60
        while copier.is_busy:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [(one.step, one.error is None) for one in copier.outcomes()]

    def test_the_newest_is_copied_first_and_then_the_others(self, store, objects):
        for step in (2, 4, 6):
            _checkpoint(store, step)
        copier = self._copier(store, objects)

        copier.start()

        assert self._finished(copier) == [(6, True), (4, True), (2, True)]
        assert copier.needed() == set()
        copier.close()

    def test_what_is_there_already_is_not_copied_again(self, store, objects):
        _checkpoint(store, 2)
        _taken(objects, "old").copy(store.folder(2), _always)
        copier = self._copier(store, objects)

        copier.start()  # from the beginning, so that what was there is aside

        assert self._finished(copier) == [(2, True)]
        copier.close()
        copier = self._copier(store, objects)
        copier._take_over = lambda: _taken(objects, "a1", 2)
        Objects.put.clear()
        copier.start()
        assert self._finished(copier) == []
        assert "__0_0.distcp" not in Objects.put
        copier.close()

    def test_one_that_fails_does_not_keep_the_others_and_is_tried_again_at_the_next_look(self, store, objects):
        for step in (2, 4):
            _checkpoint(store, step)
        (store.folder(4) / "__0_0.distcp").rename(store.path / "away")
        copier = self._copier(store, objects)

        copier.start()
        assert self._finished(copier) == [(4, False), (2, True)]
        assert copier.needed() == {4}

        (store.path / "away").rename(store.folder(4) / "__0_0.distcp")
        copier.look()
        assert self._finished(copier) == [(4, True)]
        copier.close()

    def test_a_mirror_that_cannot_be_taken_over_is_tried_again_at_the_next_look(self, store, objects):
        _checkpoint(store, 2)
        Objects.bytes_left = 0
        copier = self._copier(store, objects)

        with pytest.raises(MirrorError, match=r"checkpoint\.mirror: cannot write to it at objects:"):
            copier.start()
        assert self._finished(copier) == [(2, False)]
        assert copier.needed() == {2}

        Objects.bytes_left = None
        copier.look()
        assert self._finished(copier) == [(2, True)]
        copier.close()

    def test_the_mirror_has_its_own_number_of_newest_and_the_same_others(self, store, objects):
        for step in (2, 4, 6, 8):
            _checkpoint(store, step, metrics={"eval/loss": 10 - step})
        copier = self._copier(store, objects, keep_last=4, mirror_keep_last=1, keep_every=4)
        copier.start()
        assert self._finished(copier) == [(8, True), (4, True)]
        assert copier.needed() == set(), "what would be removed there at once is not waited for"

        _checkpoint(store, 10)
        copier.look()

        assert self._finished(copier) == [(10, True)]
        assert [*open_mirror(objects).checkpoints()] == [4, 8, 10]
        _checkpoint(store, 11)
        copier.look()
        self._finished(copier)
        assert [*open_mirror(objects).checkpoints()] == [4, 8, 11]
        copier.close()

    def test_a_run_that_goes_back_takes_the_later_ones_from_the_mirror_even_while_they_are_copied(self, store, objects):
        for step in (2, 4):
            _checkpoint(store, step)
        copier = self._copier(store, objects)
        copier.start()

        store.put_aside(2)
        copier.put_aside(2)
        _checkpoint(store, 4, text="the second time")
        copier.look()
        self._finished(copier)

        mirror = open_mirror(objects)
        assert [*mirror.checkpoints()] == [2, 4]
        mirror.fetch(4, store.path.parent / "fetched")
        assert json.loads((store.path.parent / "fetched/state.json").read_text())["text"] == "the second time"
        copier.close()


def test_a_file_system_that_cannot_be_written_to_is_said_with_its_url(tmp_path):
    (tmp_path / "far").write_text("a file")

    with pytest.raises(MirrorError, match=r"checkpoint\.mirror: cannot write to it at .*far/run: Not a directory"):
        _taken(str(tmp_path / "far" / "run"))
    assert Path(tmp_path / "far").read_text() == "a file"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTEMPTY])
@pytest.mark.parametrize("call", ["mv", "rm"])
def test_a_start_takes_over_while_an_earlier_attempt_still_writes(store, objects, monkeypatch, call, number):
    """A folder that another attempt copies into cannot be emptied, and a manifest that it removes cannot be moved."""
    for step in (2, 4):
        _checkpoint(store, step)
        _taken(objects, "0" * 12).copy(store.folder(step), _always)
    whole = open_mirror(objects)
    (_, folder) = next((step, folder) for step, (folder, _) in whole._committed().items() if step == 2)
    whole._filesystem.rm_file(f"{folder}/manifest.json")  # half a copy
    failed = []

    def fails(self, path, *more, **options):
        failed.append(path)
        raise OSError(number, "it has changed")

    monkeypatch.setattr(Objects, call, fails)
    mirror = _taken(objects, "1" * 12, keeps_until=3)

    assert failed != []
    assert json.loads(mirror._filesystem.cat_file(f"{mirror._root}/writer.json"))["attempt"] == "1" * 12


def test_a_mirror_that_cannot_be_cleared_up_is_an_error(store, objects, monkeypatch):
    _checkpoint(store, 2)
    _taken(objects, "0" * 12).copy(store.folder(2), _always)

    def fails(self, *given, **options):
        raise PermissionError(errno.EACCES, "not yours")

    monkeypatch.setattr(Objects, "mv", fails)

    with pytest.raises(MirrorError, match="not yours"):
        _taken(objects, "1" * 12, keeps_until=1)
