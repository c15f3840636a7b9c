"""A model is trained on conversations, and talks."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

from forge_core.cli import main

TEMPLATE = """\
{% for one in messages %}<{{ one.role }}>{{ one.content }}<end>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def trained(shared_tiny):
    """A model that has one conversation by heart, and answers both of its questions."""
    (shared_tiny.folder / "chat.jinja").write_text(TEMPLATE)
    chat = [("user", "a"), ("assistant", "yes"), ("user", "b"), ("assistant", "no!")]
    line = json.dumps({"messages": [{"role": role, "content": content} for role, content in chat]})
    (shared_tiny.folder / "chats.jsonl").write_text(f"{line}\n")
    shared_tiny.completed(
        f'data={{name="chat", path="{shared_tiny.folder}/chats.jsonl", '
        f'tokenizer={{name="bytes", chat_template="{shared_tiny.folder}/chat.jinja"}}}}',
        "train.seq_len=96",
        "train.batch_size=1",
        "model.max_seq_len=128",
        "eval.interval=0",
        "train.steps=40",
        "run.name=chat",
    )
    (shared_tiny.folder / "chat.jinja").unlink()
    return str(shared_tiny.path("chat"))


ARGUMENTS = ["--chat", "--temperature", "0", "--max-new-tokens", "12"]


def test_a_trained_model_answers_and_ends_its_turn(trained, capsys):
    capsys.readouterr()
    assert main(["generate", trained, *ARGUMENTS, "--prompt", "a"]) == 0
    assert capsys.readouterr().out == "yes\n"
    assert main(["generate", trained, *ARGUMENTS, "--prompt", "a", "--prompt", "b"]) == 0
    assert capsys.readouterr().out == "yes\nno!\n"


def test_lines_of_a_pipe_are_turns(trained, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nb\n"))
    capsys.readouterr()
    assert main(["generate", trained, *ARGUMENTS]) == 0
    assert capsys.readouterr().out == "yes\nno!\n"


@pytest.fixture(scope="module")
def plain(shared_tiny):
    """A model without a template."""
    shared_tiny.completed("train.steps=3", "run.name=plain")
    return str(shared_tiny.path("plain"))


def test_a_model_without_a_template_goes_on_with_each_line_of_a_pipe(plain, capsys, monkeypatch):
    sampling = ["--temperature", "0", "--max-new-tokens", "5", "--ignore-end"]
    capsys.readouterr()
    for prompt in ("one", "two, three"):
        assert main(["generate", plain, *sampling, "--prompt", prompt]) == 0
    each_alone = capsys.readouterr().out

    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo, three\n"))
    assert main(["generate", plain, *sampling, "--interactive"]) == 0

    assert capsys.readouterr().out == each_alone
    assert each_alone.startswith("one")


def test_without_new_tokens_the_prompt_is_what_there_is(plain, capsys):
    capsys.readouterr()
    assert main(["generate", plain, "--prompt", "one", "--max-new-tokens", "0"]) == 0
    assert capsys.readouterr().out == "one\n"


def test_a_prompt_that_does_not_fit_is_said_to_who_types_and_the_next_one_is_continued(plain, capsys, monkeypatch):
    typed = iter(["x" * 1000, "one"])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda sign: next(typed, None) or end_of_input())
    capsys.readouterr()

    assert main(["generate", plain, "--interactive", "--max-new-tokens", "5"]) == 0

    captured = capsys.readouterr()
    assert "a prompt of 1000 tokens and 5 new ones are more than the model's longest sequence" in captured.err
    assert captured.out.startswith("one")


def end_of_input():
    raise EOFError


def test_a_run_without_a_template_does_not_talk(plain, capsys):
    capsys.readouterr()

    assert main(["generate", plain, *ARGUMENTS, "--prompt", "a"]) == 2
    assert "step_00000003: the tokenizer has no chat template; train on data" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused_by_its_option(plain, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert main(["generate", plain, "--device", "cuda"]) == 2
    assert "--device: cuda was asked for, but torch sees none on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--chat", "--ignore-end"], "--ignore-end has no effect with --chat: an answer has an end"),
        (["--system", "x"], "--system has no effect without --chat"),
        (["--chat", "--interactive"], "--interactive continues texts, and --chat answers messages; take one of them"),
        (["--interactive", "--prompt", "x"], "--prompt has no effect with --interactive, which reads prompts line by"),
        (["--interactive", "--json"], "--json has no effect with --interactive"),
    ],
)
def test_options_that_would_do_nothing_are_refused(capsys, arguments, sentence):
    assert main(["generate", "runs/none", *arguments]) == 2
    assert sentence in capsys.readouterr().err
