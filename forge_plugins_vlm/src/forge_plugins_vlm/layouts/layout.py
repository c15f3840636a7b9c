"""How a vision-language model of Hugging Face is laid out: what its layouts have in common."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import attrs

from forge_core.errors import ConfigError
from forge_plugins_dense.huggingface import check_complete, is_derived
from forge_plugins_hf.config_json import part_of
from forge_plugins_hf.weight_layout import Recipe, WeightLayout
from forge_plugins_vlm.config import VisionLanguageConfig, image_sources
from forge_plugins_vlm.encoders.vision_folder import PREPROCESSOR, Normalisation, read_normalisation
from forge_plugins_vlm.images.config import Resample
from forge_plugins_vlm.layouts.decoder import FAMILIES, decoder_from_hf, decoder_names, decoder_to_hf

if TYPE_CHECKING:
    import torch

Table = dict[str, Any]


class VisionLanguageLayout(WeightLayout):
    """A layout of the model ``vision_language``. A subclass says how encoder, connector and fusion are read and
    written. Weights have other names, and are the same."""

    model_type: ClassVar[str]
    image_key: ClassVar[str] = "image_token_index"
    """What ``config.json`` calls the token that stands for an image."""
    decoder: ClassVar[Mapping[str, str]]
    """Beginnings of names in a model for text alone, and here."""
    remembered: ClassVar[Mapping[str, str]] = {}
    """Beginnings of names that are written, and the ones in memory, of the decoder, where they differ."""
    families: ClassVar[Collection[str]] = tuple(FAMILIES)
    """The decoders that it may have."""
    input_tokens: ClassVar[int] = 0
    """Tokens at the end of the vocabulary that are read and never predicted."""
    older: ClassVar[Mapping[str, str]] = {}
    """Beginnings of names that some files have, and the ones that are written."""

    def __init__(self, config: object, /) -> None: ...

    @abstractmethod
    def read(self, hf: Mapping[str, Any], vision: Mapping[str, Any]) -> Table:
        """The keys ``encoder``, ``connector``, ``fusion`` and others of ``[model]``, but for those of the decoder."""

    @abstractmethod
    def write(self, config: VisionLanguageConfig) -> Table:
        """The content of ``config.json`` without ``text_config``.

        Raises:
            ConfigError: the architecture is not equal to the model.
        """

    @abstractmethod
    def vision_names(self, config: VisionLanguageConfig) -> dict[str, str]:
        """Our names of parameters of the part ``vision``, and theirs."""

    @abstractmethod
    def normalisation(self, table: Mapping[str, Any]) -> Normalisation:
        """Of the encoder in a table ``[model]``."""

    @abstractmethod
    def pictures(self, hf: Mapping[str, Any], table: Mapping[str, Any]) -> Table:
        """The keys ``processor`` and ``token_grid`` of data that suit a table ``[model]``."""

    def constants(self, config: VisionLanguageConfig) -> Mapping[str, Recipe]:
        """Tensors of theirs that nothing reads, and that ``transformers`` asks for."""
        return {}

    def is_unused(self, config: VisionLanguageConfig, name: str) -> bool:
        """Whether a tensor of theirs changes nothing in the model."""
        return is_derived(name) or (config.tie_embeddings and name == self._here("lm_head.weight"))

    def ties(self, hf: Mapping[str, Any]) -> bool:
        """Whether embedding and head have the same weights."""
        return bool(hf.get("tie_word_embeddings", False))

    def text_of(self, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        """The ``text_config``."""
        return part_of(hf, "text_config")

    def decoder_names(self, config: VisionLanguageConfig) -> dict[str, str]:
        """Our names of the decoder's parameters, and theirs."""
        return {ours: self._here(theirs) for ours, theirs in decoder_names(config, self.families).items()}

    def model_table(self, config_json: Mapping[str, Any]) -> Table:
        text, vision = self.text_of(config_json), part_of(config_json, "vision_config")
        for key in ("_pad_token_id", "transformers.js_config", "vocab_size"):  # the decoder says these
            config_json.get(key)
        return {
            **decoder_from_hf(text, self.architectures[0]),
            "name": "vision_language",
            "tie_embeddings": self.ties(config_json),
            "image_token": config_json[self.image_key],
            **self.read(config_json, vision),
        }

    def config_json(self, config: VisionLanguageConfig, vocab_size: int) -> Table:
        if not isinstance(config, VisionLanguageConfig):
            raise ConfigError("the architecture reads images, and this model does not")
        if config.input_tokens != self.input_tokens:
            raise ConfigError(
                f"{self.architectures[0]} has input_tokens = {self.input_tokens}, and the model {config.input_tokens}"
            )
        return {
            **self.write(config),
            "architectures": [self.architectures[0]],
            "model_type": self.model_type,
            "text_config": decoder_to_hf(config, vocab_size, self.families),
            "tie_word_embeddings": config.tie_embeddings,
            self.image_key: config.image_token,
        }

    def to_forge(self, config: VisionLanguageConfig, names: Collection[str]) -> Mapping[str, Recipe]:
        there = {self._as_written(name): name for name in names}
        ours = self._names(config)
        read = set(ours.values())
        spare = {name for name in there.keys() - read if self.is_unused(config, name)}
        check_complete(there.keys() - spare, read)
        return {our: Recipe((there[theirs],)) for our, theirs in ours.items()}

    def to_huggingface(self, config: VisionLanguageConfig) -> Mapping[str, Recipe]:
        return {theirs: Recipe((ours,)) for ours, theirs in self._names(config).items()} | {**self.constants(config)}

    def data_table(self, config_json: Mapping[str, Any], tokens: Mapping[str, int]) -> Table:
        table = self.model_table(config_json)
        found = next((token for token, number in tokens.items() if number == table["image_token"]), None)
        return {
            "name": "image_text",
            **self.pictures(config_json, table),
            **({} if found is None else {"placeholder": found}),
        }

    def data_beside(self, data: Table, folder: Path) -> Table:
        processor = data["processor"]
        usual = Normalisation((0.0,) * 3, (1.0,) * 3, processor.get("resample", "bicubic"))
        found = read_normalisation(folder, usual).resample
        return {**data, "processor": {**processor, "resample": found}} if found in get_args(Resample) else data

    def in_memory(self, name: str) -> str:
        return _renamed(name, self.remembered)

    def misfit(self, table: Mapping[str, Any], folder: Path) -> str | None:
        found = read_normalisation(folder, self.normalisation(table))
        usual = attrs.evolve(self.normalisation(table), resample=found.resample)  # resizing is of the data
        if found == usual:
            return None
        return (
            f"{folder / PREPROCESSOR}: image_mean = {[*found.mean]} and image_std = {[*found.deviation]} are not "
            f"supported beside {table['encoder']['name']}; {[*usual.mean]} and {[*usual.deviation]} are"
        )

    def with_data(self, config_json: Table, data: Any, tokens: Mapping[str, int]) -> Table:
        table = config_json
        for _, source in image_sources(data, "data"):
            table = self.with_source(table, source)
            if source.placeholder in tokens:
                table = {**table, self.image_key: tokens[source.placeholder]}
            break
        if table[self.image_key] is None:
            raise ConfigError(
                f"{self.image_key} of config.json has to name the token that stands for an image: the run's tokenizer "
                "has no token data.placeholder, and model.image_token is not set"
            )
        return table

    def with_source(self, table: Table, source: Any) -> Table:
        """Give ``config.json`` what a source of images says, beside the token that stands for one."""
        return table

    def _names(self, config: VisionLanguageConfig) -> dict[str, str]:
        return self.decoder_names(config) | self.vision_names(config)

    def _here(self, name: str) -> str:
        """What a tensor of a model for text alone is called here."""
        return _renamed(name, self.decoder)

    def _as_written(self, name: str) -> str:
        return _renamed(name, self.older)


def named(ours: str, theirs: str, keys: Mapping[str, str] | Collection[str]) -> dict[str, str]:
    """Names of two modules, by the names of tensors in them."""
    pairs = keys if isinstance(keys, Mapping) else {key: key for key in keys}
    return {f"{ours}.{key}": f"{theirs}.{other}" for key, other in pairs.items()}


def constant(shape: int, value: float) -> Recipe:
    """A vector of one number."""
    return Recipe((), functools.partial(_filled, shape, value))


def _filled(shape: int, value: float) -> torch.Tensor:
    import torch  # forge validate does without

    return torch.full((shape,), value)


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    known = [one for one in beginnings if name.startswith(one)]
    longest = max(known, key=len, default="")
    return beginnings[longest] + name.removeprefix(longest) if known else name
