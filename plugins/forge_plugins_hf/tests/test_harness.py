"""The evaluation ``lm_eval`` gives the figures of the harness's own model for the converted one, in every layout."""

import io
import json
import os
import random
import shutil
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager, manager

import fork_server
from forge_core.cli import main
from forge_core.errors import ConfigError
from forge_core.registry.discovery import discover
from forge_plugins_hf.harness import Harness
from forge_plugins_hf.harness_config import HarnessConfig
from forge_plugins_hf.harness_model import ModelInLayout
from forge_testing.evaluation import EvaluationConformance
from parity_matrix.launch import JOB, Launcher, Work
from parity_matrix.selection import by_day_or_night, selected_cells

HALF = "train.batch_size=2"
LAYOUTS = {
    "fsdp2": [HALF],
    "tp2": ["parallel.tp=2"],
    "pp2": ["parallel.pp=2", "train.batch_size=1", "train.grad_accumulation=4"],
    "cp2": ["parallel.cp=2"],
}
TASKS = {
    "choices": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: "{{gold}}"
        metric_list: [{metric: acc}, {metric: acc_norm}]
        num_fewshot: 1
    """,
    "letters": """
        output_type: multiple_choice
        doc_to_text: ""
        doc_to_choice: ["1", "2"]
        doc_to_target: "{{gold % 2}}"
        target_delimiter: ""
        metric_list: [{metric: acc}, {metric: f1}]
        num_fewshot: 0
    """,
    "last_words": """
        output_type: loglikelihood
        doc_to_text: "{{question}} "
        doc_to_target: "{{choices[0]}}"
        target_delimiter: ""
        metric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc}]
    """,
    "answers": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: ": {{choices | join(' ')}}"
        generation_kwargs: {until: ["\\nline", "77"], max_gen_toks: 12, do_sample: false}
        metric_list: [{metric: exact_match}, {metric: chrf}]
        filter_list:
          - {name: first-digit, filter: [{function: regex, regex_pattern: '(\\d)'}, {function: take_first}]}
          - {name: whole, filter: [{function: take_first}]}
    """,
    "texts": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
    """,
}
TOKENIZER = 'data.tokenizer={name="tokenizer_file", path="tokenizer.json", end_of_document="<end>"}'
EVALUATION = f'{{name="lm_eval", tasks={json.dumps([*TASKS])}, include_path="tasks", bootstrap_iters=20}}'


def documents():
    """Questions of one to sixty words, so that some are longer than the model's longest sequence of 64 tokens."""
    draw = random.Random(0)

    def words(most):
        return " ".join(f"line {draw.randrange(32)} of file {draw.randrange(9)}" for _ in range(draw.randint(1, most)))

    for _ in range(11):
        choices = [str(draw.randrange(9999)) for _ in range(3)]
        yield {"question": words(9), "choices": choices, "gold": draw.randrange(3), "text": words(25)}


def write_tasks(folder):
    folder.mkdir()
    lines = [json.dumps(one) for one in documents()]
    (folder / "documents.jsonl").write_text("\n".join(lines))
    for name, keys in TASKS.items():
        data = f"{{data_files: {{test: {folder}/documents.jsonl}}}}"
        text = f"task: {name}\ndataset_path: json\ndataset_kwargs: {data}\ntest_split: test\nfewshot_split: test\n"
        (folder / f"{name}.yaml").write_text(text + "\n".join(line.strip() for line in keys.splitlines()))


