"""The source ``huggingface``: a data set becomes token files once, whoever asks and whatever happens meanwhile."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from forge_core.errors import ConfigError
from forge_plugins_data import huggingface
from forge_plugins_data.bpe import train_bpe
from forge_plugins_data.documents import Unit
from forge_plugins_data.hub_config import HuggingFaceConfig
from forge_plugins_data.huggingface import open_huggingface
from forge_plugins_data.shard_writer import ShardWriter

datasets = pytest.importorskip("datasets")

TEXTS = [f"document number {n}, with {n * n} in it" for n in range(120)]
END = 256


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Several files of a small data set."""
    monkeypatch.setattr(huggingface, "UNIT_SIZE", 1000)


@pytest.fixture
def open_hub(tmp_path, build, use_tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def open_hub(path, split="train", seq_len=8, **keys):
        given = {"tokenizer": use_tokenizer("bytes"), "processes": 1, **keys}
        return open_huggingface(HuggingFaceConfig(path=str(path), **given), seq_len=seq_len, split=split, build=build)

    return open_hub


def saved(folder, texts=TEXTS, **columns):
    datasets.Dataset.from_dict({"text": texts, **columns}).save_to_disk(str(folder))
    return folder


def prepared():
    """The one folder of token files."""
    (folder,) = Path("prepared").iterdir()
    return folder


def tokens_of(folder):
    return np.concatenate([np.fromfile(file, np.uint16) for file in sorted(folder.glob("*.bin"))])


def expected(texts=TEXTS):
    return [token for text in texts for token in [*text.encode(), END]]


def test_a_saved_data_set_is_tokenised_once_document_by_document(tmp_path, open_hub, capsys):
    source = open_hub(saved(tmp_path / "corpus"))

    assert tokens_of(prepared()).tolist() == expected()
    assert len([*prepared().glob("*.bin")]) > 3
    files = {file: file.stat().st_mtime_ns for file in prepared().iterdir()}
    again = open_hub(tmp_path / "corpus")
    assert again.fingerprint == source.fingerprint
    assert {file: file.stat().st_mtime_ns for file in prepared().iterdir()} == files
    assert capsys.readouterr().err.count("is tokenised into") == 1


def test_documents_are_packed_whole_from_the_same_token_files(tmp_path, open_hub, capsys):
    windows = open_hub(saved(tmp_path / "corpus"), seq_len=100)
    packed = open_hub(tmp_path / "corpus", seq_len=100, packing="best_fit", document_mask=True)

    batch = packed.read(np.arange(len(packed)))
    rows = zip(batch["tokens"], batch["document"], strict=True)
    pieces = [row[(document == n) & (row != END)] for row, document in rows for n in range(9)]
    assert sorted(bytes(piece.tolist()).decode() for piece in pieces if len(piece)) == sorted(TEXTS)
    assert packed.documents == windows.documents == len(TEXTS)
    assert packed.fingerprint != windows.fingerprint
    assert capsys.readouterr().err.count("is tokenised into") == 1


def test_any_number_of_processes_writes_the_same_files(tmp_path, open_hub):
    open_hub(saved(tmp_path / "corpus"), cache="one")
    open_hub(tmp_path / "corpus", cache="two", processes=2)

    def files(cache):
        (folder,) = Path(cache).iterdir()
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    assert files("one") == files("two")


def test_files_are_read_by_their_format_and_a_folder_of_them_too(tmp_path, open_hub):
    (tmp_path / "files").mkdir()
    datasets.Dataset.from_dict({"body": TEXTS}).to_parquet(str(tmp_path / "files" / "a.parquet"))

    by_folder = open_hub(tmp_path / "files", column="body")
    by_format = open_hub("parquet", data_files=str(tmp_path / "files" / "*.parquet"), column="body")

    indices = np.arange(len(by_folder))
    np.testing.assert_array_equal(by_folder.read(indices)["tokens"], by_format.read(indices)["tokens"])
    assert by_folder.read(indices)["tokens"].ravel().tolist()[:50] == expected()[:50]


def test_another_split_has_a_folder_of_its_own(tmp_path, open_hub, build, use_tokenizer):
    parts = {"train": TEXTS, "test": TEXTS[::-1]}
    made = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "corpus"))

    train = open_hub(tmp_path / "corpus")
    test = HuggingFaceConfig(path=str(tmp_path / "corpus"), split="test", tokenizer=use_tokenizer("bytes"))
    held_out = open_huggingface(test, seq_len=8, split="all", build=build)

    assert held_out.fingerprint != train.fingerprint
    folders = sorted(folder.name.rsplit("-", 1)[0] for folder in Path("prepared").iterdir())
    assert folders == ["corpus", "corpus-test"]


