"""Video files: which frames are read, and how many are decoded for it."""

from __future__ import annotations

import csv
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_plugins_vlm.data.references import PictureFile, UnreadableError
from forge_plugins_vlm.data.video import decoded, frames_of, open_images

av = pytest.importorskip("av")

N_FRAMES = 48
FILES = (
    ("a.mp4", "mpeg4", 8, 0),
    ("a.mkv", "mpeg4", 12, 0),
    ("a.avi", "mpeg4", 5, 0),
    ("b.mp4", "libx264", 10, 2),  # frames that are stored in another order
    ("b.ts", "libx264", 6, 0),
    ("b.mkv", "libx264", 250, 3),  # one keyframe for all
    ("a.webm", "libvpx-vp9", 16, 0),
)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes a file of moving bars, of one frame in so many a keyframe, and returns its path."""
    folder = tmp_path_factory.mktemp("videos")

    def write(name, codec, every, between, n_frames=N_FRAMES, times=None):
        path = folder / name
        if not path.exists():
            with av.open(str(path), "w") as container:
                options = {"g": str(every), "bf": str(between)}
                stream = container.add_stream(codec, rate=10, options=options)
                stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
                for number in range(n_frames):
                    pixels = np.full((48, 64, 3), 60, np.uint8)
                    pixels[:, number % 48 : number % 48 + 9] = (200, 5 * number, 90)
                    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                    frame.pts = number if times is None else times[number]
                    container.mux(stream.encode(frame))
                container.mux(stream.encode())
        return path

    return write


@pytest.fixture
def count_decoded(monkeypatch):
    """How many frames decoders have given since."""
    counts = []
    real = av.open

    class Counting:
        def __init__(self, container):
            self._container = container

        def __getattr__(self, name):
            return getattr(self._container, name)

        def __enter__(self):
            self._container.__enter__()
            return self

        def __exit__(self, *error):
            return self._container.__exit__(*error)

        def decode(self, stream):
            for frame in self._container.decode(stream):
                counts.append(frame.pts)
                yield frame

    monkeypatch.setattr(av, "open", lambda path, *mode: Counting(real(path)) if not mode else real(path, *mode))
    return counts


def every_frame(path):
    with av.open(str(path)) as container:
        return [np.asarray(frame.to_image()) for frame in container.decode(container.streams.video[0])]


def config(rate=1.0, least=1, most=8):
    return SimpleNamespace(frames_per_second=rate, min_frames=least, max_frames=most)


@pytest.mark.parametrize(("name", "codec", "every", "between"), FILES, ids=[f"{one[0]}-{one[1]}" for one in FILES])
def test_frames_are_those_of_a_file_that_is_decoded_from_its_beginning(
    write, count_decoded, name, codec, every, between
):
    path = write(name, codec, every, between)
    whole = every_frame(path)
    assert len(whole) == N_FRAMES
    count_decoded.clear()

    for most in (1, 2, 5, 48, 100):
        frames = frames_of(path, {}, "here", config(rate=10.0, most=most))
        assert not count_decoded, "they are chosen without decoding"
        wanted = [round(one) for one in np.linspace(0, N_FRAMES - 1, min(most, N_FRAMES))]
        images = [np.asarray(one) for one in open_images(frames)]
        assert [frame.size() for frame in frames] == [(48, 64)] * len(wanted)
        assert all(np.array_equal(image, whole[at]) for image, at in zip(images, wanted, strict=True))
        n_decoded = len(count_decoded)
        count_decoded.clear()
        if name == "b.ts":  # whose seeks are guesses
            assert n_decoded <= 2 * N_FRAMES
            continue
        keyframes = [max(key for key in keyframes_of(path) if key <= at) for at in wanted]
        last = dict(zip(keyframes, wanted, strict=True))
        assert n_decoded <= sum(min(at - key + 2, N_FRAMES - key) for key, at in last.items())
        assert n_decoded <= N_FRAMES + len(last), "no frame twice, but for one behind each group"


def keyframes_of(path):
    """Which frames can be decoded by themselves."""
    with av.open(str(path)) as container:
        packets = [one for one in container.demux(container.streams.video[0]) if one.pts is not None]
    ordered = sorted(packet.pts for packet in packets)
    return [ordered.index(packet.pts) for packet in packets if packet.is_keyframe]


def test_frames_of_a_sample_are_decoded_together(write, count_decoded, tmp_path, open_source):
    path = write("b.mkv", "libx264", 250, 3)
    content = [{"type": "video", "video": str(path)}]
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record), encoding="utf-8")
    source = open_source(path=str(tmp_path / "a.jsonl"), frames_per_second=1.0, max_frames=5)
    count_decoded.clear()

    source.read(np.arange(1))

    assert len(count_decoded) == N_FRAMES  # and not 1 + 13 + 25 + 36 + 48


def test_frames_are_at_equal_distances_in_time_where_their_rate_changes(write):
    times = [*range(20), *range(20, 400, 20)]  # 20 frames of a tenth of a second, and 19 of two seconds
    path = write("changing.mkv", "mpeg4", 6, 0, n_frames=len(times), times=times)
    frames = frames_of(path, {}, "here", config(rate=100.0, most=3))
    whole = every_frame(path)

    assert [round(frame.seconds, 2) for frame in frames] == [0, 19, 38]
    shown = [np.asarray(one) for one in open_images(frames)]
    nearest = [0, times.index(180), times.index(380)]  # 190 lies between two, of which the first is still shown
    assert all(np.array_equal(image, whole[at]) for image, at in zip(shown, nearest, strict=True))


def test_a_frame_is_read_alone_and_out_of_order(write):
    path = write("a.mkv", "mpeg4", 12, 0)
    frames = frames_of(path, {}, "here", config(rate=1.0, most=4))
    together = [np.asarray(one) for one in open_images(frames)]

    for frame, image in zip(frames, together, strict=True):
        assert np.array_equal(np.asarray(frame.open()), image)
    turned = [np.asarray(one) for one in open_images([*frames[::-1], frames[0]])]
    assert all(np.array_equal(*pair) for pair in zip(turned, [*together[::-1], together[0]], strict=True))


@pytest.fixture
def webvid(write, tmp_path):
    """Writes partitions and videos as WebVid has them, and returns the keys that read those of a split."""
    video = write("a.mp4", "mpeg4", 8, 0)
    captions = {"1066674784": "a red circle", "1066674": "a blue circle , top", "27": "a green square"}
    for split, nested in (("train", True), ("val", False)):
        partitions = tmp_path / f"raw/webvid-10M/data/{split}/partitions"
        partitions.mkdir(parents=True)
        for number, (key, caption) in enumerate(captions.items()):
            lines = [["videoid", "contentUrl", "duration", "page_dir", "name"], [key, "https://", "PT5S", "1", caption]]
            with (partitions / f"000{number}.csv").open("w", newline="", encoding="utf-8") as handle:
                csv.writer(handle).writerows(lines)
            folder = tmp_path / f"raw/videos/{split}" / (f"{key[:2]}/{key[:4]}/{key[:6]}" if nested else "")
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(video, folder / f"{key}.mp4")

    def keys(split):
        partitions = str(tmp_path / f"raw/webvid-10M/data/{split}/partitions")
        videos = str(tmp_path / f"raw/videos/{split}")
        return {"path": partitions, "images": videos, "format": "webvid", "max_frames": 2, "seq_len": 12}

    return keys


@pytest.mark.parametrize("split", ["train", "val"])
def test_videos_of_webvid_are_found_in_folders_by_id_or_beside_each_other(webvid, write, tmp_path, open_source, split):
    video = write("a.mp4", "mpeg4", 8, 0)
    captions = ["a red circle", "a blue circle , top", "a green square"]
    records = [{"video": str(video), "caption": caption} for caption in captions]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    keys = {"format": "captions", "video_field": "video", "max_frames": 2, "seq_len": 12}
    expected = open_source(path=str(tmp_path / "a.jsonl"), **keys).read(np.arange(3))

    found = open_source(**webvid(split)).read(np.arange(3))

    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert len(open_source(**webvid(split), max_rows=2)) == 2
    number = {"videoid": 27, "name": "a green square"}  # as other stores than CSV have it
    (tmp_path / "numbers.jsonl").write_text(json.dumps(number), encoding="utf-8")
    assert len(open_source(**webvid(split) | {"path": str(tmp_path / "numbers.jsonl")})) == 1


def test_videos_of_webvid_that_are_not_there_are_refused_by_place_or_counted(webvid, tmp_path, open_source):
    (tmp_path / "raw/videos/train/10/1066/106667/1066674784.mp4").unlink()

    with pytest.raises(
        ConfigError, match=r"row 1 of .*0000.csv: the video .*106667/1066674784.mp4 cannot be read: No such"
    ):
        open_source(**webvid("train"))
    source = open_source(**webvid("train"), on_error="skip")

    assert source.counts == {"conversations": 3, "cut": 0, "skipped": 0, "unreadable": 1}
    assert len(source) == 2


def test_a_row_of_webvid_without_its_columns_is_refused(webvid, tmp_path, open_source):
    (tmp_path / "raw/webvid-10M/data/train/partitions/0000.csv").write_text("videoid,caption\n1,a\n", encoding="utf-8")

    with pytest.raises(ConfigError, match=r"row 1 of .*0000.csv has no 'name'; its keys are videoid, caption"):
        open_source(**webvid("train"))


def test_a_damaged_file_names_the_frame_that_cannot_be_read(write, tmp_path):
    content = write("a.avi", "mpeg4", 5, 0).read_bytes()
    path = tmp_path / "a.avi"
    path.write_bytes(content)
    frames = frames_of(path, {}, "here", config(rate=1.0, most=3))
    path.write_bytes(content[:200])

    with pytest.raises(UnreadableError, match=r"the video frame at 0.00 s of .*a.avi cannot be read"):
        [*open_images(frames)]


def test_a_file_that_is_no_video_is_refused_in_words(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"nothing")
    frames = frames_of(tmp_path / "a.mp4", {}, "here", config(rate=1.0, most=3))

    with pytest.raises(UnreadableError, match=r"a.mp4 cannot be read: Invalid data found when processing input$"):
        [*open_images(frames)]


def test_a_file_without_timestamps_says_what_to_do(write, tmp_path, open_source):
    path = write("a.h264", "libx264", 12, 0)
    record = {"messages": [{"role": "user", "content": [{"type": "video", "video": str(path)}]},
                           {"role": "assistant", "content": "yes"}]}  # fmt: skip
    (tmp_path / "a.jsonl").write_text(json.dumps(record), encoding="utf-8")

    with pytest.raises(ConfigError, match=r"a.h264 cannot be read: its frames have no timestamps; put it into"):
        open_source(path=str(tmp_path / "a.jsonl"))


def test_decoding_begins_anew_where_a_seek_lands_behind(write, monkeypatch):
    path = write("a.mp4", "mpeg4", 8, 0)
    whole = every_frame(path)
    with av.open(str(path)) as container:
        unit = round(0.1 / float(container.streams.video[0].time_base))
    monkeypatch.setattr("forge_plugins_vlm.data.video._keyframe", lambda container, time: None)

    found = [np.asarray(image) for _, image in decoded(PictureFile(path, path.name), [3 * unit, 20 * unit])]

    assert np.array_equal(found[0], whole[3])
    assert np.array_equal(found[1], whole[20])
