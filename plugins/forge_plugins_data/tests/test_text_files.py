"""The source ``text_files``."""

import gzip
import os
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tokenizers

from forge_core.data.loader import BatchLoader
from forge_core.data.stream import SampleStream
from forge_core.errors import ConfigError
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.config import TextFilesConfig
from forge_plugins_data.file_selection import SelectedFile, select_files
from forge_plugins_data.prepare import prepare
from forge_plugins_data.progress import Progress
from forge_plugins_data.text_files import open_text_files, split_files
from forge_plugins_data.tokenizer_config import BytesConfig


@pytest.fixture
def open_text(build, use_tokenizer):
    def open_text(path, split="train", seq_len=8, tokenizer="bytes", **keys):
        if isinstance(tokenizer, str):
            tokenizer = use_tokenizer(tokenizer)
        config = TextFilesConfig(path=str(path), tokenizer=tokenizer, **keys)
        return open_text_files(config, seq_len=seq_len, split=split, build=build)

    return open_text


def write(folder, **files):
    for name, content in files.items():
        file = folder / name.replace("__", "/")
        file = file.with_name(file.name + ".txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def everything(source):
    return source.read(np.arange(len(source)))


def test_files_are_concatenated_in_the_order_of_their_names_with_an_end_after_each(tmp_path, open_text):
    write(tmp_path, b="second", a="first", sub__c="th\xefrd".encode("latin-1"), empty="")

    source = open_text(tmp_path, seq_len=4)
    batch = everything(source)

    stream = [*b"first", 256, *b"second", 256, *b"th\xefrd", 256]
    assert batch["tokens"].ravel().tolist() == stream[: len(source) * 4]
    assert batch["targets"].ravel().tolist() == stream[1 : len(source) * 4 + 1]
    assert len(source) == (len(stream) - 1) // 4
    assert batch.keys() == {"tokens", "targets"}
    assert (batch["tokens"].dtype, batch["targets"].dtype) == (np.int64, np.int64)
    assert source.vocab_size == 257


def test_with_a_document_mask_nothing_crosses_from_one_file_into_the_next(tmp_path, open_text):
    write(tmp_path, a="ab", b="cdefg", c="hi")

    batch = everything(open_text(tmp_path, seq_len=10, document_mask=True))

    a, b, c, d, e, f, g, h, i = b"abcdefghi"
    assert batch["tokens"].tolist() == [[a, b, 256, c, d, e, f, g, 256, h]]
    assert batch["targets"].tolist() == [[b, 256, -100, d, e, f, g, 256, -100, i]]
    assert batch["document"].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 1, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 0]]


def test_a_pattern_that_has_no_folder_to_choose_in_is_refused(tmp_path, open_text):
    write(tmp_path, a="1" * 20)

    for path in (tmp_path / "a.txt", tmp_path / "*.txt"):
        with pytest.raises(ConfigError, match=r"pattern = '\*\*/\*\.txt' has no effect: it chooses among"):
            open_text(path, pattern="**/*.txt")
        assert len(open_text(path)) == 2
    assert len(open_text(tmp_path, pattern="*.txt")) == 2


def test_paths_may_be_files_folders_globs_and_several(tmp_path, open_text, monkeypatch):
    write(tmp_path, x__one="1" * 20, x__y__two="2" * 20, z="3" * 20)
    (tmp_path / "x" / "readme.md").write_text("4" * 20)
    (tmp_path / "x" / ".hidden.txt").write_text("5" * 20)

    def characters(path, **keys):
        config_path = tuple(map(str, path)) if isinstance(path, tuple) else path
        return {file.path.read_text()[0] for file in select_files(config_path, **{"pattern": "**/*.txt"} | keys)}

    assert characters(str(tmp_path)) == {"1", "2", "3"}
    assert characters(str(tmp_path / "x" / "readme.md")) == {"4"}
    assert characters(str(tmp_path / "*" / "*.*")) == {"1", "4"}
    assert characters(str(tmp_path / "**" / "*.txt")) == {"1", "2", "3"}
    assert characters((tmp_path / "z.txt", tmp_path / "x")) == {"1", "2", "3"}
    assert characters(str(tmp_path), pattern="**/*.md") == {"4"}
    assert characters(str(tmp_path), exclude=("x/*",)) == {"2", "3"}
    assert characters(str(tmp_path), exclude=("**/y/**", "z.*")) == {"1"}
    assert characters(str(tmp_path), exclude=("**/x/**",)) == {"3"}
    assert characters(str(tmp_path), exclude=("x/**/two.txt", "y/**")) == {"1", "3"}
    assert characters(str(tmp_path), exclude=("**/tests/**", "z.txt")) == {"1", "2"}
    with pytest.raises(ConfigError, match=r"exclude = 'corpus/z.txt' is none of the 3 files, .* mean 'z.txt'\?"):
        select_files(str(tmp_path), "**/*.txt", exclude=("corpus/z.txt",))
    assert len(select_files((str(tmp_path), str(tmp_path / "z.txt")), "**/*.txt")) == 3
    monkeypatch.setenv("HOME", str(tmp_path))
    assert characters("~/x") == {"1", "2"}