def write_tokenizer(folder):
    """Bytes and merges, with a token that stands before each text, as Llama's has."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<begin>", "<end>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    tokenizer.train([str(one) for one in sorted((folder / "long").iterdir())], trainer)
    before = tokenizers.processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 0)])
    tokenizer.post_processor = before
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for one in messages %}{{ one.content }}: {% endfor %}"
    beside = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**beside, "chat_template": template}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with tasks, a trained run ``one``, and its model converted in ``hf``; it is the working directory."""
    folder = tmp_path_factory.mktemp("harness")
    launcher = Launcher(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")  # of ranks; here the libraries have been imported
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        patch.setenv("HF_HOME", str(folder / "cache"))
        write_tasks(folder / "tasks")
        write_tokenizer(folder)
        training = ["run.name=one", "callbacks=[]", "train.steps=60", "optimizer.lr=1e-2", "eval.interval=0"]
        assert main(["run", str(JOB), TOKENIZER, *training]) == 0
        assert main(["convert", "runs/one", "--to", "huggingface", "--out", "hf"]) == 0
        yield SimpleNamespace(folder=folder, launcher=launcher)


def expected_of(tasks, **options):
    """What the harness says of the converted model, by the names of ours."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("DISABLE_MULTIPROC", "1")
        for name in ("LOCAL_RANK", "WORLD_SIZE"):  # accelerate would wait for other ranks
            patch.delenv(name, raising=False)
        found = simple_evaluate(
            model=HFLM("hf", device="cpu", dtype="float32", batch_size=3),
            tasks=[*tasks],
            task_manager=TaskManager(include_path="tasks", include_defaults=False),
            bootstrap_iters=20,
            **options,
        )
    return {
        f"eval/lm_eval/{task}/{metric}" + (f"/{kept}" if kept != "none" else ""): value
        for task, values in found["results"].items()
        for (metric, comma, kept), value in ((name.partition(","), value) for name, value in values.items())
        if comma and value != "N/A"
    }


def evaluated(*options, tasks=TASKS):
    """What ``forge eval`` says."""
    chosen = ["--evaluation", "lm_eval", "--tasks", ",".join(tasks), "--include-path", "tasks"]
    with redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries that compute metrics
        assert main(["eval", "runs/one", *chosen, "--bootstrap-iters", "20", "--json", *options]) == 0
    found = json.loads(said.getvalue())
    assert found.pop("step") == 60
    return found


@pytest.fixture(scope="module")
def expected(trained):
    return expected_of(TASKS)


def test_the_figures_are_the_harnesss_own(trained, expected):
    found = evaluated()

    assert len(expected) == 23
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert {"eval/lm_eval/choices/acc_stderr", "eval/lm_eval/answers/exact_match/first-digit"} <= found.keys()
    assert found["eval/lm_eval/answers/chrf/whole"] > 0


@pytest.mark.parametrize("options", [{"num_fewshot": 2, "limit": 4}, {"limit": 0.5}], ids=str)
def test_keys_mean_what_they_mean_there(trained, options):
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]

    found = evaluated(*words, tasks=["choices", "letters", "answers"])

    assert found == pytest.approx(expected_of(["choices", "letters", "answers"], **options), rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def in_layouts(trained, request):
    """The last lines of runs that begin with that model, and whose only step is next to none."""
    layouts = sorted(selected_cells(request))
    settings = [TOKENIZER, "checkpoint.load.path=runs/one", "train.steps=1", "optimizer.lr=1e-30"]
    settings += ["scheduler.warmup_steps=0", "eval.interval=0"]
    settings += [f"evaluations=[{EVALUATION}]"]
    works = [Work(name, 2, [*settings, *LAYOUTS[name]]) for name in layouts]
    trained.launcher.launch(works)
    return {name: trained.launcher.metrics(name)[-1] for name in layouts}


@pytest.mark.parametrize("cell", by_day_or_night(LAYOUTS, LAYOUTS))
def test_they_are_in_every_layout_of_a_run(in_layouts, expected, cell):
    found = {name: value for name, value in in_layouts[cell].items() if name.startswith("eval/")}

    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_questions_may_be_messages(trained):
    found = evaluated("--apply-chat-template", tasks=["choices", "answers"])

    assert found == pytest.approx(expected_of(["choices", "answers"], apply_chat_template=True), rel=1e-6, abs=1e-9)


def test_several_processes_measure_them_together(trained, expected):
    words = ["--evaluation", "lm_eval", "--tasks", "choices,texts", "--include-path", "tasks", "--json"]
    words += ["--bootstrap-iters", "20"]
    command = [sys.executable, "-m", "forge_core", "eval", "runs/one", *words, "--nproc", "2", "parallel.tp=2"]

    done = fork_server.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wanted = {name: value for name, value in expected.items() if "choices" in name or "texts" in name}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-9)


def test_an_answer_to_no_text_begins_behind_the_end_of_one(monkeypatch):
    """It was read off padding."""
    tokenizer = SimpleNamespace(
        encode_prompt=lambda text: [*text.encode()], decode=bytes, end=256, prefix=256, end_text=None
    )
    layout = SimpleNamespace(tp=1, cp=1, pp=1)
    job = SimpleNamespace(parallel=layout, train=SimpleNamespace(batch_size=2))
    context = SimpleNamespace(job=job, world_size=1, log=lambda line: None, sum_over_ranks=lambda sums: sums)
    asked = []
    monkeypatch.setattr(
        "forge_plugins_hf.harness_model.generate_in_layout",
        lambda context, prompts, **_: asked.extend(prompts) or [[] for _ in prompts],
    )
    model = ModelInLayout(context, tokenizer, (), 64)

    model.generate_until([SimpleNamespace(args=(text, {"max_gen_toks": 4})) for text in ("a", "")])

    assert asked == [[97], [256]]


def refused(capfd, *options):
    assert main(["eval", "runs/one", "--evaluation", "lm_eval", *options]) == 2
    return capfd.readouterr().err


@pytest.fixture
def fewer_tasks(tmp_path, monkeypatch):
    """Of the library's own tasks those that begin with an h: all of them are 10,000 files to read."""
    for own in Path(manager.__file__).parent.glob("h*"):
        shutil.copytree(own, tmp_path / "tasks" / own.name)
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "tasks/manager.py"))


