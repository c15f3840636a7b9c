"""The sources ``chat``, ``prompt_completion`` and ``preference_pairs`` read rows of a data set as lines of a file."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_plugins_data.answers_config import ChatConfig, PromptCompletionConfig
from forge_plugins_data.chat import open_chat
from forge_plugins_data.dataset_config import DatasetConfig
from forge_plugins_data.preference_config import PreferencePairsConfig
from forge_plugins_data.preference_pairs import open_preference_pairs
from forge_plugins_data.prompt_completion import open_prompt_completion

datasets = pytest.importorskip("datasets")

TEMPLATE = Path(__file__).with_name("chat_templates") / "qwen.jinja"


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


PAIRS = [{"prompt": f"{n} + {n} = ", "chosen": f"{2 * n}", "rejected": f"{2 * n} 🦀"} for n in range(40)]
IN_MESSAGES = [
    {"prompt": turns("What is 2 + 2?"), "chosen": [turns("", "4")[1]], "rejected": [turns("", "5")[1]]},
    {"prompt": turns("a", "b", "c"), "chosen": [turns("", "d")[1]], "rejected": [turns("", "e")[1]]},
]
CONVERSATIONS = [{"chosen": turns("a", "b"), "rejected": turns("a", "c")}]
SOURCES = {
    "preference_pairs": (open_preference_pairs, PreferencePairsConfig, PAIRS),
    "preference_pairs of messages": (open_preference_pairs, PreferencePairsConfig, IN_MESSAGES),
    "preference_pairs of conversations": (open_preference_pairs, PreferencePairsConfig, CONVERSATIONS),
    "chat": (open_chat, ChatConfig, [{"messages": turns("a", "b")}, {"messages": turns("a", "b", "c", "d")}]),
    "prompt_completion": (open_prompt_completion, PromptCompletionConfig, [{"prompt": "a", "completion": "b"}] * 2),
}


@pytest.fixture
def open_source(tmp_path, build, use_tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def open_source(kind, split="all", **keys):
        open_it, config, _ = SOURCES[kind]
        tokenizer = use_tokenizer("bytes", chat_template=str(TEMPLATE))
        return open_it(config(tokenizer=tokenizer, **keys), seq_len=1024, split=split, build=build)

    return open_source


def as_lines(records, path="a.jsonl"):
    Path(path).write_text("".join(f"{json.dumps(one)}\n" for one in records))
    return path


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_are_read_as_the_same_lines_are(kind, open_source):
    records = SOURCES[kind][2]
    datasets.Dataset.from_list(records).save_to_disk("saved")

    lines, rows = open_source(kind, path=as_lines(records)), open_source(kind, dataset=DatasetConfig(path="saved"))

    assert rows.fingerprint == lines.fingerprint
    everything = np.arange(len(lines))
    assert all(np.array_equal(rows.read(everything)[name], one) for name, one in lines.read(everything).items())


def test_a_key_that_other_rows_have_and_this_one_has_not_is_not_there(open_source):
    """Arrow gives all messages of a data set the keys of any of them, and writes nothing into the others."""
    records = [{"messages": turns("a", "b")}, {"messages": [*turns("a", "b"), {"role": "user", "name": "x"}]}]
    records[1]["messages"][2]["content"] = "c"
    datasets.Dataset.from_list(records).save_to_disk("saved")
    assert datasets.load_from_disk("saved")[0]["messages"][0]["name"] is None

    given = open_source("chat", dataset=DatasetConfig(path="saved"))

    assert given.fingerprint == open_source("chat", path=as_lines(records)).fingerprint


def test_a_split_and_files_of_a_format_are_chosen_by_their_keys(open_source):
    parts = {"train": PAIRS[:30], "test": PAIRS[30:]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(one) for name, one in parts.items()}).save_to_disk("saved")
    Path("more").mkdir()
    datasets.Dataset.from_list(PAIRS).to_parquet("more/a.parquet")
    kind = "preference_pairs"

    default = open_source(kind, dataset=DatasetConfig(path="saved"))
    test = open_source(kind, dataset=DatasetConfig(path="saved", split="test"))
    files = open_source(kind, dataset=DatasetConfig(path="parquet", data_files="more/*.parquet"))
    folder = open_source(kind, dataset=DatasetConfig(path="more"))

    assert [len(one.pairs) for one in (default, test, files, folder)] == [30, 10, 40, 40]
    assert files.fingerprint == folder.fingerprint


def test_what_is_held_out_is_the_rest_and_the_same_each_time(open_source):
    datasets.Dataset.from_list(PAIRS).save_to_disk("saved")
    given = {"dataset": DatasetConfig(path="saved"), "validation": 0.3}

    held_out, learned, again = (
        {pair.key for pair in open_source("preference_pairs", split, **given).pairs}
        for split in ("validation", "train", "validation")
    )

    assert held_out == again
    assert not held_out & learned
    assert len(held_out | learned) == len(PAIRS)
    assert 4 < len(held_out) < 20


def test_a_row_that_cannot_be_used_is_named(open_source):
    datasets.Dataset.from_list([PAIRS[0], {"prompt": "a", "chosen": "b"}]).save_to_disk("saved")

    with pytest.raises(ConfigError, match=r"row 2 of the data set 'saved' has no 'rejected'; its keys are prompt, cho"):
        open_source("preference_pairs", dataset=DatasetConfig(path="saved"))
    with pytest.raises(ConfigError, match="split = 'tran' has no effect"):
        open_source("preference_pairs", dataset=DatasetConfig(path="saved", split="tran"))


def test_a_row_that_cannot_be_read_is_named(open_source):
    """It was a traceback of the library's."""
    answers = pa.array([b"a", b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"prompt": ["q", "r"], "completion": answers}), "a.parquet")

    with pytest.raises(ConfigError, match=r"the data set 'parquet' .*is damaged at row 2 or later: UnicodeDecodeError"):
        open_source("prompt_completion", dataset=DatasetConfig(path="parquet", data_files="a.parquet"))


JOB = """
[model]
name = "transformer"
dim = 16
n_layers = 1
n_heads = 2
[data]
name = "preference_pairs"
reference = "r.npz"
[loss]
name = "dpo"
[train]
steps = 1
seq_len = 64
[optimizer]
name = "adamw"
lr = 1e-3
[eval]
interval = 0
"""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.dataset.path=saved"], ""),
        (["data.path=a.jsonl"], ""),
        ([], "data.dataset: is missing, and so is path; give one of the two: path for JSON Lines, or dataset"),
        (["data.path=a", "data.dataset.path=b"], "data.dataset: is there, and so is path = 'a'; give one of the two"),
        (["data.dataset.path=b", "data.pattern=*.x"], "data.pattern: is about JSON Lines, and has no effect beside"),
        (["data.dataset.path=b", "data.dataset.splt=c"], "unknown key; did you mean 'split'?"),
    ],
)
def test_a_job_names_files_or_a_data_set(settings, said, tmp_path, capsys):
    (tmp_path / "job.toml").write_text(JOB)

    code = main(["validate", str(tmp_path / "job.toml"), *settings])

    assert code == (2 if said else 0)
    assert said in capsys.readouterr().err
