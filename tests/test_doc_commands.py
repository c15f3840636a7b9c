"""The commands of README and docs do what the pages say, typed in their order in one folder.

The demo and ``c.toml`` are cut short here, so that a page takes seconds; the commands are those of the page, word for
word. Commands that need what a test does not have are named with the reason.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fork_server
from doc_pages import commands
from forge_core.cli import main

ROOT = Path(__file__).resolve().parents[1]
BY_A_READER = (
    "quickstart",
    "configuration",
    "data",
    "checkpoints",
    "running",
    "plan",
    "moe",
    "moe-layouts",
    "slurm",
    "command-line",
)
LOOKING = ("look-into-a-model", "interventions", "stores", "compare-representations", "sparse-autoencoders")
OF_THEIR_OWN = (("chat",), LOOKING, ("neural-recordings",), ("published-models",), ("vision-language",))
"""Pages that begin with the demo themselves, with those that go on; tests/system/test_preference.py has another one."""
AT_NIGHT = ("moe-layouts", "chat", "neural-recordings", "published-models", "vision-language")
"""Pages whose commands have tests of their own, of the plugins that they are of."""
PAGES = ("README.md", *(f"docs/{name}.md" for name in (*BY_A_READER, *itertools.chain(*OF_THEIR_OWN))))

ELSEWHERE = {
    r"^make (demo|test)\b": "CI runs the second, and its reader the first",
    r"^python3 -m venv|^pip install": "tests/outsider installs wheels in an environment of its own",
    r"^torchrun .*(--nnodes|…)|^export TORCH": "needs several hosts",
    r"^srun ": "needs a job of Slurm; test_preemption has one",
    r"s3://|--mirror\b": "needs an object store; tests/system/test_mirror.py has one",
    r"^forge convert .*llava": "forge_plugins_vlm/tests/test_weight_layouts.py has small models of it",
    r"--install-completion": "a home for it is in the tests of forge-plugins-monitor",
    r"^forge (runs|explain)": "the tests of forge-plugins-monitor have runs that end so",
    r"^forge docs .*--browser": "opens one",
    r"^forge doctor": "tests/test_doctor.py looks at this machine",
    r"^forge eval .*--nproc": "tests/system/test_eval_command.py has layouts",
    r"^forge submit": "the tests of forge-plugins-slurm have a Slurm",
    r"^forge plan c.toml --world-size 1024": "is about a model of 70B; tests/plan",
    r"^forge plan .*(--search|calibrat)": "takes a minute; tests/plan, and the how-to page has the first",
    r"--nproc auto|--nproc 8": "takes as many processes as there are GPUs",
    r"^forge run c.toml .*--parallel\.(tp|pp)=2": "tests/parity has these layouts",
}
"""What is not typed here, by pattern, and who does it."""


C = """
[run]
name = "c"
[model]
name = "transformer"
dim = 128
n_layers = 4
n_heads = 8
max_seq_len = 128
[data]
name = "text_files"
path = "corpus"
pattern = "**/*.txt"
validation = 0.2
[train]
steps = 4
seq_len = 32
batch_size = 2
precision = "fp32"
[optimizer]
name = "adamw"
lr = 1e-3
[[optimizer.groups]]
pattern = "*norm*"
lr_scale = 0.1
[metrics]
interval = 1
[checkpoint]
interval = 100
"""

EXPERIMENT = """\
[model]
name = "transformer"
dim = 96
n_layers = 2
n_heads = 7
[data]
name = "text_files"
path = "corpus"

[train]
seq_len = 64
steps = "100"

batch_sise = 4

