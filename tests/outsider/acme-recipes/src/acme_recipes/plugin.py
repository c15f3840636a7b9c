"""Free of torch."""

from forge_core.api import Command, Component, hookimpl

FORGE_API = "1.3"


@hookimpl
def forge_commands():
    yield Command(
        name="reversed-look",
        summary="write what a model computes, and its logits with a head reversed",
        run="acme_recipes.look:look",
        ranks=True,
    )


@hookimpl
def forge_optimizers():
    yield Component(
        name="signum",
        summary="the sign of the momentum",
        factory="acme_recipes.signum:Signum",
        config="acme_recipes.config:SignumConfig",
    )
    yield Component(
        name="cubic",
        summary="along the cube of the momentum of whole matrices",
        factory="acme_recipes.cubic:Cubic",
        config="acme_recipes.config:SignumConfig",
    )
    yield Component(
        name="row_scaled",
        summary="scaled by a mean of squares for each row",
        factory="acme_recipes.row_scaled:RowScaled",
        config="acme_recipes.config:SignumConfig",
    )


@hookimpl
def forge_schedulers():
    yield Component(
        name="inverse_sqrt",
        summary="linear warm-up, then one over the square root of the step",
        factory="acme_recipes.inverse_sqrt:inverse_sqrt",
        config="acme_recipes.config:InverseSqrtConfig",
    )


@hookimpl
def forge_losses():
    yield Component(
        name="z_loss",
        summary="cross-entropy that also keeps the normaliser near one",
        factory="acme_recipes.z_loss:ZLoss",
        config="acme_recipes.config:ZLossConfig",
    )


@hookimpl
def forge_data_sources():
    yield Component(
        name="ramp",
        summary="counts that go by larger and larger steps in the course of a run",
        factory="acme_recipes.ramp:open_ramp",
        config="acme_recipes.config:RampConfig",
    )
    yield Component(
        name="tides",
        summary="walks that go up and down, each from where it was",
        factory="acme_recipes.tides:open_tides",
        config="acme_recipes.config:TidesConfig",
    )


@hookimpl
def forge_callbacks():
    yield Component(
        name="polyak",
        summary="evaluates the mean of the weights of all steps",
        factory="acme_recipes.polyak:Polyak",
        config="acme_recipes.config:PolyakConfig",
    )


@hookimpl
def forge_evaluations():
    yield Component(
        name="surprise",
        summary="how many targets the model did not expect",
        factory="acme_recipes.surprise:Surprise",
        config="acme_recipes.config:SurpriseConfig",
    )


@hookimpl(optionalhook=True)
def forge_report_sections():
    yield Component(
        name="finals",
        summary="the last step and loss of each run",
        factory="acme_recipes.finals:Finals",
        config="acme_recipes.config:FinalsConfig",
    )


@hookimpl(optionalhook=True)
def forge_representation_metrics():
    yield Component(
        name="mean_distance",
        summary="how far the means of two representations are from each other",
        factory="acme_recipes.mean_distance:MeanDistance",
        config="acme_recipes.config:MeanDistanceConfig",
    )
