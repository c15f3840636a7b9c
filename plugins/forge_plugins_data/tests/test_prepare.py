"""``forge data prepare``: any input, the same output, whatever happens in between."""

import contextlib
import errno
import fcntl
import gzip
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from forge_core.cli import main
from forge_core.errors import ConfigError, ForgeError
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.commands import data
from forge_plugins_data.config import TokenFilesConfig
from forge_plugins_data.documents import plan_units, read_documents
from forge_plugins_data.prepare import prepare
from forge_plugins_data.progress import Progress
from forge_plugins_data.token_files import open_token_files
from forge_plugins_data.token_format import INDEX, read_header
from forge_plugins_data.tokenizer_config import BytesConfig

BYTES = BytesTokenizer(BytesConfig())


def run(inputs, output, tokenizer=BYTES, **keys):
    """Prepare, and return the header and what was printed."""
    lines = io.StringIO()
    inputs = [inputs] if not isinstance(inputs, list) else inputs
    header = prepare([str(path) for path in inputs], output, tokenizer=tokenizer, progress=Progress(lines), **keys)
    return header, lines.getvalue()


def documents_of(folder):
    """The documents of a folder of byte tokens, decoded."""
    header = read_header(folder / INDEX)
    ids = np.concatenate([np.fromfile(folder / shard.file, dtype=header.dtype) for shard in header.shards])
    return [BYTES.decode(part[part != 256]) for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "lock"}


def texts(n=300):
    rng = np.random.default_rng(0)
    return [f"{i} " + "wörter 🌍 "[: rng.integers(1, 9)] * int(rng.integers(1, 30)) for i in range(n)]


def write_jsonl(file, documents, key="text"):
    file.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(documents)))
    return file


def write_parquet(file, documents, key="text", type_=None, group=40):
    column = pa.array(documents, type=type_ or pa.string())
    pq.write_table(pa.table({"id": range(len(documents)), key: column}), file, row_group_size=group)
    return file


@pytest.mark.parametrize("unit_size", [1, 100, 1000, 10**9])
def test_jsonl_is_read_whole_however_it_is_cut(tmp_path, unit_size):
    documents = texts(60)
    file = write_jsonl(tmp_path / "x.jsonl", documents)

    units = plan_units([file], unit_size, "text")

    assert sum(unit.size for unit in units) == file.stat().st_size
    assert [one.content for unit in units for one in read_documents(unit, "text", "strict")] == documents


def test_jsonl_may_be_compressed_in_several_pieces_and_lack_the_last_newline(tmp_path):
    documents = texts(60)
    raw = write_jsonl(tmp_path / "x.jsonl", documents).read_bytes()
    middle = raw.index(b"\n", len(raw) // 2) + 1
    (tmp_path / "x.jsonl").write_bytes(raw[:-1])
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(raw[:middle]) + gzip.compress(raw[middle:]))
    zstd = pa.Codec("zstd")
    (tmp_path / "z.ndjson.zst").write_bytes(
        b"".join(zstd.compress(part, asbytes=True) for part in (raw[:middle], raw[middle:]))
    )

    run(tmp_path, tmp_path / "out", unit_size=500)

    assert documents_of(tmp_path / "out") == documents * 3


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet_is_read_by_row_groups(tmp_path, type_):
    documents = texts(200)
    file = write_parquet(tmp_path / "x.parquet", documents, type_=type_)

    units = plan_units([file], 1, "text")
    run(file, tmp_path / "out", unit_size=1)

    assert [(unit.start, unit.stop) for unit in units] == [(i, i + 1) for i in range(5)]
    assert documents_of(tmp_path / "out") == documents