def test_a_data_set_that_has_changed_or_another_tokenizer_has_a_folder_of_its_own(tmp_path, open_hub, use_tokenizer):
    one = open_hub(saved(tmp_path / "corpus"))
    shutil.rmtree(tmp_path / "corpus")
    other = open_hub(saved(tmp_path / "corpus", TEXTS[::-1]))
    trained = train_bpe([_text(tmp_path)], 300, "text", "strict")
    trained.save(str(tmp_path / "bpe.json"))
    third = open_hub(tmp_path / "corpus", tokenizer=use_tokenizer("tokenizer_file", path=str(tmp_path / "bpe.json")))

    assert len({one.fingerprint, other.fingerprint, third.fingerprint}) == 3
    assert len([*Path("prepared").iterdir()]) == 3


def _text(folder):
    (folder / "text.txt").write_text(" ".join(TEXTS))
    return Unit("text", (str(folder / "text.txt"),))


def test_documents_without_text_are_left_out(tmp_path, open_hub):
    open_hub(saved(tmp_path / "corpus", ["", "some text", None, "and more"]))

    assert tokens_of(prepared()).tolist() == expected(["some text", "and more"])


def test_what_was_removed_is_made_again(tmp_path, open_hub):
    open_hub(saved(tmp_path / "corpus"))
    (prepared() / "tokens_00001.bin").unlink()

    open_hub(tmp_path / "corpus")

    assert tokens_of(prepared()).tolist() == expected()


SLOWLY = """
import sys, time
from pathlib import Path
from forge_core.contracts.component_ref import ComponentRef
from forge_plugins_data import huggingface
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.hub_config import HuggingFaceConfig
from forge_plugins_data.tokenizer_config import BytesConfig
huggingface.UNIT_SIZE = 1000
class Slow(BytesTokenizer):
    # it does not get further than two parts until the test allows it
    def encode(self, text):
        while len(list(Path("prepared").glob("*/tokens_*.json"))) >= 2 and not Path("go on").exists():
            time.sleep(0.01)
        return super().encode(text)
if __name__ == "__main__":
    use = ComponentRef(kind="tokenizer", name="bytes", provider="p", factory="m:f", config=BytesConfig())
    config = HuggingFaceConfig(path="corpus", tokenizer=use, processes=1)
    source = huggingface.open_huggingface(config, seq_len=8, split="train", build=lambda use, base: Slow(use.config))
    print(source.fingerprint)
"""


@pytest.fixture
def start_slow(tmp_path):
    program, started = tmp_path / "slowly.py", []
    program.write_text(SLOWLY)

    def start():
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, program], cwd=tmp_path, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_of_several_ranks_one_tokenises_and_when_it_is_killed_another_goes_on(tmp_path, open_hub, start_slow):
    saved(tmp_path / "corpus")
    first = start_slow()
    wait_until(lambda: len([*tmp_path.glob("prepared/*/tokens_*.json")]) >= 2)
    finished = {file: file.stat().st_mtime_ns for file in tmp_path.glob("prepared/*/tokens_*")}
    second = start_slow()
    said = second.stderr.readline()

    first.send_signal(signal.SIGKILL)
    taken_over = second.stderr.readline()
    (tmp_path / "go on").touch()
    err, out = second.stderr.read(), second.stdout.read()  # communicate() would lose what readline() has read ahead
    second.wait()

    assert "waiting for another process, which tokenises the data set 'corpus' into prepared/corpus-" in said
    assert "is tokenised into" in taken_over
    assert second.returncode == 0, err
    assert "2 of " in err
    assert "parts are done already" in err
    assert {file: file.stat().st_mtime_ns for file in finished if file.suffix != ".partial"} == {
        file: written for file, written in finished.items() if file.suffix != ".partial"
    }
    assert out.strip() == open_hub("corpus").fingerprint
    assert tokens_of(prepared()).tolist() == expected()