def test_a_task_that_is_not_there_is_refused_with_the_nearest_names(trained, fewer_tasks, capfd, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "mine.yaml").write_text("task: mine\n  metric_list: [\n")

    said = refused(capfd, "--tasks", "helaswag", "--include-path", str(mine))

    assert "tasks: 'helaswag' is no task of lm_eval or a file in include_path; did you mean 'hellaswag'" in said
    assert f"Passed over there: {mine}/mine.yaml (mapping values are not allowed in this context" in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "evaluations[0].tasks: is required (an array of strings)"),
        (["--tasks", "texts,texts"], "tasks: names 'texts' twice"),
        (["--tasks", "texts", "--include-path", "nowhere"], "include_path = 'nowhere': there is no such folder"),
        (["--tasks", "answers", "--include-path", "tasks", "--max-length", "12"], "has up to 12 tokens (max_gen_toks)"),
        (["--tasks", "texts", "--task", "a"], "--task: no such option; did you mean '--tasks'?"),
    ],
)
def test_keys_that_do_not_fit_are_refused(trained, capfd, options, sentence):
    assert sentence in refused(capfd, *options)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("generation_kwargs: {do_sample: true, temperature: 0.7, until: []}", "samples its answers (do_sample)"),
        ("generation_kwargs: {num_beams: 4, until: []}", "asks for num_beams in generation_kwargs"),
        ("generation_kwargs: {until: []}", "has up to 256 tokens (max_gen_toks), which leaves no room"),
        ("unsafe_code: true", "runs code that the model writes, which is not done here"),
        ("test_split: exam", "the task 'wrong' cannot be loaded: "),
        ("dataset_path: acme/nowhere", "Data of the hub need a network, or a cache (HF_HOME)"),
    ],
)
def test_a_task_that_cannot_be_done_is_refused_before_it_begins(trained, capfd, tmp_path, keys, sentence):
    text = (trained.folder / "tasks/answers.yaml").read_text().replace("task: answers", "task: wrong")
    (tmp_path / "wrong.yaml").write_text(f"{text}\n{keys}\n")

    said = refused(capfd, "--tasks", "wrong", "--include-path", str(tmp_path))
    assert sentence in said
    assert "lm_eval: 11" not in said


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("forge_core.registry.catalog.is_importable", lambda module: module != "lm_eval")

    with pytest.raises(ConfigError, match=r"needs 'lm_eval', which .*; pip install 'forge-plugins-hf\[lm_eval\]'"):
        discover().lookup("evaluation", "lm_eval")


def test_data_without_a_tokenizer_cannot_be_asked(trained):
    with pytest.raises(ConfigError, match="lm_eval: the training data have no tokenizer"):
        Harness(HarnessConfig(tasks=("texts",), include_path="tasks"), open_data=None, tokenizer=None, seq_len=8)


class TestConformance(EvaluationConformance):
    """With a tokenizer of our own, which has no form of Hugging Face's."""

    component = "forge-plugins-hf:lm_eval"

    @pytest.fixture(autouse=True)
    def _tasks(self, trained, monkeypatch):
        config = {"tasks": ["choices", "texts"], "include_path": "tasks", "max_length": 24, "limit": 3}
        monkeypatch.setattr(self, "config", config, raising=False)

    def tokenizer(self):
        return SimpleNamespace(
            encode=lambda text: np.array([ord(letter) % 31 for letter in text]),
            decode=lambda ids: "".join(chr(97 + one) for one in ids),
            save=lambda folder: {},
            end_of_document=31,
        )
