"""``forge generate``: sample from a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import click

from forge_core.commands.json_output import json_option, print_json
from forge_core.config.describe import printable
from forge_core.errors import ConfigError
from forge_plugins_inference.prompt import prompt_ids

if TYPE_CHECKING:
    from forge_core.contracts.model import GenerativeModel
    from forge_plugins_weights.loading import Weights


@attrs.frozen(kw_only=True)
class Continued:
    """A prompt, and what the model has made of it."""

    prompt: str
    text: str
    """What follows the prompt."""


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--chat", is_flag=True, help="Talk turn by turn, by the model's own chat template.")
@click.option("--interactive", is_flag=True, help="Continue each line that is typed, or that comes from a pipe.")
@click.option("--system", help="With --chat: the message of the system, before all others.")
@click.option("--prompt", "prompts", multiple=True, help="What to continue; repeat for a batch. With --chat: a turn.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="A file with one prompt a line.")
@click.option("--max-new-tokens", default=200, show_default=True, type=click.IntRange(min=0))
@click.option(
    "--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0), help="0 takes the likeliest."
)
@click.option(
    "--top-k", default=0, show_default=True, type=click.IntRange(min=0), help="Only the k likeliest; 0 is all."
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Only the likeliest that together have this probability.",
)
@click.option("--ignore-end", is_flag=True, help="Go on after the end of a document.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0, max=2**63 - 1))
@click.option("--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda", "mps"]))
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option(
    "--weights",
    type=click.Choice(["training", "evaluation"]),
    help="The trained ones, or averages that are evaluated in their place; by default averages, if there are any.",
)
@json_option(Continued, lines=True, says="Print JSON, an object for each prompt on a line.")
@click.pass_obj
def generate(
    obj: Any,
    run: Path,
    chat: bool,
    interactive: bool,
    system: str | None,
    prompts: tuple[str, ...],
    prompt_file: Path | None,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    ignore_end: bool,
    seed: int,
    device: str,
    dtype: str,
    weights: Weights | None,
    as_json: bool,
) -> None:
    """Sample from RUN, a run's directory (its newest checkpoint) or a checkpoint's.

    With --chat, each line that is typed is a message, and with --interactive a prompt of its own, until the end of
    input (Ctrl-D); lines may come from a pipe, too.
    """
    texts = [*map(_utf_8, prompts), *_lines(prompt_file)]
    _refuse_options(
        chat,
        interactive,
        ignore_end=ignore_end,
        as_json=as_json,
        has_prompts=bool(texts),
        has_system=system is not None,
    )

    import torch

    from forge_core.checkpoint.contents import model_problem
    from forge_core.checkpoint.store import find_checkpoint
    from forge_core.distributed.mesh import choose_device
    from forge_plugins_inference.chat import converse
    from forge_plugins_inference.generation import generate as sample
    from forge_plugins_weights.loading import load_model

    checkpoint = find_checkpoint(run, _say, model_problem)
    place = choose_device(device, "--device")
    loaded = load_model(checkpoint, obj.catalog, place, getattr(torch, dtype), weights)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{checkpoint.path} has no tokenizer: its data did not name one, so text means nothing to it")
    if not hasattr(loaded.model, "make_cache"):
        raise ConfigError(f"model {loaded.job.model.qualified_name} cannot be sampled from: it has no make_cache")
    model = cast("GenerativeModel", loaded.model)
    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
        "generator": torch.Generator(place).manual_seed(seed),
    }
    if chat:
        from forge_plugins_inference.conversation import Conversation

        try:
            conversation = Conversation(model, tokenizer, system=system, say=_say, **settings)
        except ConfigError as error:
            raise ConfigError(f"{checkpoint.path}: {error}") from error
        converse(conversation.answer, texts)
        return

    def follow(texts: list[str]) -> list[str]:
        ids = [prompt_ids(tokenizer, text) for text in texts]
        completions = sample(model, ids, stop=None if ignore_end else tokenizer.end_of_document, **settings)
        return [tokenizer.decode(completion) for completion in completions]

    if interactive:
        converse(lambda text: iter([text, *follow([text])]), [])
        return
    texts = texts or [""]
    _print(texts, follow(texts), as_json=as_json)


def _print(texts: list[str], completions: list[str], *, as_json: bool) -> None:
    for i, (text, completion) in enumerate(zip(texts, completions, strict=True)):
        if as_json:
            print_json(Continued(prompt=text, text=completion), indent=None)
            continue
        if len(texts) > 1:
            print(f"--- {i + 1} of {len(texts)}")
        generated = text + completion
        # a model may have learned to steer a terminal
        print(printable(generated) if sys.stdout.isatty() else generated)


def _refuse_options(
    chat: bool, interactive: bool, *, ignore_end: bool, as_json: bool, has_prompts: bool, has_system: bool
) -> None:
    for is_given, sentence in (
        (chat and interactive, "--interactive continues texts, and --chat answers messages; take one of them"),
        (interactive and has_prompts, "--prompt has no effect with --interactive, which reads prompts line by line"),
        (interactive and as_json, "--json has no effect with --interactive: what is typed and printed is for people"),
        (chat and ignore_end, "--ignore-end has no effect with --chat: an answer has an end"),
        (chat and as_json, "--json has no effect with --chat: a conversation is for people"),
        (
            has_system and not chat,
            "--system has no effect without --chat: a text that is continued has no system message",
        ),
    ):
        if is_given:
            raise ConfigError(sentence)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr)


def _utf_8(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--prompt: {prompt!r} is not UTF-8") from None
    return prompt


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file: {path} cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"--prompt-file: {path} is empty; write one prompt a line")
    lines = text.split("\n")  # not at form feeds and the like, which prompts may have
    if "" in lines:
        raise ConfigError(f"--prompt-file: {path}:{lines.index('') + 1}: the line is empty; a prompt has some text")
    return lines