def test_the_standard_library_is_a_corpus_on_every_machine():
    files = select_files("{stdlib}", "**/*.py", exclude=("site-packages/**", "**/test/**"))

    relative = [file.relative for file in files]
    assert "json/decoder.py" in relative
    assert relative == sorted(relative)
    assert not any("site-packages" in name or name.startswith("test/") for name in relative)
    assert files[0].path.is_relative_to(Path(sysconfig.get_path("stdlib")))


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.9])
def test_whole_files_are_held_out_by_name_and_the_rest_is_trained_on(fraction):
    files = [SelectedFile(f"part/{i}.txt", Path(f"/data/part/{i}.txt")) for i in range(400)]

    train, held_out = split_files(files, fraction, "train"), split_files(files, fraction, "validation")

    assert set(train + held_out) == set(files)
    assert len(train + held_out) == len(files)
    assert split_files(files, fraction, "all") == files
    assert abs(len(held_out) - max(1, 400 * fraction)) < 40
    assert held_out
    assert train


def test_adding_files_moves_no_other_file_between_the_parts():
    files = [SelectedFile(f"{i}.txt", Path(f"{i}.txt")) for i in range(300)]
    before = set(split_files(files[:200], 0.2, "validation"))
    after = set(split_files(files, 0.2, "validation"))

    assert before == after & set(files[:200])


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_two_files_are_divided_whatever_the_fraction_and_wherever_they_are(fraction):
    parts = []
    for folder in "abcdefgh":
        files = [SelectedFile(name, Path(folder, name)) for name in ("a.txt", "b.txt")]
        train, held_out = (split_files(files, fraction, split) for split in ("train", "validation"))
        parts.append([[file.relative for file in part] for part in (train, held_out)])

    assert [len(part) for part in parts[0]] == [1, 1]
    assert parts == parts[:1] * 8


def test_training_and_validation_have_different_text(tmp_path, open_text):
    write(tmp_path, **{chr(97 + i): chr(97 + i) * 30 for i in range(20)})

    train = set(everything(open_text(tmp_path, "train", validation=0.3))["tokens"].ravel().tolist()) - {256}
    held_out = set(everything(open_text(tmp_path, "validation", validation=0.3))["tokens"].ravel().tolist()) - {256}

    assert train | held_out == set(range(97, 117))
    assert not train & held_out


