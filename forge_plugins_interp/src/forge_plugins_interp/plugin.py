"""What this package registers. Every forge command imports this file: keep it free of torch."""

from collections.abc import Iterable

from forge_core.api import Command, Component, Conflict, Kind, PassComponent, hookimpl

FORGE_API = "1.3"


@hookimpl
def forge_commands() -> Iterable[Command]:
    yield Command(
        name="sites", summary="list what can be looked at in a model", run="forge_plugins_interp.sites_command:sites"
    )
    yield Command(
        name="attention",
        summary="show what heads look at in a prompt",
        run="forge_plugins_interp.attention_command:attention",
    )
    yield Command(
        name="autoencoder",
        summary="what an autoencoder leaves of a model, and its files for SAELens and sparsify",
        run="forge_plugins_interp.autoencoder_command:autoencoder",
    )
    yield Command(
        name="compare",
        summary="how alike two stores are, site by site",
        run="forge_plugins_interp.compare_command:compare",
    )
    yield Command(
        name="extract",
        summary="write what a model computes to a store",
        run="forge_plugins_interp.extract_command:extract",
        ranks=True,
    )
    yield Command(
        name="lens",
        summary="what each layer would predict, and what it adds to a logit",
        run="forge_plugins_interp.lens_command:lens",
    )
    yield Command(
        name="patch",
        summary="where in a model the answer to a prompt is",
        run="forge_plugins_interp.patch_command:patch",
        ranks=True,
    )
    yield Command(
        name="probe",
        summary="what can be read out of the sites of a store",
        run="forge_plugins_interp.probe_command:probe",
    )
    yield Command(
        name="score",
        summary="layers of a model against recordings of brains",
        run="forge_plugins_interp.score_command:score",
    )
    yield Command(
        name="store",
        summary="stores of activations in the formats of other tools",
        run="forge_plugins_interp.store_command:store",
    )
    yield Command(
        name="trace",
        summary="fingerprints of what a few steps compute, and where two runs part",
        run="forge_plugins_interp.trace_command:trace",
    )


@hookimpl
def forge_models() -> Iterable[Component]:
    """Sparse autoencoders, which learn from stores."""
    models = {
        "batch_topk_sae": ("an autoencoder by the largest latents of a batch", "BatchTopKConfig"),
        "jumprelu_sae": ("an autoencoder by thresholds that are learned", "JumpReluConfig"),
        "matryoshka_sae": ("an autoencoder each prefix of which reconstructs by itself", "MatryoshkaConfig"),
        "topk_sae": ("an autoencoder by the largest latents of each row", "TopKConfig"),
        "transcoder": ("from the input of a layer to its output, by the largest latents", "TranscoderConfig"),
    }
    for name, (summary, config) in models.items():
        yield Component(
            name=name,
            summary=summary,
            factory="forge_plugins_interp.autoencoders.model:Autoencoder",
            config=f"forge_plugins_interp.autoencoders.config:{config}",
        )


@hookimpl
def forge_data_sources() -> Iterable[Component]:
    """Activations as data, from a store or as a model computes them."""
    yield Component(
        name="activation_store",
        summary="rows of a store of activations, in random order",
        factory="forge_plugins_interp.autoencoders.store_source:ActivationRows",
        config="forge_plugins_interp.autoencoders.config:ActivationStoreConfig",
    )
    yield Component(
        name="activations_of",
        summary="activations of a trained model, which runs for each batch",
        factory="forge_plugins_interp.autoencoders.model_source:ActivationsOf",
        config="forge_plugins_interp.autoencoders.config:ActivationsOfConfig",
    )


@hookimpl
def forge_parallel_passes() -> Iterable[Component]:
    """What is trained beside a model that is frozen."""
    yield PassComponent(
        name="tuned_lens",
        summary="a tuned lens: freezes the model, and trains an affine map of each layer to what the model predicts",
        factory="forge_plugins_interp.lenses.tuned_lens:TunedLens",
        config="forge_plugins_interp.lenses.config:TunedLensConfig",
        phase="swap",
        adds_parameters=True,
        conflicts=(
            Conflict("compile", "it looks at what compiled blocks read, which they show once, while they are traced"),
            Conflict("lora", "it trains nothing but its own maps; fold the adapters first, by forge convert"),
        ),
    )


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    """What is looked at in training."""
    yield Component(
        name="capture",
        summary="values of sites in some steps of training, as stores",
        factory="forge_plugins_interp.capture:Capture",
        config="forge_plugins_interp.monitoring_config:CaptureConfig",
    )
    yield Component(
        name="trace",
        summary="fingerprints of values, gradients and updates of a few steps",
        factory="forge_plugins_interp.trace:Trace",
        config="forge_plugins_interp.trace_config:TraceConfig",
    )


@hookimpl
def forge_evaluations() -> Iterable[Component]:
    """How a model changes, and what an autoencoder explains."""
    yield Component(
        name="autoencoder",
        summary="what an autoencoder explains of held-out activations, and with how many latents",
        factory="forge_plugins_interp.autoencoders.evaluation:Explained",
        config="forge_plugins_interp.autoencoders.config:AutoencoderEvaluationConfig",
    )
    yield Component(
        name="representations",
        summary="how alike layers are to what they were at the first evaluation of the run",
        factory="forge_plugins_interp.representations:Representations",
        config="forge_plugins_interp.monitoring_config:RepresentationsConfig",
    )


@hookimpl
def forge_kinds() -> Iterable[Kind]:
    """How alike two representations are."""
    contract = "forge_plugins_interp.metrics.contract"
    yield Kind(
        name="representation_metric",
        hook="forge_representation_metrics",
        summary="how alike two representations of the same stimuli are",
        contract=f"{contract}:RepresentationMetricFactory",
        returns=f"{contract}:RepresentationMetric",
    )


@hookimpl
def forge_representation_metrics() -> Iterable[Component]:
    """Ours."""
    metrics = {
        "cca": ("the mean canonical correlation", "Cca", "CcaConfig"),
        "cka": ("centred kernel alignment, debiased unless it is told otherwise", "Cka", "CkaConfig"),
        "procrustes": ("the distance that is left after the best rotation", "Procrustes", "ProcrustesConfig"),
        "pwcca": ("canonical correlations, weighted by what they explain", "Pwcca", "CcaConfig"),
        "routing_agreement": (
            "how many of a token's experts are the same",
            "RoutingAgreement",
            "RoutingAgreementConfig",
        ),
        "rsa": ("the correlation of dissimilarities of stimuli", "Rsa", "RsaConfig"),
        "svcca": ("the mean canonical correlation of the leading directions", "Svcca", "SvccaConfig"),
    }
    for name, (summary, factory, config) in metrics.items():
        yield Component(
            name=name,
            summary=summary,
            factory=f"forge_plugins_interp.metrics.components:{factory}",
            config=f"forge_plugins_interp.metrics.config:{config}",
        )


@hookimpl(optionalhook=True)
def forge_report_sections() -> Iterable[Component]:
    """For ``forge report``."""
    yield Component(
        name="features",
        summary="latents of autoencoders: how often they fire, on which tokens, and what they do to logits",
        factory="forge_plugins_interp.autoencoders.features_section:FeaturesSection",
        config="forge_plugins_interp.autoencoders.features_config:FeaturesConfig",
    )
