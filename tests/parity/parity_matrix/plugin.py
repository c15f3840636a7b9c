"""What a launch brings along to look inside of its runs."""

from forge_core.api import Component, hookimpl


@hookimpl
def forge_callbacks():
    yield Component(
        name="parity_probe",
        summary="records on every rank what must be equal on all of them and in all layouts",
        factory="parity_matrix.probe:Probe",
        config="parity_matrix.config:NothingToChoose",
    )
    yield Component(
        name="weight_norm",
        summary="logs the norm of all weights",
        factory="parity_matrix.probe:WeightNorm",
        config="parity_matrix.config:NothingToChoose",
    )
    yield Component(
        name="logits_probe",
        summary="records what the model gives without a loss, and the gradients of a loss that knows no layout",
        factory="parity_matrix.logits:LogitsProbe",
        config="parity_matrix.config:NothingToChoose",
    )


@hookimpl
def forge_models():
    yield Component(
        name="without_positions_apart",
        summary="a transformer whose plan has no role 'sequence'",
        factory="parity_matrix.plans:WithoutPositionsApart",
        config="forge_plugins_dense.config:TransformerConfig",
    )


@hookimpl
def forge_feed_forwards():
    yield Component(
        name="whole_mlp",
        summary="an MLP that tensor parallelism is to leave whole",
        factory="parity_matrix.plans:WholeMLP",
        config="forge_plugins_dense.config:MLPConfig",
    )
    yield Component(
        name="sized_mlp",
        summary="an MLP whose output should be small, in layers 0 and 3: auxiliary losses in different stages",
        factory="parity_matrix.sized_mlp:SizedMLP",
        config="forge_plugins_dense.config:MLPConfig",
    )


@hookimpl
def forge_routers():
    yield Component(
        name="replayed_choice",
        summary="experts that choose tokens, as they have chosen in one process",
        factory="parity_matrix.replayed_choice:ReplayedChoice",
        config="parity_matrix.config:ReplayedChoiceConfig",
    )


@hookimpl
def forge_evaluations():
    yield Component(
        name="logits_loss",
        summary="the loss of predicted logits, or something that is no number",
        factory="parity_matrix.logits_loss:LogitsLoss",
        config="parity_matrix.config:LogitsLossConfig",
    )
