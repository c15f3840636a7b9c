"""What this distribution registers."""

from collections.abc import Iterable

from forge_core.api import Command, Component, hookimpl

FORGE_API = "1.5"


@hookimpl
def forge_data_sources() -> Iterable[Component]:
    """Text that is tokenised on opening, token files that were prepared before, and samples that are made up."""
    yield Component(
        name="chat",
        summary="conversations in JSON Lines by the model's chat template; the assistant's turns are learned",
        factory="forge_plugins_data.chat:open_chat",
        config="forge_plugins_data.answers_config:ChatConfig",
    )
    yield Component(
        name="huggingface",
        summary="a data set of the Hugging Face hub or a saved one, tokenised once a node into token files",
        factory="forge_plugins_data.huggingface:open_huggingface",
        config="forge_plugins_data.hub_config:HuggingFaceConfig",
    )
    yield Component(
        name="huggingface_streaming",
        summary="a data set of the Hugging Face hub or a saved one, read and tokenised while the run goes on",
        factory="forge_plugins_data.huggingface_streaming:open_huggingface_streaming",
        config="forge_plugins_data.hub_config:HuggingFaceStreamingConfig",
    )
    yield Component(
        name="jsonl",
        summary="JSON Lines, a document a line, tokenised in memory when they are opened",
        factory="forge_plugins_data.records:open_jsonl",
        config="forge_plugins_data.config:RecordsConfig",
    )
    yield Component(
        name="mixture",
        summary="samples of several sources, each with its share of them",
        factory="forge_plugins_data.mixture:open_mixture",
        config="forge_plugins_data.mixture_config:MixtureConfig",
    )
    yield Component(
        name="parquet",
        summary="Parquet, a document a row, tokenised in memory when it is opened",
        factory="forge_plugins_data.records:open_parquet",
        config="forge_plugins_data.config:RecordsConfig",
    )
    yield Component(
        name="preference_pairs",
        summary="prompts with two answers in JSON Lines, of which one is preferred, for the loss dpo",
        factory="forge_plugins_data.preference_pairs:open_preference_pairs",
        config="forge_plugins_data.preference_config:PreferencePairsConfig",
    )
    yield Component(
        name="prompt_completion",
        summary="prompts with completions in JSON Lines; the completions are learned",
        factory="forge_plugins_data.prompt_completion:open_prompt_completion",
        config="forge_plugins_data.answers_config:PromptCompletionConfig",
    )
    yield Component(
        name="synthetic",
        summary="samples of a seeded Markov chain, for trying things out: a loss that has a known limit",
        factory="forge_plugins_data.synthetic:open_synthetic",
        config="forge_plugins_data.synthetic_config:SyntheticConfig",
    )
    yield Component(
        name="text_files",
        summary="any folder or glob of text, tokenised in memory when it is opened",
        factory="forge_plugins_data.text_files:open_text_files",
        config="forge_plugins_data.config:TextFilesConfig",
    )
    yield Component(
        name="token_files",
        summary="memory-mapped token ids, of 'forge data prepare', numpy, Megatron, nanotron or litgpt",
        factory="forge_plugins_data.token_files:open_token_files",
        config="forge_plugins_data.config:TokenFilesConfig",
    )


@hookimpl
def forge_tokenizers() -> Iterable[Component]:
    """Bytes, and anything that the ``tokenizers`` library can read."""
    yield Component(
        name="bytes",
        summary="the 256 bytes of UTF-8, and an end of document: a vocabulary of 257",
        factory="forge_plugins_data.bytes_tokenizer:BytesTokenizer",
        config="forge_plugins_data.tokenizer_config:BytesConfig",
    )
    yield Component(
        name="tokenizer_file",
        summary="a tokenizer.json of the Hugging Face tokenizers library",
        factory="forge_plugins_data.tokenizer_file:TokenizerFile",
        config="forge_plugins_data.tokenizer_config:TokenizerFileConfig",
    )


@hookimpl
def forge_evaluations() -> Iterable[Component]:
    """What is measured for data."""
    yield Component(
        name="preference_reference",
        summary="log-probabilities of preference pairs, written to the file that the loss dpo compares with",
        factory="forge_plugins_data.reference_evaluation:PreferenceReference",
        config="forge_plugins_data.preference_config:PreferenceReferenceConfig",
    )


@hookimpl
def forge_callbacks() -> Iterable[Component]:
    """What looks at a run of data that it must fit."""
    yield Component(
        name="reference_check",
        summary="ends preference tuning at its first step if the reference is of other weights",
        factory="forge_plugins_data.reference_check:ReferenceCheck",
        config="forge_plugins_data.preference_config:ReferenceCheckConfig",
    )


@hookimpl
def forge_observers() -> Iterable[Component]:
    """What is looked at in every run."""
    yield Component(
        name="reference_origin",
        summary="whether a reference of pairs was made with the checkpoint that a run begins with",
        factory="forge_plugins_data.reference_origin:ReferenceOrigin",
    )


@hookimpl
def forge_commands() -> Iterable[Command]:
    """``forge data prepare`` and ``forge data inspect``."""
    yield Command(
        name="data",
        summary="prepare text for training, and look into prepared data",
        run="forge_plugins_data.commands:data",
    )