[optimizer]
name = "adamww"
lr = 1e-3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what the pages speak of: the demo and ``c.toml``, a corpus, prompts, two configurations to compare."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", folder / "configs")
    _write_downloaded_model(folder / "models/Qwen3-0.6B")
    _write_model_for_images(folder / "models/gemma-3-4b-it")
    demo = folder / "configs/demo.toml"
    short = {"steps = 400": "steps = 12", "seq_len = 256": "seq_len = 16", "batches = 16": "batches = 1"}
    short |= {"warmup_steps = 20": "warmup_steps = 2", "n_layers = 4": "n_layers = 3"}
    short |= {"{stdlib}": "corpus", ".py": ".txt"}
    text = demo.read_text()
    for long, brief in short.items():
        assert long in text, long
        text = text.replace(long, brief)
    demo.write_text(text.replace("validation = 0.03", "validation = 0.2"))
    chats = folder / "configs/chat/chat_demo.toml"
    chats.write_text(chats.read_text().replace("steps = 200", "steps = 24\nseq_len = 256\nbatch_size = 2"))
    lens = folder / "configs/tuned_lens_demo.toml"
    lens.write_text(lens.read_text().replace("steps = 100", "steps = 12"))
    dictionary = folder / "configs/sae_demo.toml"
    short = {"steps = 600": "steps = 20", "seq_len = 256": "seq_len = 16", "latents = 3072": "latents = 64"}
    text = dictionary.read_text()
    for long, brief in short.items():
        assert long in text, long
        text = text.replace(long, brief)
    dictionary.write_text(text)
    stimuli = [f"s{number}" for number in range(12)]
    lines = (f"{name},line {number} of {number * 7}\n" for number, name in enumerate(stimuli))
    (folder / "sentences.csv").write_text("stimulus_id,text\n" + "".join(lines))
    responses = np.random.default_rng(0).normal(size=(12, 3, 5))
    np.savez(folder / "recordings.npz", stimulus_id=stimuli, values=responses)
    (folder / "c.toml").write_text(C)
    (folder / "experiment.toml").write_text(EXPERIMENT)
    for name, steps in (("a", 4), ("b", 8)):
        (folder / f"{name}.toml").write_text(C.replace("steps = 4", f"steps = {steps}"))
    for number in range(30):
        (folder / "corpus" / f"{number}.txt").parent.mkdir(exist_ok=True)
        words = " ".join(str(one * one % 997) for one in range(number, number + 400))
        (folder / "corpus" / f"{number}.txt").write_text(words)
    (folder / "prompts.txt").write_text("def \nclass \n")
    _write_more_text(folder)
    _write_captions(folder)
    return folder


def _write_captions(folder: Path) -> None:
    """The configuration of the page on vision-language models, with fewer steps."""
    page = (ROOT / "docs/vision-language.md").read_text(encoding="utf-8")
    (text,) = (
        block for block in re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S) if 'name = "captions"' in block
    )
    short = {"steps = 600": "steps = 4", "warmup_steps = 30": "warmup_steps = 2", "batch_size = 64": "batch_size = 4"}
    short |= {"interval = 300": "interval = 0", "samples = 64": "samples = 4"}
    for long, brief in short.items():
        assert long in text, long
        text = text.replace(long, brief)
    (folder / "captions.toml").write_text(text)