IN_A_THREAD = """
import signal, sys, threading, time
from pathlib import Path
import attrs
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.tokenizer_config import BytesConfig
from forge_plugins_data.documents import Document
from forge_plugins_data.progress import Progress
from forge_plugins_data.tokenising import Work, tokenise
@attrs.frozen
class Part:
    size: int
def documents(part):
    time.sleep(0.1)
    yield Document("some text", "here")
if __name__ == "__main__":
    work = Work.begun(Path(), BytesTokenizer(BytesConfig()), documents)
    given = (work, [Part(9)] * 100, 2, Progress())
    threading.Thread(target=tokenise, args=given, daemon=True).start()  # as several ranks do, which wait meanwhile
    while len(list(Path().glob("tokens_*.json"))) < 2:
        time.sleep(0.01)
    signal.raise_signal(signal.SIGINT)
"""


def test_ctrl_c_while_ranks_wait_ends_the_process_before_all_is_tokenised(tmp_path):
    program = tmp_path / "in_a_thread.py"
    program.write_text(IN_A_THREAD)

    ended = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert "KeyboardInterrupt" in ended.stderr
    assert 2 <= len([*tmp_path.glob("tokens_*.json")]) < 50


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"column": "txt"}, r"column = 'txt': .* has no such column, it has text, n; did you mean 'text'\?"),
        ({"column": "n"}, r"column = 'n': in the data set .* it holds Value\('int64'\), not text"),
        ({"split": "train"}, r"split = 'train' has no effect: .* is a single split; remove it"),
        ({"subset": "en"}, r"subset = 'en' has no effect: .* is a saved data set"),
        ({"cache": "/proc/tokens"}, r"cache = '/proc/tokens': cannot make the folder"),
    ],
)
def test_keys_that_do_not_fit_a_saved_data_set_are_refused_before_anything_is_made(
    tmp_path, open_hub, build, use_tokenizer, keys, sentence
):
    saved(tmp_path / "corpus", n=[*range(120)])
    config = HuggingFaceConfig(path=str(tmp_path / "corpus"), tokenizer=use_tokenizer("bytes"), **keys)

    with pytest.raises(ConfigError, match=sentence):
        open_huggingface(config, seq_len=8, split="train", build=build)
    assert not Path("prepared").exists()


@pytest.mark.parametrize("made", ["saved", "files"])
def test_a_split_that_is_not_there_is_told_with_those_that_are(tmp_path, open_hub, build, use_tokenizer, made):
    part = datasets.Dataset.from_dict({"text": TEXTS})
    if made == "saved":
        datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "corpus"))
    else:
        (tmp_path / "corpus").mkdir()
        for name in ("train", "test"):
            part.to_parquet(str(tmp_path / "corpus" / f"{name}.parquet"))
    config = HuggingFaceConfig(path=str(tmp_path / "corpus"), split="tset", tokenizer=use_tokenizer("bytes"))

    with pytest.raises(ConfigError, match=r"split = 'tset': .* no such split, it has train, test; did you mean 'test'"):
        open_huggingface(config, seq_len=8, split="train", build=build)


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [([""], "has no text: all 1 rows are empty"), ([], "cannot be loaded: .* no data"), (["abc"], "is too small")],
)
def test_a_data_set_without_enough_text_is_refused(tmp_path, open_hub, texts, sentence):
    features = datasets.Features({"text": datasets.Value("string")})
    datasets.Dataset.from_dict({"text": texts}, features=features).to_parquet(str(tmp_path / "a.parquet"))

    with pytest.raises(ConfigError, match=sentence):
        open_hub("parquet", data_files=str(tmp_path / "a.parquet"))


