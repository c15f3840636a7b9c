"""What makes runs go wrong where a test wants them to."""

from forge_core.api import Component, hookimpl


@hookimpl
def forge_callbacks():
    yield Component(
        name="poison",
        summary="makes the loss, the gradient or a parameter of chosen steps what it should not be",
        factory="saboteur.poison:Poison",
        config="saboteur.config:PoisonConfig",
    )
    yield Component(
        name="leave_out",
        summary="asks for chosen updates to be left out",
        factory="saboteur.poison:LeaveOut",
        config="saboteur.config:LeaveOutConfig",
    )


@hookimpl
def forge_data_sources():
    yield Component(
        name="numbered",
        summary="random tokens, of which marked samples have a token that no other has",
        factory="saboteur.numbered:numbered",
        config="saboteur.config:NumberedConfig",
    )


@hookimpl
def forge_optimizers():
    yield Component(
        name="plain_adamw",
        summary="torch's AdamW in the implementation that cannot leave out an update on the device",
        factory="saboteur.plain_adamw:plain_adamw",
        config="saboteur.config:PlainAdamWConfig",
    )