def test_a_tokenizer_file_reads_text(tmp_path, open_text, use_tokenizer):
    vocabulary = {"[UNK]": 0, "</s>": 1, "ein": 2, "wort": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    write(tmp_path, a="ein wort", b="wort wort", bad=b"\xff\xfe")
    chosen = use_tokenizer("tokenizer_file", path=str(tmp_path / "words.json"))

    with pytest.raises(ConfigError, match=r"bad\.txt is not valid UTF-8 .*encoding_errors"):
        open_text(tmp_path, seq_len=2, tokenizer=chosen)
    skipping = everything(open_text(tmp_path, seq_len=5, tokenizer=chosen, encoding_errors="skip"))
    replacing = everything(open_text(tmp_path, seq_len=7, tokenizer=chosen, encoding_errors="replace"))

    assert skipping["tokens"].tolist() == [[2, 3, 1, 3, 3]]
    assert skipping["targets"].tolist() == [[3, 1, 3, 3, 1]]
    assert replacing["tokens"].tolist() == [[2, 3, 1, 3, 3, 1, 0]]


def test_the_fingerprint_changes_with_the_text_and_with_nothing_else(tmp_path, open_text):
    write(tmp_path / "one", a="some text that is long enough")
    write(tmp_path / "copy", a="some text that is long enough")
    write(tmp_path / "other", a="some text that is long enougH")
    os.utime(tmp_path / "copy" / "a.txt", (0, 0))
    first = open_text(tmp_path / "one").fingerprint

    assert open_text(tmp_path / "copy", workers=3, shuffle=False).fingerprint == first
    assert open_text(tmp_path / "other").fingerprint != first
    assert open_text(tmp_path / "one", seq_len=7).fingerprint != first
    assert open_text(tmp_path / "one", document_mask=True).fingerprint != first


def test_packed_samples_are_the_same_for_any_number_of_workers_and_after_a_resume(tmp_path, open_text):
    rng = np.random.default_rng(0)
    write(tmp_path, **{f"f{i}": rng.integers(1, 256, rng.integers(1, 60), np.uint8).tobytes() for i in range(100)})
    source = open_text(tmp_path, seq_len=16, document_mask=True)

    def batches(steps, position=0, **cut):
        with BatchLoader(
            SampleStream(source, seed=3, shuffle=True), position=position, dp_rank=0, dp_size=1, prefetch=3,
            pin_memory=False, **cut
        ) as loader:  # fmt: skip
            return [
                {name: np.concatenate([microbatch[name] for microbatch in step]) for name in step[0]}
                for step in (next(loader) for _ in range(steps))
            ]

    straight = batches(40, batch_size=6, grad_accumulation=1, workers=0)
    threaded = batches(40, batch_size=2, grad_accumulation=3, workers=2)
    resumed = batches(25, position=15 * 6, batch_size=3, grad_accumulation=2, workers=1)

    for expected, actual in [*zip(straight, threaded, strict=True), *zip(straight[15:], resumed, strict=True)]:
        assert expected.keys() == actual.keys() == {"tokens", "targets", "document", "positions"}
        for name in expected:
            np.testing.assert_array_equal(expected[name], actual[name])


def test_a_link_to_what_is_not_there_is_refused_unless_it_is_excluded(tmp_path, open_text, monkeypatch):
    """It was left out without a word, as where a part of linked data has not been fetched."""
    write(tmp_path, a="some text that is there")
    (tmp_path / "b.txt").symlink_to("store/b")
    (tmp_path / "notes.md").symlink_to("gone")
    monkeypatch.chdir(tmp_path)

    for path in (".", "*.txt", "b.txt"):
        with pytest.raises(ConfigError, match=r"b\.txt is a link to store/b, which is not there; fetch or exclude it"):
            open_text(path)
    assert len(open_text(".", exclude=("b.txt",))) == len(open_text("a.txt"))


@pytest.mark.parametrize(
    ("path", "keys", "is_needed"),
    [
        (".", {"pattern": "**/*.txt"}, True),
        (".", {"pattern": "b/c*/*.txt"}, True),
        (".", {"pattern": "b/*.txt"}, False),
        ("**/*.txt", {}, True),
        ("b/c", {"pattern": "*.txt"}, True),
        ("*/*.txt", {}, False),
        (".", {"pattern": "**/*.txt", "exclude": ["b/c/**"]}, False),
        (".", {"pattern": "**/*.txt", "exclude": ["b/c/*"]}, True),  # there may be folders in it
        ("**/*.txt", {"exclude": ["**/c/**"]}, False),
        (".", {"pattern": "*/c/two.txt"}, False),  # as it may be passed through
    ],
)
def test_a_folder_that_may_not_be_read_is_refused_where_its_files_could_match(
    tmp_path, open_text, monkeypatch, path, keys, is_needed
):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "one.txt").write_text("text " * 100)
    (tmp_path / "b" / "c" / "two.txt").write_text("text " * 100)
    may = os.access  # root may read anything
    monkeypatch.setattr(
        os, "access", lambda place, mode: may(place, mode) and not (Path(place).name == "c" and mode & os.R_OK)
    )
    keys = {"path": str(tmp_path / path), **keys}

    if not is_needed:
        assert open_text(**keys)
        return
    with pytest.raises(ConfigError, match=f"no permission to read the folder {tmp_path}/b/c, where files may match"):
        open_text(**keys)


def test_names_of_files_may_be_no_utf8_and_have_spaces_or_lines(tmp_path, open_text):
    names = [os.fsdecode(name) for name in (b"a b.txt", b"c\nd.txt", b"\xff\xfe.txt", "grüße.txt".encode())]
    try:
        for name in names:
            (tmp_path / name).write_text("123456789")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")

    held_out = len(open_text(tmp_path, "validation", validation=0.5))

    assert held_out
    assert held_out + len(open_text(tmp_path, validation=0.5)) <= len(open_text(tmp_path))
    whole = prepare([str(tmp_path)], tmp_path / "out", tokenizer=BytesTokenizer(BytesConfig()), progress=Progress())
    assert whole.tokens == 40