def test_text_files_are_one_document_each_and_share_units(tmp_path):
    for i, text in enumerate(texts(30)):
        (tmp_path / f"{i:02d}.txt").write_text(text)
    (tmp_path / "30.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "notes.md").write_text("left out")

    header, _ = run(tmp_path, tmp_path / "out", unit_size=400)

    assert documents_of(tmp_path / "out") == [*texts(30), "packed"]
    assert 3 < len(header.shards) < 30
    run(tmp_path, tmp_path / "markdown", patterns=["**/*.md"])
    assert documents_of(tmp_path / "markdown") == ["left out"]


def test_what_a_file_that_is_no_text_has_stopped_goes_on_without_it(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(b"no\0text")
    out = tmp_path.with_name("went_on")

    with pytest.raises(ConfigError, match=r"b.txt has a NUL byte"):
        run(tmp_path, out, tokenizer=260)
    _, printed = run(tmp_path, out, exclude=["b.txt"])

    assert documents_of(out) == ["text"]
    assert "left out" not in printed
    with pytest.raises(ConfigError, match=r"was begun with other settings or input"):
        run(tmp_path, out, exclude=["a.txt"])


def test_files_of_a_folder_that_no_pattern_takes_are_counted_by_their_ending(tmp_path):
    for i in range(7):
        (tmp_path / f"{i}.md").write_text("left out")
    for name in ("a.txt", "b.tar.gz", "c.csv", "Makefile", ".hidden.md"):
        (tmp_path / name).write_text("text")

    _, printed = run(tmp_path, tmp_path.with_name("out"))
    _, of_one_file = run(tmp_path / "a.txt", tmp_path.with_name("out2"))

    left_out, more = printed.splitlines()[0].split("; ")
    assert left_out.startswith("left out: 7 files ending in .md, 1 file ")
    assert {"1 file ending in .tar.gz", "1 file ending in .csv", "1 file without an ending"} < {*left_out.split(", ")}
    assert more == "choose others with --pattern, such as --pattern '**/*.md'"
    assert "left out" not in of_one_file

    for ending in "abc":
        (tmp_path / f"x.{ending}").touch()
    _, printed = run(tmp_path, tmp_path.with_name("out3"))
    assert ", 2 files with 2 other endings; choose" in printed
    (tmp_path / "x.c").unlink()
    _, printed = run(tmp_path, tmp_path.with_name("out4"))
    assert ", 1 file with 1 other ending; choose" in printed


def test_a_text_file_that_is_no_text_is_refused_unless_its_bytes_are_wanted(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"PAR1 and more")
    (tmp_path / "y.txt").write_bytes(b"a\0b")

    with pytest.raises(ConfigError, match=r"x\.txt is a Parquet file, not text: .*--binary"):
        run(tmp_path / "x.txt", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"y\.txt has a NUL byte, .* at byte 1 \(from 0\)"):
        run(tmp_path / "y.txt", tmp_path / "out3")

    run(tmp_path, tmp_path / "out2", binary=True)
    assert documents_of(tmp_path / "out2") == ["PAR1 and more", "a\0b"]


def test_the_output_opens_as_token_files_with_its_tokenizer(tmp_path, build):
    write_jsonl(tmp_path / "x.jsonl", texts())
    header, printed = run(tmp_path / "x.jsonl", tmp_path / "out", unit_size=2000)

    source = open_token_files(TokenFilesConfig(path=str(tmp_path / "out")), seq_len=16, split="train", build=build)

    assert source.tokenizer.decode(source.read(np.arange(1))["tokens"][0]).startswith(texts()[0][:5])
    assert (source.vocab_size, header.dtype, header.end_of_document) == (257, "uint16", 256)
    assert sum(shard.documents for shard in header.shards) == 300
    assert header.tokens == sum(len(text.encode()) + 1 for text in texts())
    size = (tmp_path / "x.jsonl").stat().st_size / 2**20
    assert printed.splitlines()[-1].startswith(f"{size:,.1f} of {size:,.1f} MiB")


def test_any_number_of_processes_writes_the_same_files(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", texts())

    run(tmp_path / "x.jsonl", tmp_path / "one", unit_size=2000)
    run(tmp_path / "x.jsonl", tmp_path / "three", unit_size=2000, workers=3)

    assert contents(tmp_path / "one") == contents(tmp_path / "three")
    assert len(contents(tmp_path / "one")) > 2 * 5


SLOWLY = """
import faulthandler, sys, time
from pathlib import Path
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.tokenizer_config import BytesConfig
from forge_plugins_data.prepare import prepare
from forge_plugins_data.progress import Progress
class Slow(BytesTokenizer):
    # it does not get further than what the test waits for, until that has sent its signal
    def encode_bytes(self, content):
        while len(list(Path(sys.argv[2]).glob("*.json"))) >= 4 and not Path(sys.argv[2] + ".told").exists():
            time.sleep(0.01)
        return super().encode_bytes(content)
if __name__ == "__main__":
    faulthandler.dump_traceback_later(100)  # of one that does not end
    source, output, workers = sys.argv[1:]
    tokenizer = Slow(BytesConfig())
    prepare([source], Path(output), tokenizer=tokenizer, unit_size=2000, workers=int(workers), progress=Progress())
"""


@pytest.mark.parametrize(("how", "workers"), [(signal.SIGKILL, 1), (signal.SIGKILL, 2), (signal.SIGINT, 2)])
def test_a_preparation_that_was_killed_is_completed_as_if_nothing_had_happened(tmp_path, how, workers):
    write_jsonl(tmp_path / "x.jsonl", texts(600))
    run(tmp_path / "x.jsonl", tmp_path / "straight", unit_size=2000)
    program, output = tmp_path / "slowly.py", tmp_path / "out"
    program.write_text(SLOWLY)
    process = subprocess.Popen(
        [sys.executable, program, tmp_path / "x.jsonl", output, str(workers)],
        env=os.environ | {"FORGE_TEST_OF": str(tmp_path)},
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(list(output.glob("*.json"))) >= 4)

    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does
    else:
        process.send_signal(how)
    Path(f"{output}.told").touch()
    try:
        process.communicate(timeout=200)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail(f"it does not end: {(error.stderr or b'').decode()}")

    assert not (output / INDEX).exists()
    wait_until(lambda: not processes_of(tmp_path))  # no worker is left behind
    finished = {file: file.stat().st_mtime_ns for file in output.glob("tokens_*.json")}
    header, printed = run(tmp_path / "x.jsonl", output, unit_size=2000)
    assert contents(output) == contents(tmp_path / "straight")
    assert f"{len(finished)} of {len(header.shards)} parts are done already" in printed
    assert all(file.stat().st_mtime_ns == time_ for file, time_ in finished.items())


STRUCK = """
import sys, threading
from concurrent.futures import _base
from pathlib import Path
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.tokenizer_config import BytesConfig
from forge_plugins_data.prepare import prepare
from forge_plugins_data.progress import Progress
take = _base._AcquireFutures.__enter__
def take_and_be_interrupted(self):
    # where a signal may come: the locks are taken, and nothing knows yet that they are
    take(self)
    if threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
class Interrupted(Progress):
    def advance(self, size, tokens):
        super().advance(size, tokens)
        raise KeyboardInterrupt
if __name__ == "__main__":
    _base._AcquireFutures.__enter__ = take_and_be_interrupted
    tokenizer = BytesTokenizer(BytesConfig())
    prepare([sys.argv[1]], Path(sys.argv[2]), tokenizer=tokenizer, unit_size=2000, workers=2, progress=Interrupted())
"""


def test_ctrl_c_never_leaves_a_lock_behind_that_the_end_of_the_process_waits_for(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", texts(600))
    program = tmp_path / "struck.py"
    program.write_text(STRUCK)

    ended = subprocess.run(
        [sys.executable, program, tmp_path / "x.jsonl", tmp_path / "out"],
        env=os.environ | {"FORGE_TEST_OF": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )

    assert "in advance" in ended.stderr, "the main thread takes no locks of the pool"
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt")
    assert not (tmp_path / "out" / INDEX).exists()
    wait_until(lambda: not processes_of(tmp_path))


def test_a_worker_that_dies_is_reported_and_what_is_finished_stays(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", texts(600))
    program = tmp_path / "dying.py"
    dies = "'599 ' in content.decode() and __import__('os')._exit(9)"
    program.write_text(SLOWLY.replace("time.sleep(0.01)", f"{dies}; break"))

    ended = subprocess.run(
        [sys.executable, program, tmp_path / "x.jsonl", tmp_path / "out", "2"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert "a worker process was killed, perhaps because memory ran out" in ended.stderr
    header, _ = run(tmp_path / "x.jsonl", tmp_path / "out", unit_size=2000)
    assert documents_of(tmp_path / "out") == texts(600)
    assert ForgeError.__name__ in ended.stderr
    assert len(header.shards) > 4


def test_what_was_removed_or_damaged_is_made_again(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", texts())
    run(tmp_path / "x.jsonl", tmp_path / "out", unit_size=2000)
    before = contents(tmp_path / "out")
    (tmp_path / "out" / "tokens_00001.bin").unlink()
    (tmp_path / "out" / "tokens_00002.bin").write_bytes(b"\0")
    (tmp_path / "out" / "tokens_00003.json").write_text("{")

    run(tmp_path / "x.jsonl", tmp_path / "out", unit_size=2000)

    assert contents(tmp_path / "out") == before


def test_other_settings_or_input_do_not_continue_what_was_begun(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", texts())
    run(file, tmp_path / "out")

    with pytest.raises(ConfigError, match=r"out was begun with other settings .*text_field: text then, body now"):
        run(file, tmp_path / "out", text_field="body")
    with pytest.raises(ConfigError, match=r"unit_size: \d+ then, 7 now"):
        run(file, tmp_path / "out", unit_size=7)
    write_jsonl(file, texts(299))
    with pytest.raises(ConfigError, match=r"or input \(a file of the input has another name, size or time\)\."):
        run(file, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has other things in it; name a new or an empty one"):
        run(file, tmp_path)
    with pytest.raises(ConfigError, match=r"x\.jsonl is a file; the output is a folder"):
        run(file, file)


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": 1'])
def test_settings_that_are_damaged_are_named(tmp_path, content):
    write_jsonl(tmp_path / "x.jsonl", ["a"])
    run(tmp_path / "x.jsonl", tmp_path / "out")
    (tmp_path / "out" / "settings.json").write_text(content)

    with pytest.raises(ConfigError, match=r"out/settings\.json is damaged \(.*\); remove .*out and prepare the data"):
        run(tmp_path / "x.jsonl", tmp_path / "out")


def test_two_preparations_do_not_work_in_one_folder(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", texts())
    run(file, tmp_path / "out")
    with (tmp_path / "out" / "lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"another 'forge data prepare' is working in .*out"):
            run(file, tmp_path / "out")


def test_a_bpe_tokenizer_is_trained_on_the_input_and_travels_with_the_data(tmp_path, build):
    documents = [f"the theory of the thing is that number {i} is the {i}th grüße" for i in range(200)]
    file = write_jsonl(tmp_path / "x.jsonl", documents)

    header, _ = run(file, tmp_path / "out", tokenizer=300, unit_size=4000)
    again, _ = run(file, tmp_path / "again", tokenizer=300, unit_size=4000, workers=2)

    (tmp_path / "out").rename(tmp_path / "moved")
    source = open_token_files(TokenFilesConfig(path=str(tmp_path / "moved")), seq_len=32, split="all", build=build)
    assert contents(tmp_path / "moved") == contents(tmp_path / "again")
    assert source.vocab_size == header.vocab_size == again.vocab_size == 300
    ids = source.tokenizer.encode(documents[7])
    assert len(ids) < len(documents[7]) / 2
    assert source.tokenizer.decode(ids) == documents[7]
    assert source.tokenizer.decode(source.read(np.arange(1))["tokens"][0]).startswith(documents[0] + documents[1][:5])


def test_a_bpe_vocabulary_may_be_larger_than_the_text_has_pairs_but_not_smaller_than_the_bytes(tmp_path):
    file = write_jsonl(tmp_path / "x.jsonl", ["ab ab ab"])

    header, printed = run(file, tmp_path / "out", tokenizer=70_000)
    assert header.vocab_size < 300
    assert f"the text has pairs for {header.vocab_size} ids only" in printed
    assert header.dtype == "uint16"
    with pytest.raises(ConfigError, match="at least 257 ids"):
        run(file, tmp_path / "small", tokenizer=256)


def test_text_that_is_not_utf8_is_refused_replaced_or_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "good"}\n{"text": "b\xe4d"}\n{"text": "half \\ud83d"}\n{"text": "end"}\n'
    )

    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2 is not UTF-8"):
        run(tmp_path, tmp_path / "strict")
    replaced, _ = run(tmp_path, tmp_path / "replaced", encoding_errors="replace")
    skipped, _ = run(tmp_path, tmp_path / "skipped", encoding_errors="skip")

    assert documents_of(tmp_path / "replaced") == ["good", "b\ufffdd", "half \ufffd\ufffd\ufffd", "end"]
    assert documents_of(tmp_path / "skipped") == ["good", "end"]
    assert (replaced.shards[0].skipped, skipped.shards[0].skipped) == (0, 2)


def test_empty_and_null_documents_are_counted_and_left_out(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["x", "", None, "y"])
    write_parquet(tmp_path / "b.parquet", ["z", None, ""])

    header, _ = run(tmp_path, tmp_path / "out")

    assert documents_of(tmp_path / "out") == ["x", "y", "z"]
    assert [shard.skipped for shard in header.shards] == [2, 2]


def test_input_that_cannot_be_used_is_refused_with_a_sentence(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", ["a"])
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "open.jsonl").write_text('{"text": "abc\n{"text": "a"}\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "number.jsonl").write_text('{"text": 5}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(os.urandom(9000))[:-2000])
    (tmp_path / "cut.jsonl.zst").write_bytes(pa.Codec("zstd").compress(os.urandom(9000), asbytes=True)[:-2000])
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n{"text": "b", "x": ' + "[" * 99_999 + "]" * 99_999 + "}\n")
    os.mkfifo(tmp_path / "pipe")
    write_parquet(tmp_path / "ids.parquet", [1, 2], type_=pa.int64())
    (tmp_path / "cut.parquet").write_bytes(write_parquet(tmp_path / "whole.parquet", texts()).read_bytes()[:-100])
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    for name, keys, sentence in [
        ("none.jsonl", {}, r"there is no file or folder .*none\.jsonl\. Did you mean"),
        (
            "good.jsonl",
            {"text_field": "body"},
            r"good\.jsonl, line 1 has no 'body'; its keys are id, text \(choose with",
        ),
        ("bad.jsonl", {}, r"bad\.jsonl, line 2 is not JSON: Expecting value at character 11"),
        ("open.jsonl", {}, r"open\.jsonl, line 1 is not JSON: Invalid control character at character 14"),
        ("deep.jsonl", {}, r"deep\.jsonl, line 2 is not JSON: .* while decoding a JSON array"),
        ("pipe", {}, r"path = '.*pipe' is neither a file nor a folder, but something like a pipe or a device"),
        ("list.jsonl", {}, r"has no 'text'; it is not an object"),
        ("number.jsonl", {}, r"'text' must be text, it is 5"),
        ("cut.jsonl.gz", {}, r"cannot read .*cut\.jsonl\.gz|is not UTF-8|is not JSON"),
        ("cut.jsonl.zst", {}, r"cannot read .*cut\.jsonl\.zst|is not UTF-8|is not JSON"),
        ("whole.parquet", {"text_field": "body"}, r"has no column 'body'; its columns are id, text"),
        ("ids.parquet", {}, r"the column 'text' holds int64, not text"),
        ("cut.parquet", {}, r"cut\.parquet is damaged or not a Parquet file"),
        ("empty.txt", {}, r"the input is empty: 1 file, no bytes"),
        ("blank.jsonl", {}, r"the input has no text: 1 file, all documents empty"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            run(tmp_path / name, tmp_path / f"out-{name}", **keys)
    run(good, tmp_path / "out", workers=4)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a place that not even root can write to")
def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    write_jsonl(tmp_path / "x.jsonl", ["a"])

    with pytest.raises(ConfigError, match="--output: cannot make the folder /proc/tokens: No such file or directory"):
        run(tmp_path / "x.jsonl", Path("/proc/tokens"))


@pytest.mark.parametrize(
    ("call", "number"), [("open", 0), ("fsync", 0), ("fsync", 1)], ids=["lock", "settings", "trained tokenizer"]
)
def test_a_disk_that_is_full_at_the_beginning_is_told_and_the_same_command_goes_on(
    tmp_path, monkeypatch, capsys, call, number
):
    write_jsonl(tmp_path / "x.jsonl", texts(30))
    command = ["data", "prepare", str(tmp_path / "x.jsonl"), "-o", str(tmp_path / "out"), "--train-bpe", "300"]
    really, calls = getattr(os, call), itertools.count()

    def fails_once(*given, **keys):
        if next(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(*given, **keys)

    monkeypatch.setattr(os, call, fails_once)
    assert main([*command, "--workers", "1"]) == 2
    said = capsys.readouterr().err
    assert f"--output: cannot tokenise into the folder {tmp_path / 'out'}: No space left on device; make it a" in said
    assert not (tmp_path / "out" / INDEX).exists()
    assert main([*command, "--workers", "1"]) == 0


def test_an_error_in_another_process_arrives_as_the_same_sentence(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n' * 100 + "{\n")

    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 101 is not JSON"):
        run(tmp_path, tmp_path / "out", unit_size=300, workers=2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--pattern", "*.md"], "--pattern *.md has no effect: no input is a folder"),
        (["--text-field", "body"], "--text-field body has no effect: no input is JSONL or Parquet"),
        (["--encoding-errors", "skip"], "--encoding-errors skip has no effect: this tokenizer reads the bytes"),
    ],
)
def test_options_that_say_nothing_about_the_input_are_refused(tmp_path, monkeypatch, options, sentence):
    monkeypatch.setattr("forge_plugins_data.commands._build_tokenizer", lambda *_: BYTES)
    (tmp_path / "a.txt").write_text("text")
    command = ["prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "out"), *options]

    assert sentence in str(CliRunner().invoke(data, command, obj=None).exception)
    assert not (tmp_path / "out").exists()


def test_the_command_prepares_and_inspects(tmp_path, monkeypatch, build):
    monkeypatch.setattr("forge_plugins_data.commands._build_tokenizer", lambda *_: BYTES)
    write_jsonl(tmp_path / "x.jsonl", [*texts(), ""])
    output = tmp_path / "out"

    def forge_data(*arguments):
        return CliRunner().invoke(data, [str(argument) for argument in arguments], obj=None)

    prepared = forge_data("prepare", tmp_path / "x.jsonl", "-o", output, "--workers", 1)
    tokens = read_header(output / INDEX).tokens
    assert prepared.exit_code == 0
    assert prepared.stdout.strip() == (
        f"{output}: {tokens:,} tokens of uint16 in 1 file(s), 300 documents, vocabulary 257; "
        "1 documents skipped (empty or not UTF-8)"
    )
    for path in (output, output / "tokens_00000.bin", output / "tokens_00000.json"):
        inspected = forge_data("inspect", path, "--verify")
        assert f"tokens_00000.bin  {tokens:,} tokens, 300 documents, verified" in inspected.stdout
    assert forge_data("prepare", "x", "-o", output, "--tokenizer", "bytes", "--train-bpe", 300).exit_code == 2

    with (output / "tokens_00000.bin").open("r+b") as file:
        file.write(b"\1\1")
    assert forge_data("inspect", output).exit_code == 0
    assert "its checksum is not the one of its JSON" in str(forge_data("inspect", output, "--verify").exception)


def wait_until(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def processes_of(folder):
    """Processes that were started with this folder in their environment, workers included."""
    marked = f"FORGE_TEST_OF={folder}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if marked in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
    return found