def _write_downloaded_model(folder: Path) -> None:
    """A small one, with a tokenizer of bytes."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "vocab_size": 257}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, eos_token_id=256)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: number for number, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder.parents[1] / "text").mkdir()
    (folder.parents[1] / "text/0.txt").write_text(" ".join(map(str, range(9999))))


def _write_model_for_images(folder: Path) -> None:
    """A small Gemma 3 with a vision part, for the command that leaves that part out."""
    import transformers

    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "vocab_size": 257}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=256
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def _write_more_text(folder: Path) -> None:
    """What ``forge data prepare`` reads on its page."""
    import pyarrow
    from pyarrow import parquet
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({chr(256 + one): one for one in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "wiki").mkdir()
    parquet.write_table(pyarrow.table({"text": ["a page", "another"]}), folder / "wiki/0.parquet")
    with pyarrow.CompressedOutputStream(str(folder / "more.jsonl.zst"), "zstd") as stream:
        stream.write(b'{"text": "a line"}\n')


@pytest.fixture
def type_in(folder, monkeypatch, capfd):
    """Types a command of ``forge``; gives back its exit code and what it said. Several ranks are real processes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is ast.parse?\n"))
    monkeypatch.setattr(subprocess, "Popen", fork_server.Popen)  # for commands that start a run

    def run(command: str) -> tuple[int, str]:
        line, _, target = command.partition(" > ")
        words = shlex.split(line, comments=True)
        words = [os.path.expanduser(one) for one in words]  # noqa: PTH111 - as a shell does: ~key stays as it is
        capfd.readouterr()
        if "--nproc" in words or words[0] == "python":
            module = [] if words[0] == "python" else ["-m", "forge_core"]
            done = fork_server.run(
                [sys.executable, *module, *words[1:]],
                capture_output=True,
                text=True,
                env=os.environ,
                stdin=subprocess.DEVNULL,
            )
            return done.returncode, done.stdout + done.stderr
        code = main(words[1:])
        said = capfd.readouterr()
        if target:
            Path(target.strip()).write_text(said.out)
        return code, said.out + said.err

    return run


@pytest.fixture
def wrong(type_in):
    """Types the commands of a page; gives back what is not as the page says."""

    def type_all(page: str) -> list[str]:
        found = []
        for command, shown in commands(page):
            if any(re.search(pattern, command) for pattern in ELSEWHERE):
                continue
            code, said = type_in(command)
            missing = [line for line in fixed_parts(shown) if line not in said]
            if missing or code != (2 if shown and shown[0].startswith("error: ") else 0):
                found.append(f"{page}: {command}: exit code {code}; not said: {missing}; said:\n{said}")
        return found

    return type_all


@pytest.mark.slow
@pytest.mark.parametrize(
    "pages",
    [[one for one in BY_A_READER if one not in AT_NIGHT], pytest.param(BY_A_READER, marks=pytest.mark.nightly)],
    ids=["by-day", "all"],
)
def test_what_a_page_types_works_and_says_what_it_shows(wrong, folder, monkeypatch, tmp_path, pages):
    """README first; each page begins where its reader is then."""
    found = []
    for page in ("README.md", *(f"docs/{name}.md" for name in pages)):
        monkeypatch.chdir(folder if page == "README.md" else shutil.copytree(folder, tmp_path / page))
        found += wrong(page)
    assert not found, "\n".join(found)
    assert sorted(path.name for path in (folder / "runs").iterdir()) == ["demo", "four", "mine", "wider"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pages",
    [pytest.param(pages, marks=[pytest.mark.nightly] if pages[0] in AT_NIGHT else []) for pages in OF_THEIR_OWN],
    ids=lambda pages: pages[0],
)
def test_what_a_page_that_begins_with_the_demo_types_works(wrong, pages, folder, monkeypatch, tmp_path):
    monkeypatch.chdir(shutil.copytree(folder, tmp_path / "reader", ignore=shutil.ignore_patterns("runs")))
    found = [problem for page in pages for problem in wrong(f"docs/{page}.md")]
    assert not found, "\n".join(found)


def fixed_parts(shown: list[str]) -> list[str]:
    """What of the lines that a page shows is the same on every machine."""
    return [line for line in shown if line.strip() and "…" not in line and not re.search(r"\d\.\d", line)]


def test_every_command_of_a_page_is_typed_here_or_said_to_be_elsewhere():
    every = [command for page in PAGES for command, _ in commands(page)]

    unused = [pattern for pattern in ELSEWHERE if not any(re.search(pattern, command) for command in every)]
    assert unused == []
    typed = ("forge ", "python ")
    unknown = [one for one in every if not one.startswith(typed) and not any(re.search(p, one) for p in ELSEWHERE)]
    assert unknown == []
