"""``forge eval``: what a trained model is measured to be is what its run has measured, on any ranks."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

import fork_server
from doc_pages import DOCS
from forge_core.checkpoint.store import find_checkpoint
from forge_core.cli import main
from forge_core.registry.discovery import discover
from forge_plugins_data.token_format import read_header
from forge_plugins_inference.checkpoint_job import CheckpointJob
from forge_plugins_inference.config import ExactMatchConfig
from forge_plugins_inference.generate_in_layout import generate_in_layout
from forge_plugins_inference.generation import generate
from forge_plugins_weights.loading import load_model, opened
from forge_testing.package import PluginConformance

EVALUATED = ("eval.interval=10", "eval.batches=3", 'evaluations=[{name="accuracy"}]')
SHARDED = ("run.name=sharded", "--nproc", "2", "parallel.tp=2", "train.global_batch_size=4")


class ContinueText(PluginConformance):
    dist = "continue-text"


@pytest.fixture(scope="module")
def runs(shared_tiny):
    """The last evaluations of three runs, by name."""
    plain = shared_tiny.completed("run.name=plain", *EVALUATED)
    bf16 = shared_tiny.completed("run.name=bf16", "train.precision=bf16", *EVALUATED)
    sharded = shared_tiny.completed(*SHARDED, *EVALUATED)
    return {"plain": plain[-1], "bf16": bf16[-1], "sharded": sharded[-1]}


@pytest.fixture
def evaluate(shared_tiny, runs, capsys):
    """A function that evaluates a run in this process and returns the values."""

    def call(name, *arguments):
        assert main(["eval", str(shared_tiny.path(name)), "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.mark.parametrize("name", ["plain", "bf16"])
def test_the_values_are_those_of_the_run(evaluate, runs, name):
    assert evaluate(name) == runs[name]


def test_a_sharded_run_is_evaluated_on_one_process(evaluate, runs):
    found = evaluate("sharded")

    assert found.keys() == runs["sharded"].keys()
    for key, value in found.items():
        assert value == pytest.approx(runs["sharded"][key], rel=1e-2 if "accuracy" in key else 1e-5)


@pytest.mark.parametrize("layout", [[], ["parallel.tp=1", "parallel.pp=2"]], ids=["its own layout", "another layout"])
def test_several_processes_evaluate_together(shared_tiny, runs, layout):
    command = [sys.executable, "-m", "forge_core", "eval", str(shared_tiny.path("sharded")), "--nproc", "2", "--json"]
    done = fork_server.run(
        [*command, *layout], env=shared_tiny.environment(), capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval/loss"] == pytest.approx(runs["sharded"]["eval/loss"], rel=1e-5)


def test_other_data_are_evaluated_whole(evaluate, shared_tiny, runs):
    held_out = evaluate("plain", "--evaluation", "perplexity", "evaluations.0.samples=12")
    whole = evaluate("plain", "--evaluation", "perplexity", f"--data.path={shared_tiny.folder / 'text'}")

    assert held_out["eval/perplexity/loss"] == runs["plain"]["eval/loss"]
    assert whole["eval/perplexity/tokens"] > 3 * held_out["eval/perplexity/tokens"]


@pytest.mark.parametrize(
    "words", [["--data.path", "{}"], ["data={{name='text_files', path='{}'}}"]], ids=["two words", "a table"]
)
def test_settings_of_data_are_known_in_every_shape(evaluate, shared_tiny, words):
    text = shared_tiny.folder / "few"
    text.mkdir(exist_ok=True)
    shutil.copy(shared_tiny.folder / "text" / "0.txt", text)
    plainly = evaluate("plain", "--evaluation", "perplexity", f"data.path={text}")

    found = evaluate("plain", "--evaluation", "perplexity", *(word.format(text) for word in words))

    assert found == plainly


def test_phases_of_the_run_do_not_bind_other_data(evaluate, shared_tiny, capsys):
    text = f'{{name="text_files", path="{shared_tiny.folder / "text"}"}}'
    mixture = f'data={{name="mixture", sources=[{{name="a", weight=1.0, source={text}}}]}}'
    shared_tiny.completed("run.name=mixed", "train.steps=3", mixture, "phases=[{at=2, data={weights={a=2.0}}}]")
    capsys.readouterr()

    assert evaluate("mixed", "--evaluation", "perplexity", f"data={text}")["eval/perplexity/loss"] > 0


def test_a_path_alone_is_text_for_the_tokenizer_of_a_mixture(shared_tiny, capsys):
    text, ids = shared_tiny.folder / "text" / "0.txt", shared_tiny.folder / "ids"
    assert main(["data", "prepare", str(text), "-o", str(ids), "--train-bpe", "300", "--workers", "1"]) == 0
    mixture = f'data={{name="mixture", sources=[{{name="a", weight=1, source={{name="token_files", path="{ids}"}}}}]}}'
    shared_tiny.completed("run.name=mixed_ids", "train.steps=1", "scheduler.warmup_steps=0", mixture)
    windows = (read_header(ids / "index.json").tokens - 1) // 32
    shutil.rmtree(ids)  # the tokenizer is in the checkpoint
    capsys.readouterr()

    words = ["--evaluation", "perplexity", "--json", "--data.path", str(text)]
    assert main(["eval", str(shared_tiny.path("mixed_ids")), *words, "data.packing=windows"]) == 0
    assert json.loads(capsys.readouterr().out)["eval/perplexity/tokens"] == windows * 32


def test_a_path_alone_is_refused_by_a_run_without_a_tokenizer(shared_tiny, capsys):
    made_up = 'data={name="synthetic", vocab_size=64}'
    shared_tiny.completed("run.name=made_up", "train.steps=1", "scheduler.warmup_steps=0", made_up)
    capsys.readouterr()

    assert main(["eval", str(shared_tiny.path("made_up")), "--evaluation", "perplexity", "data.path=text"]) == 2
    said = capsys.readouterr().err
    assert "data.path=text: the run's data (synthetic) have no key path, and " in said
    assert "has no tokenizer to read text by; name the source as well, as in data.name=token_files data.path=…" in said


def test_plugins_that_the_run_disables_stay_disabled(shared_tiny, runs, capsys):
    shared_tiny.completed("run.name=without", "train.steps=3", 'plugins.disable=["forge-plugins-inference"]')

    assert main(["eval", str(shared_tiny.path("without")), "--evaluation", "accuracy"]) == 2
    assert "accuracy" in capsys.readouterr().err


def test_people_are_shown_a_table(shared_tiny, runs, capsys):
    assert main(["eval", str(shared_tiny.path("plain")), "--evaluation", "accuracy"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "step 10"
    assert [line.split()[0] for line in rest] == ["eval/accuracy/accuracy", "eval/accuracy/accuracy_top_5"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--evaluation", "acuracy"], "Did you mean 'accuracy'?"),
        (["--evaluaton", "accuracy"], "--evaluaton: no such option; did you mean '--evaluation'?"),
        (["data.path=text"], "data.path=text: say with --evaluation what is evaluated on these data"),
        (["model.dim=64"], "does not fit this model"),
        (["parallel.tp=2"], "plain/checkpoints/step_00000010/job.toml: parallel: 1 rank"),
        (["model.n_heads=3", "parallel.tp=2"], "problems in {}/checkpoints/step_00000010/job.toml"),
        (["train.precison=bf16"], "did you mean 'precision'?"),
        (["--weights", "evaluation"], "weights = 'evaluation': "),
        (["--weights", "evaluation"], "has the trained ones alone; use 'training', or leave it out"),
        (["--weights", "average"], "'average' is not one of 'training', 'evaluation'"),
        (["--evaluation", "accuracy", "--tops", "2"], "--tops: no such option; did you mean '--top'?"),
        (["--evaluation", "accuracy", "--top", "--json"], "--top: needs a value, as in --top=…"),
        (["--evaluation", "accuracy", "--top", "0"], "evaluations.0.top=0: evaluations[0].top: must be at least 1"),
        (["--weight", "training"], "--weight: no such option; did you mean '--weights'?"),
        (["--nproc", "0"], "--nproc: expected a positive number or auto, got '0'"),
        (["--evaluation", "perplexity", "data.path=nowhere"], "evaluations[0].data: "),
    ],
)
def test_what_cannot_be_evaluated_is_told(shared_tiny, runs, capsys, arguments, sentence):
    assert main(["eval", str(shared_tiny.path("plain")), *arguments]) == 2
    assert sentence.replace("{}", str(shared_tiny.path("plain"))) in capsys.readouterr().err


def test_a_job_without_evaluations_asks_for_one(shared_tiny, capsys):
    shared_tiny.completed("run.name=silent", "train.steps=3")

    assert main(["eval", str(shared_tiny.path("silent"))]) == 2
    assert "its job evaluates nothing; say with --evaluation what to measure" in capsys.readouterr().err


@pytest.fixture(scope="module")
def questions(shared_tiny, runs):
    """A file of five questions, the first four with the answers that the trained model gives, and these."""
    checkpoint = find_checkpoint(shared_tiny.path("plain"), print)
    model = load_model(checkpoint, lambda disabled: discover(), torch.device("cpu"), torch.float32)
    prompts = ["The ", "Two words", "a", "Whatever comes", "No "]
    ids = [model.tokenizer.encode(prompt).tolist() for prompt in prompts]
    rows = generate(model.model, ids, max_new_tokens=6, temperature=0, stop=model.tokenizer.end_of_document)
    answers = [model.tokenizer.decode(row) for row in rows]
    lines = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    lines[-1]["answer"] += " and not this"
    file = shared_tiny.folder / "questions.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file, answers


def asked(file):
    return ["--evaluation", "exact_match", f"evaluations.0.path={file}", "evaluations.0.max_new_tokens=6"]


def test_questions_are_answered_as_generate_answers_them(evaluate, questions):
    file, answers = questions

    assert len(set(answers)) > 1
    found = evaluate("plain", *asked(file), 'evaluations.0.stop=""')
    assert found == {"step": 10, "eval/exact_match/exact_match": 0.8, "eval/exact_match/questions": 5}
    assert evaluate("plain", *asked(file), "evaluations.0.samples=4")["eval/exact_match/questions"] == 4


# by day, the command of the page generates in tensor parallelism (below)
@pytest.mark.parametrize("degree", ["dp_shard", "cp", "pp", pytest.param("tp", marks=pytest.mark.nightly)])
def test_questions_are_answered_alike_in_every_layout(shared_tiny, questions, degree):
    command = [sys.executable, "-m", "forge_core", "eval", str(shared_tiny.path("plain")), "--nproc", "2", "--json"]
    layout = [f"parallel.{degree}=2", 'evaluations.0.stop=""']
    done = fork_server.run(
        [*command, *asked(questions[0]), *layout],
        env=shared_tiny.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval/exact_match/exact_match"] == 0.8


def test_generation_goes_on_until_a_document_ends(shared_tiny, runs, questions):
    checkpoint = find_checkpoint(shared_tiny.path("plain"), print)
    job = CheckpointJob.of(checkpoint, (), discover, 1).load(())

    with opened(checkpoint, job, discover(), print) as model, model.evaluating() as context:
        assert not any(part.training for part in context.parts)
        ids = [context.tokenizer.encode(prompt).tolist() for prompt in ("The ", "Two words")]
        whole = generate_in_layout(context, ids, max_new_tokens=6)
        assert [context.tokenizer.decode(tokens) for tokens in whole] == questions[1][:2]
        last = whole[0][1]
        context.tokenizer = SimpleNamespace(end_of_document=last)
        ended = generate_in_layout(context, ids, max_new_tokens=6)

    assert ended == [row[: row.index(last) + 1] if last in row else row for row in whole]
    assert len(ended[0]) < len(whole[0])


def test_a_command_of_others_runs_on_ranks(shared_tiny, runs, questions, make_distribution, capsys):
    page = (DOCS / "hooks" / "forge_commands.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^:caption: (continue_text/\w+\.py)\n(.*?)^```$", page, re.M | re.S))
    site = make_distribution("continue-text", files=files)
    assert sum(bool(line.strip()) for text in files.values() for line in text.splitlines()) < 40
    words = ["continue", str(shared_tiny.path("plain")), "The "]

    PluginConformance.test_commands_on_ranks_start_them(ContinueText())
    assert main(words) == 0
    alone = capsys.readouterr().out
    done = fork_server.run(
        [sys.executable, "-m", "forge_core", *words, "--nproc", "2", "parallel.tp=2"],
        env={**shared_tiny.environment(), "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == alone
    assert alone.startswith("The " + questions[1][0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nproc", "two"], "--nproc: expected a positive number or auto, got 'two'"),
        (["--nproc=2", "parallel.tp=3"], "2 ranks"),
    ],
)
def test_what_is_wrong_with_ranks_of_a_command_is_told_before_they_start(
    shared_tiny, runs, capsys, monkeypatch, arguments, sentence
):
    monkeypatch.setattr("forge_core.launch.launch_command", lambda *_: pytest.fail("ranks were started"))

    assert main(["eval", str(shared_tiny.path("plain")), *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_keys_of_an_evaluation_are_options(evaluate, runs, questions):
    options = ["--path", str(questions[0]), "--max-new-tokens=6", "--samples", "4"]

    both = evaluate("plain", "--evaluation", "accuracy", "--evaluation", "exact_match", *options)

    assert both["eval/exact_match/questions"] == 4
    of_four = evaluate("plain", "--evaluation", "accuracy", "evaluations.0.samples=4")
    assert both["eval/accuracy/accuracy"] == of_four["eval/accuracy/accuracy"]


def test_questions_may_have_ends_of_lines_that_are_none_of_json(evaluate, shared_tiny):
    lines = [{"prompt": f"a{end}b", "answer": "c"} for end in ("\u2028", "\x85", " ")]
    file = shared_tiny.folder / "lines.jsonl"
    file.write_text("\ufeff" + "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines))

    assert evaluate("plain", *asked(file))["eval/exact_match/questions"] == 3


def test_an_answer_ends_before_the_stop_text(evaluate, shared_tiny, questions):
    answer = questions[1][0]
    stop = answer.strip()[1]
    file = shared_tiny.folder / "stopped.jsonl"
    file.write_text(json.dumps({"prompt": "The ", "answer": answer.partition(stop)[0]}) + "\n")

    found = evaluate("plain", *asked(file), f"evaluations.0.stop={json.dumps(stop)}")
    assert found["eval/exact_match/exact_match"] == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no question; write one a line, as {"),
        ('{"prompt": "a", "answer": "b"}\n{', "asked.jsonl:2: is no JSON"),
        ("[1]", "asked.jsonl:1: must be an object"),
        ('{"prompt": "a"}', "asked.jsonl:1: needs a text as 'answer'"),
        ('{"prompt": "", "answer": "b"}', "asked.jsonl:1: needs a text as 'prompt'"),
        (
            '{"prompt": "a", "answer": " b\\nc"}',
            "question 1 has the answer ' b\\nc', and answers end before stop = '\\n'",
        ),
        (json.dumps({"prompt": "a" * 99, "answer": "b"}), "question 1 has 99 tokens, and 6 new ones (max_new_tokens)"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused_by_line(shared_tiny, runs, capsys, text, sentence):
    file = shared_tiny.folder / "asked.jsonl"
    file.write_text(text)

    assert main(["eval", str(shared_tiny.path("plain")), *asked(file)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("tokens", "refused"), [(31, []), (32, ["max_new_tokens"])])
def test_answers_as_long_as_a_sequence_are_refused_at_validation(tokens, refused):
    """The run refused them, when it had read its questions."""
    config = ExactMatchConfig(path="questions.jsonl", max_new_tokens=tokens)

    assert [key for key, _ in config.check(SimpleNamespace(train=SimpleNamespace(seq_len=32)))] == refused
