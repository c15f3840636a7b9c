"""What this package registers. Every forge command imports this file: keep it free of torch."""

from __future__ import annotations

from collections.abc import Iterable

from forge_core.api import Command, Component, Conflict, Kind, PassComponent, hookimpl

FORGE_API = "1.0"


@hookimpl
def forge_kinds() -> Iterable[Kind]:
    yield Kind(
        name="dispatcher",
        hook="forge_dispatchers",
        summary="how tokens travel to experts on other ranks, and back",
        contract="forge_plugins_moe.dispatch:Dispatcher",
    )


@hookimpl
def forge_feed_forwards() -> Iterable[Component]:
    yield Component(
        name="moe",
        summary="mixture of experts: a router of your choice, grouped products without padding, shared experts",
        factory="forge_plugins_moe.feed_forward:moe",
        config="forge_plugins_moe.config:MoEConfig",
    )


@hookimpl
def forge_parallel_passes() -> Iterable[PassComponent]:
    yield PassComponent(
        name="expert_parallel",
        summary="expert parallelism: each rank has some of the experts and is sent the tokens that chose them",
        factory="forge_plugins_moe.expert_parallel:ExpertParallel",
        config="forge_plugins_moe.config:ExpertParallelConfig",
        phase="experts",
        needs=("fsdp",),
        serves=("ep",),
        conflicts=(
            Conflict(
                "compile",
                "the sizes of what ranks exchange depend on data, which no one graph has room for",
                other_when={"fullgraph": True},
            ),
        ),
    )


@hookimpl
def forge_dispatchers() -> Iterable[Component]:
    yield Component(
        name="all_to_all",
        summary="each row straight to the rank of its expert, in one uneven exchange",
        factory="forge_plugins_moe.all_to_all:AllToAllDispatcher",
    )
    yield Component(
        name="hierarchical",
        summary="each token once to each node that has one of its experts, and on from there; back likewise",
        factory="forge_plugins_moe.hierarchical:HierarchicalDispatcher",
        config="forge_plugins_moe.config:HierarchicalConfig",
    )


@hookimpl
def forge_routers() -> Iterable[Component]:
    yield Component(
        name="softmax_topk",
        summary="the experts of highest probability, balanced by a loss, a selection bias or both (Mixtral, OLMoE)",
        factory="forge_plugins_moe.routers.softmax_topk:SoftmaxTopK",
        config="forge_plugins_moe.router_config:SoftmaxTopKConfig",
    )
    yield Component(
        name="sigmoid_topk",
        summary="sigmoid scores, balanced by a selection bias, in all or the best groups of experts (DeepSeek-V3)",
        factory="forge_plugins_moe.routers.sigmoid_topk:SigmoidTopK",
        config="forge_plugins_moe.router_config:SigmoidTopKConfig",
    )
    yield Component(
        name="expert_choice",
        summary="experts choose tokens, of a sequence or of a microbatch; not causal",
        factory="forge_plugins_moe.routers.expert_choice:ExpertChoice",
        config="forge_plugins_moe.router_config:ExpertChoiceConfig",
    )
    yield Component(
        name="hash",
        summary="a token's id decides, by a hash function or a table; equal weights or learned ones",
        factory="forge_plugins_moe.routers.hash:hash_router",
        config="forge_plugins_moe.router_config:HashConfig",
    )
    yield Component(
        name="sinkhorn",
        summary="in training, the experts of a balanced assignment of the microbatch (BASE, S-BASE)",
        factory="forge_plugins_moe.routers.sinkhorn:Sinkhorn",
        config="forge_plugins_moe.router_config:SinkhornConfig",
    )
    yield Component(
        name="noisy_topk",
        summary="learned noise on the logits, balanced by the losses importance and load (Shazeer et al. 2017)",
        factory="forge_plugins_moe.routers.noisy_topk:NoisyTopK",
        config="forge_plugins_moe.router_config:NoisyTopKConfig",
    )
    yield Component(
        name="uniform",
        summary="round-robin, for benchmarks",
        factory="forge_plugins_moe.routers.uniform:Uniform",
        config="forge_plugins_moe.router_config:UniformConfig",
    )


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    yield Component(
        name="experts",
        summary="keeps the load of every expert, tells of dead ones, and draws a map of layers and experts",
        factory="forge_plugins_moe.watch:WatchExperts",
        config="forge_plugins_moe.config:WatchConfig",
    )


@hookimpl
def forge_commands() -> Iterable[Command]:
    yield Command(
        name="moe",
        summary="make a sparse model of a dense one (upcycling), draw the load of experts",
        run="forge_plugins_moe.commands:moe",
    )


@hookimpl(optionalhook=True)
def forge_report_sections() -> Iterable[Component]:
    """For ``forge report``."""
    yield Component(
        name="experts",
        summary="the load of every expert of every layer, in colours",
        factory="forge_plugins_moe.report_section:Experts",
    )


@hookimpl(optionalhook=True)
def forge_weight_layouts() -> Iterable[Component]:
    """For ``forge convert``."""
    yield Component(
        name="sparse",
        summary="Mixtral, Qwen2- and Qwen3-MoE, OLMoE, GLM 4.5, DeepSeek-V2 and -V3 as Hugging Face has them",
        factory="forge_plugins_moe.weight_layouts:SparseLayout",
        config="forge_plugins_hf.layout_config:LayoutConfig",
    )
    yield Component(
        name="gpt_oss",
        summary="gpt-oss, with experts in bf16 or in MXFP4",
        factory="forge_plugins_moe.gpt_oss_layout:GptOssLayout",
        config="forge_plugins_hf.layout_config:LayoutConfig",
    )
