"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, Component, hookimpl

FORGE_API = "1.3"


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge generate`` and ``forge eval``."""
    yield Command(name="generate", summary="sample text from a run", run="forge_plugins_inference.command:generate")
    yield Command(name="eval", summary="evaluate a run", run="forge_plugins_inference.evaluate:evaluate", ranks=True)


@hookimpl
def forge_evaluations() -> Iterable[Component]:
    """What is measured of a language model."""
    yield Component(
        name="perplexity",
        summary="loss and perplexity on data of its own",
        factory="forge_plugins_inference.perplexity:Perplexity",
        config="forge_plugins_inference.config:PerplexityConfig",
    )
    yield Component(
        name="exact_match",
        summary="how many questions it answers as a file does",
        factory="forge_plugins_inference.exact_match:ExactMatch",
        config="forge_plugins_inference.config:ExactMatchConfig",
    )
    yield Component(
        name="accuracy",
        summary="how often the next token is the likeliest one",
        factory="forge_plugins_inference.accuracy:Accuracy",
        config="forge_plugins_inference.config:AccuracyConfig",
    )