def test_what_is_wrong_with_a_file_is_told(tmp_path, open_hub):
    (tmp_path / "a.csv").write_text('text\n"no end\n')

    with pytest.raises(ConfigError, match=r"'csv' cannot be loaded: ParserError: .*EOF inside string"):
        open_hub("csv", data_files=str(tmp_path / "a.csv"))


def test_a_name_of_the_hub_without_a_network_says_how_to_bring_the_data(open_hub, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(
        ConfigError,
        match=r"'somebody/corpus' \(en\) is no folder here .* cannot be reached .*"
        r"load_dataset\('somebody/corpus', name='en', split='train'\)\.save_to_disk\('corpus'\)",
    ):
        open_hub("somebody/corpus", subset="en")


def test_paths_that_can_be_no_name_of_the_hub_are_known_to_be_missing_before_a_run(tmp_path, use_tokenizer):
    saved(tmp_path / "corpus")

    def missing(path):
        return [*HuggingFaceConfig(path=path, tokenizer=use_tokenizer("bytes")).missing()]

    assert "Did you mean" in missing(f"{tmp_path}/corpse")[0]
    assert missing(f"{tmp_path}/corpus") == missing("somebody/corpus") == missing("wikitext") == []


def test_a_file_is_to_be_named_with_its_format(tmp_path, open_hub):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')

    with pytest.raises(ConfigError, match="is a file: set data_files = "):
        open_hub(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="has no such files"):
        open_hub("json", data_files=str(tmp_path / "b.jsonl"))


def test_files_of_a_format_have_no_subset(tmp_path, open_hub):
    with pytest.raises(ConfigError, match="subset = 'en' has no effect: path = 'json' is no data set of the hub"):
        open_hub("json", data_files=str(tmp_path / "a.jsonl"), subset="en")


def test_files_of_this_machine_have_no_revision(tmp_path, open_hub):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')

    with pytest.raises(ConfigError, match="revision = 'main' has no effect: path = 'json' is no data set of the hub"):
        open_hub("json", data_files=str(tmp_path / "a.jsonl"), revision="main")
    with pytest.raises(ConfigError, match="revision = 'main' has no effect"):
        open_hub(tmp_path, revision="main")


def test_without_the_library_it_says_what_to_install(tmp_path, open_hub, monkeypatch):
    path = saved(tmp_path / "corpus")
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(ConfigError, match=r"datasets, which is not installed: pip install 'forge-plugins-data\[hug"):
        open_hub(path)


def test_a_disk_that_is_full_is_told_and_what_is_finished_is_kept(tmp_path, open_hub, monkeypatch):
    saved(tmp_path / "corpus")
    finish, left = ShardWriter.finish, [2]

    def finish_two(self):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return finish(self)

    monkeypatch.setattr(ShardWriter, "finish", finish_two)
    with pytest.raises(ConfigError, match=r"the disk of prepared/corpus-\S+ is full .* 2 of 5 parts are finished and"):
        open_hub(tmp_path / "corpus")
    monkeypatch.setattr(ShardWriter, "finish", finish)

    open_hub(tmp_path / "corpus")
    assert tokens_of(prepared()).tolist() == expected()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENOLCK])
@pytest.mark.parametrize("where", ["write_atomically", "alone_in"])
def test_a_folder_that_cannot_be_written_is_told_in_a_sentence(tmp_path, open_hub, monkeypatch, where, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    saved(tmp_path / "corpus")
    monkeypatch.setattr(huggingface, where, refuse)

    sentence = rf"^cache = 'prepared': cannot tokenise into the folder prepared/corpus-\S+: {os.strerror(number)}; make"
    with pytest.raises(ConfigError, match=sentence):
        open_hub(tmp_path / "corpus")


def test_the_plugin_without_a_data_set_does_not_import_the_library():
    code = "import sys, forge_plugins_data.plugin, forge_plugins_data.huggingface; print('datasets' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "False"