def test_what_cannot_be_used_is_refused_with_a_sentence(tmp_path, open_text, monkeypatch):
    write(tmp_path / "corpus", a="123456789", b="")
    write(tmp_path / "empty", a="", b="")
    write(tmp_path / "lonely", a="123456789" * 5)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1")
    (tmp_path / "nothing").mkdir()
    for case, keys, sentence in [
        ("corpas", {}, r"path = '.*corpas': there is no file or folder .*corpas\. Did you mean .*corpus\?"),
        ("nothing", {}, r"the folder .*nothing has no files that match '\*\*/\*\.txt', nor any other"),
        ("code", {}, r"the folder .*code has no files .*; it has 1 ending in \.py \(pattern = \"\*\*/\*\.py\"\)"),
        ("corpus/*.md", {}, r"no file matches '.*corpus/\*\.md'"),
        ("corpas/*.md", {}, r"no file matches '.*corpas/\*\.md'"),
        ("corpus", {"exclude": ("**",)}, r"exclude leaves none of the 2 files"),
        ("empty", {}, r"the train part of the text \(2 files\) is too small: .* seq_len \+ 1 = 9 .* and there are 0\."),
        ("corpus", {"seq_len": 10}, r"too small: one sample needs at least seq_len \+ 1 = 11 .*there are 10\."),
        ("corpus", {"split": "validation"}, r"validation = 0 holds nothing out .*set it in \[data\]"),
        ("lonely", {"validation": 0.5}, r"validation = 0\.5 holds out whole files, and there is only one: .*a\.txt"),
        ("corpus", {"encoding_errors": "skip"}, r"encoding_errors = 'skip' has no effect: .*reads bytes"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            open_text(tmp_path / case, **keys)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [({"path": ""}, "path"), ({"path": ()}, "path"), ({"path": ("a", "")}, "path"), ({"validation": 1.0}, "validation"),
     ({"validation": -0.1}, "validation"), ({"pattern": ""}, "pattern"), ({"workers": -1}, "workers"),
     ({"prefetch": 0}, "prefetch")],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_the_configuration(keys, problem, use_tokenizer):
    with pytest.raises(ValueError, match=problem):
        TextFilesConfig(**{"path": "x", "tokenizer": use_tokenizer("bytes")} | keys)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_compressed_files_are_unpacked(tmp_path, open_text, ending):
    text = b"so it was before it was compressed"
    packed = gzip.compress(text, mtime=0) if ending == ".gz" else pa.Codec("zstd").compress(text, asbytes=True)
    (tmp_path / f"a.txt{ending}").write_bytes(packed)

    tokens = everything(open_text(tmp_path / f"a.txt{ending}", seq_len=len(text)))["tokens"]
    as_it_is = open_text(tmp_path / f"a.txt{ending}", seq_len=len(packed), binary=True)

    assert bytes(tokens[0].tolist()) == text
    assert bytes(everything(as_it_is)["tokens"][0].tolist()) == packed


def image(size=64):
    return b"\x89PNG\r\n\x1a\n" + bytes(range(1, size))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.parquet", b"PAR1" + b"\0" * 50 + b"PAR1", r"is a Parquet file, not text: 'forge data prepare' reads it"),
        ("x.arrow", b"ARROW1\0\0" + b"x" * 50, r"is an Arrow file, not text: write it as Parquet"),
        ("x.zip", b"PK\x03\x04" + b"x" * 50, r"is a zip archive, not text: unpack it first"),
        ("x.tar.gz", gzip.compress(b"a.txt".ljust(257, b"0") + b"ustar", mtime=0), r"is a tar archive, not text"),
        ("x.png", image(), r"is a PNG image, not text: exclude it"),
        (
            "x.txt",
            gzip.compress(b"by another name", mtime=0),
            r"is compressed by gzip, not text: it is unpacked if",
        ),
        ("y.txt", b"a text\0with a hole", r"y\.txt has a NUL byte, which text has not, at byte 6 \(from 0\)"),
        ("x.jsonl", b'{"text": "a"}\n' * 9, r"is JSON Lines, and its syntax .*'forge data prepare .*x\.jsonl --output"),
        ("x.ndjson.gz", gzip.compress(b'{"text": "a"}\n' * 9, mtime=0), r"is JSON Lines"),
    ],
)
def test_what_is_no_text_is_refused_unless_its_bytes_are_wanted(tmp_path, open_text, name, content, sentence):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError, match=rf"{sentence}.*binary = true"):
        open_text(tmp_path / name)

    batch = everything(open_text(tmp_path / name, seq_len=len(content), binary=True))
    assert bytes(batch["tokens"][0].tolist()) == content
