"""What this package registers."""

from forge_core.api import Component, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_models():
    yield Component(
        name="jay",
        summary="attention and MLP side by side, learned positions, biases everywhere",
        factory="acme_jay.model:Jay",
        config="acme_jay.config:JayConfig",
    )
