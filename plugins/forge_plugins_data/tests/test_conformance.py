"""The conformance kit on everything that the distribution provides."""

import json
from typing import ClassVar

import numpy as np
import pytest

from forge_plugins_data.bpe import train_bpe
from forge_plugins_data.bytes_tokenizer import BytesTokenizer
from forge_plugins_data.documents import Unit
from forge_plugins_data.prepare import prepare
from forge_plugins_data.progress import Progress
from forge_plugins_data.tokenizer_config import BytesConfig
from forge_testing.callback import CallbackConformance
from forge_testing.data_source import DataSourceConformance
from forge_testing.tokenizer import TokenizerConformance


def write_text(folder):
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(20):
        words = " ".join(str(number) for number in rng.integers(0, 10**6, rng.integers(1, 40)))
        (folder / f"{i}.txt").write_text(words)
    return folder


CUTS = {
    "packed": {"document_mask": True},
    "plain": {"document_mask": False},
    "best fit": {"document_mask": True, "packing": "best_fit"},
    "best fit without a mask": {"packing": "best_fit"},
}


class TestTextFiles(DataSourceConformance):
    component = "forge-plugins-data:text_files"

    @pytest.fixture(autouse=True, params=CUTS.values(), ids=CUTS)
    def text(self, tmp_path, request):
        path = str(write_text(tmp_path / "text"))
        self.config = {"path": path, "validation": 0.2, **request.param}


class TestTokenFiles(DataSourceConformance):
    component = "forge-plugins-data:token_files"

    @pytest.fixture(autouse=True, params=CUTS.values(), ids=CUTS)
    def prepared(self, tmp_path, request):
        text, output = write_text(tmp_path / "text"), tmp_path / "tokens"
        prepare([str(text)], output, tokenizer=BytesTokenizer(BytesConfig()), unit_size=500, progress=Progress())
        self.config = {"path": str(output), "validation": 0.2, **request.param}


class TestJsonl(DataSourceConformance):
    component = "forge-plugins-data:jsonl"

    @pytest.fixture(autouse=True, params=[True, False], ids=["packed", "plain"])
    def records(self, tmp_path, request):
        texts = [file.read_text() for file in write_text(tmp_path / "text").iterdir()]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.config = {"path": str(tmp_path / "a.jsonl"), "validation": 0.2, "document_mask": request.param}


class TestChat(DataSourceConformance):
    component = "forge-plugins-data:chat"
    seq_len = 96

    @pytest.fixture(autouse=True, params=["cut", "skip"])
    def chats(self, tmp_path, request):
        texts = [file.read_text() for file in sorted(write_text(tmp_path / "text").iterdir())]
        chats = [
            [("user", text[:4]), ("assistant", text[4 : 5 + 9 * n]), ("user", "more"), ("assistant", text)][: 2 + n % 3]
            for n, text in enumerate(texts)
        ]
        lines = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}</>{% endfor %}"
        (tmp_path / "chat.jinja").write_text(template + "{% if add_generation_prompt %}<assistant>{% endif %}")
        tokenizer = {"name": "bytes", "chat_template": str(tmp_path / "chat.jinja")}
        path = str(tmp_path / "a.jsonl")
        self.config = {"path": path, "validation": 0.3, "too_long": request.param, "tokenizer": tokenizer}


class TestPromptCompletion(DataSourceConformance):
    component = "forge-plugins-data:prompt_completion"
    seq_len = 64

    @pytest.fixture(autouse=True, params=["cut", "skip"])
    def pairs(self, tmp_path, request):
        texts = [file.read_text() for file in sorted(write_text(tmp_path / "text").iterdir())]
        lines = [{"prompt": text[:4], "completion": text[4 : 5 + 9 * n]} for n, text in enumerate(texts)]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.config = {"path": str(tmp_path / "a.jsonl"), "validation": 0.3, "too_long": request.param}


class TestPreferencePairs(DataSourceConformance):
    component = "forge-plugins-data:preference_pairs"
    seq_len = 64

    @pytest.fixture(autouse=True, params=["cut", "skip"])
    def pairs(self, tmp_path, request):
        texts = [file.read_text() for file in sorted(write_text(tmp_path / "text").iterdir())]
        lines = [{"prompt": text[:4], "chosen": text[4 : 5 + 9 * n], "rejected": "no"} for n, text in enumerate(texts)]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.config = {"path": str(tmp_path / "a.jsonl"), "validation": 0.3, "too_long": request.param}


class TestReferenceCheck(CallbackConformance):
    component = "forge-plugins-data:reference_check"
    config: ClassVar = {"tolerance": 100.0}
    host_reads_when_not_logged = True  # at the first step, which is always logged


class TestHuggingFace(DataSourceConformance):
    component = "forge-plugins-data:huggingface"

    @pytest.fixture(autouse=True, params=[True, False], ids=["packed", "plain"])
    def saved(self, tmp_path, request):
        datasets = pytest.importorskip("datasets")
        texts = [file.read_text() for file in sorted(write_text(tmp_path / "text").iterdir())]
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "corpus"))
        self.config = {
            "path": str(tmp_path / "corpus"),
            "cache": str(tmp_path / "prepared"),
            "validation": 0.2,
            "document_mask": request.param,
        }


class TestHuggingFaceStreaming(DataSourceConformance):
    component = "forge-plugins-data:huggingface_streaming"
    holds_out = False

    @pytest.fixture(autouse=True, params=[True, False], ids=["packed", "plain"])
    def saved(self, tmp_path, request):
        datasets = pytest.importorskip("datasets")
        texts = [file.read_text() for file in sorted(write_text(tmp_path / "text").iterdir())]
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "corpus"))
        keys = {"streams": 3, "shuffle_buffer": 4, "document_mask": request.param}
        self.config = {"path": str(tmp_path / "corpus"), **keys}


class TestSynthetic(DataSourceConformance):
    component = "forge-plugins-data:synthetic"
    config: ClassVar = {"validation": 20}


class TestMixture(DataSourceConformance):
    component = "forge-plugins-data:mixture"

    @pytest.fixture(autouse=True, params=[True, False], ids=["packed", "plain"])
    def sources(self, tmp_path, request):
        keys = {"name": "text_files", "path": str(write_text(tmp_path / "text")), "document_mask": request.param}
        sources = [
            {"name": "even", "weight": 2, "source": {**keys, "exclude": ["*[13579].txt"], "validation": 0.3}},
            {"name": "odd", "weight": 1, "source": {**keys, "exclude": ["*[02468].txt"]}},
        ]
        self.config = {"sources": sources}


class TestMixtureOfStreams(DataSourceConformance):
    component = "forge-plugins-data:mixture"

    @pytest.fixture(autouse=True)
    def sources(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        folder = write_text(tmp_path / "text")
        files = sorted(folder.iterdir())
        datasets.Dataset.from_dict({"text": [file.read_text() for file in files[::2]]}).save_to_disk(
            str(tmp_path / "corpus")
        )
        for file in files[::2]:
            file.unlink()
        streamed = {"name": "huggingface_streaming", "path": str(tmp_path / "corpus"), "shuffle_buffer": 4}
        self.config = {
            "sources": [
                {"name": "few", "weight": 2, "source": {**streamed, "streams": 2}},
                {"name": "more", "weight": 1, "loss_weight": 2, "source": {**streamed, "streams": 4}},
                {"name": "text", "weight": 1, "source": {"name": "text_files", "path": str(folder), "validation": 0.3}},
            ]
        }


class TestTextFilesHoldingNothingOut(DataSourceConformance):
    component = "forge-plugins-data:text_files"
    holds_out = False

    @pytest.fixture(autouse=True)
    def text(self, tmp_path):
        self.config = {"path": str(write_text(tmp_path / "text"))}


class TestBytes(TokenizerConformance):
    component = "forge-plugins-data:bytes"


class TestTokenizerFile(TokenizerConformance):
    component = "forge-plugins-data:tokenizer_file"
    config: ClassVar = {"path": "bpe.json"}

    @pytest.fixture
    def base(self, tmp_path):
        (tmp_path / "a.txt").write_text("def f(x): return x, or something like naïve text " * 20)
        trained = train_bpe([Unit("text", (str(tmp_path / "a.txt"),))], 320, "text", "strict")
        trained.save(str(tmp_path / "bpe.json"))
        return tmp_path
