"""How a decoder of Hugging Face is laid out: what its layouts have in common."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import attrs

from forge_core.api import ComponentRef
from forge_core.errors import ConfigError, and_more
from forge_plugins_dense.config import TransformerConfig
from forge_plugins_dense.feed_forward_config import MLPConfig
from forge_plugins_dense.huggingface import biased_projections, check_complete, is_derived, refuse_further_parts
from forge_plugins_dense.latent_config import latent_of
from forge_plugins_dense.layer_config import LayerConfig
from forge_plugins_dense.norm_config import LAYERNORM
from forge_plugins_dense.rope_config import Llama3Scaling, LongRope, YarnScaling
from forge_plugins_hf.weight_layout import ReadPart, Recipe, WeightLayout

if TYPE_CHECKING:
    import torch

Table = dict[str, Any]


def _same(tensor: torch.Tensor, *_: int) -> torch.Tensor:
    return tensor


@attrs.frozen
class Fused:
    """A linear layer or a norm of theirs, and the ones of ours that it is made of."""

    ours: tuple[str, ...]
    join: Callable[..., torch.Tensor] = _same
    """Ours to theirs, a weight or a bias."""
    part: Callable[[torch.Tensor, int], torch.Tensor] = _same
    """Theirs to the one of ours with this index."""
    transposed: bool = False
    """Their weight is ``(inputs, outputs)``."""
    find: Callable[[int, slice], Sequence[slice]] | None = None
    """Where some output features of the one of ours with this index lie in theirs, in their order."""

    @property
    def is_renaming(self) -> bool:
        """Return whether it is one of ours as it is."""
        return self.part is _same and not self.transposed


def rows(ours: Sequence[str], sizes: Sequence[int], *, transposed: bool = False) -> Fused:
    """Output features of ours, one after the other."""

    def find(index: int, features: slice) -> Sequence[slice]:
        before = sum(sizes[:index])
        return [slice(before + features.start, before + features.stop)]

    part = functools.partial(_part_of_rows, sizes=tuple(sizes))
    return Fused(tuple(ours), _joined, part, transposed, find)


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    import torch  # forge validate does without

    return torch.cat(parts)


def _part_of_rows(whole: torch.Tensor, index: int, *, sizes: tuple[int, ...]) -> torch.Tensor:
    return whole.split(sizes)[index].contiguous()  # type: ignore[no-any-return, no-untyped-call]  # torch's


class DecoderLayout(WeightLayout):
    """A layout of the model ``transformer``. A subclass says how the configuration is read and written, and what their
    modules are called."""

    model_type: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of keys that ``config.json`` leaves out."""
    dropouts: ClassVar[Mapping[str, str]] = {"attention_dropout": "attention_dropout"}
    """Our keys of dropout, and theirs. Models that differ in them alone count as equal."""
    prefix: ClassVar[str] = "model."
    """Of their names of tensors, which some files leave out."""
    further_prefixes: ClassVar[tuple[str, ...]] = ()
    """Of names in files that have more than the decoder."""
    layer: ClassVar[str] = "layers.{}."
    head: ClassVar[str] = "lm_head"
    further_heads: ClassVar[tuple[str, ...]] = ()
    """Names of the head in such files."""
    outside: ClassVar[Mapping[str, str]] = {"embed": "embed_tokens", "norm": "norm"}
    inside: ClassVar[Mapping[str, str]] = {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.o": "self_attn.o_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
    }
    """Our modules of a block, and theirs; modules that a model does not have are not looked for."""
    derived: ClassVar[tuple[str, ...]] = ()
    """Ends of names of tensors that follow from the configuration."""

    def __init__(self, config: object, /) -> None: ...

    @abstractmethod
    def read(self, hf: Mapping[str, Any]) -> Table:
        """The table ``[model]``, as ``model_table``."""

    @abstractmethod
    def write(self, config: TransformerConfig, vocab_size: int) -> Table:
        """The content of ``config.json``. What it has no word for may be left out: it is read again and compared."""

    def fused(self, config: TransformerConfig) -> Mapping[str, Fused]:
        """Their modules of a block that are not one of ours."""
        return {}

    def modules(self, config: TransformerConfig) -> set[str]:
        """What has parameters in a block of ours, but for experts."""
        found = {"attention.q", "attention.k", "attention.v", "attention.o"}
        if config.norm_placement != "output":
            found |= {"attention_norm", "feed_forward_norm"}
        if config.norm_placement != "input":
            found |= {"attention_output_norm", "feed_forward_output_norm"}
        if config.qk_norm:
            found |= {"attention.q_norm", "attention.k_norm"}
        mlp = config.feed_forward.config
        if isinstance(mlp, MLPConfig):
            found |= {"feed_forward.up", "feed_forward.down", *(["feed_forward.gate"] if mlp.is_gated else [])}
        return found

    def model_table(self, config_json: Mapping[str, Any]) -> Table:
        return self.decoder_table(config_json)

    def decoder_table(self, config_json: Mapping[str, Any]) -> Table:
        """The same as if feed-forward layers were dense."""
        hf = ChainMap(cast("dict[str, Any]", config_json), dict(self.defaults))
        table = self.read(hf) | {ours: hf.get(theirs) or None for ours, theirs in self.dropouts.items()}
        return {key: value for key, value in table.items() if value not in (None, [], ())}

    def config_json(self, config: TransformerConfig, vocab_size: int) -> Table:
        name = self.architectures[0]
        refuse_further_parts(config)
        if not isinstance(config.feed_forward.config, MLPConfig) or latent_of(config) or config.multi_token:
            raise ConfigError(f"{name} has dense layers and heads with keys and values of their own")
        table = {
            **self.write(config, vocab_size),
            **{theirs: getattr(config, ours) for ours, theirs in self.dropouts.items()},
            "architectures": [name],
            "model_type": self.model_type,
            "vocab_size": vocab_size,
        }
        read = self.decoder_table(table)
        try:
            different = sorted(_differences(config, read))
        except ValueError as error:  # such as that of the long_rope of a head_dim that was left out
            raise ConfigError(f"{name} has no word for all of this model, and what is left {error}") from error
        if different:
            raise ConfigError(f"{name} has another {', '.join(different[:3])}{and_more(len(different), 3)}")
        return table

    def to_forge(self, config: TransformerConfig, names: Collection[str]) -> Mapping[str, Recipe]:
        embed = f"{self.outside['embed']}.weight"
        prefix = next((one for one in (self.prefix, *self.further_prefixes) if one + embed in names), "")
        # transformers 5 calls the head of every model lm_head in memory
        heads = (self.head, *self.further_heads, "lm_head")
        head = next((one for one in heads if f"{one}.weight" in names), "lm_head")
        pairs = list(self._pairs(config, prefix, head))
        spare = {name for name in names if is_derived(name) or name.endswith(self.derived or ("\0",))}
        if config.tie_embeddings:
            spare |= {f"{one}.weight" for one in heads}
        biased = self._biased(config)
        recipes: dict[str, Recipe] = {}
        for theirs, fused in pairs:
            for parameter in _parameters(fused, biased):
                for index, ours in enumerate(fused.ours):
                    recipes[f"{ours}.{parameter}"] = _read(f"{theirs}.{parameter}", fused, index, parameter)
        check_complete(set(names) - spare, {name for recipe in recipes.values() for name in recipe.reads})
        return recipes

    def to_huggingface(self, config: TransformerConfig) -> Mapping[str, Recipe]:
        biased = self._biased(config)
        return {
            f"{theirs}.{parameter}": Recipe(
                tuple(f"{ours}.{parameter}" for ours in fused.ours),
                functools.partial(_given, fused=fused, parameter=parameter),
            )
            for theirs, fused in self._pairs(config, self.prefix, self.head)
            for parameter in _parameters(fused, biased)
        }

    def _pairs(self, config: TransformerConfig, prefix: str, head: str) -> Iterator[tuple[str, Fused]]:
        """Their names of modules, and ours."""
        has = {"embed", "norm", *(["embed.positions"] if config.learned_positions else [])}
        for ours, theirs in self.outside.items():
            if ours in has:
                yield f"{prefix}{theirs}", Fused((ours,))
        if not config.tie_embeddings:
            yield head, Fused(("head",))
        fused = self.fused(config)
        apart = self.modules(config) - {ours for one in fused.values() for ours in one.ours}
        inside = {self.inside[ours]: Fused((ours,)) for ours in sorted(apart)}
        for number in range(config.n_layers):
            for theirs, one in {**inside, **fused}.items():
                names = tuple(f"blocks.{number}.{name}" for name in one.ours)
                yield f"{prefix}{self.layer.format(number)}{theirs}", attrs.evolve(one, ours=names)

    def _biased(self, config: TransformerConfig) -> set[str]:
        """Our modules with a bias."""
        has = biased_projections(config)
        if config.norm == LAYERNORM:
            has |= {name for name in self.modules(config) if name.endswith("_norm") and "." not in name}
        biased = {f"blocks.{number}.{name}" for number in range(config.n_layers) for name in has}
        return biased | ({"norm"} if config.norm == LAYERNORM else set())


def _parameters(fused: Fused, biased: Collection[str]) -> Sequence[str]:
    return ("weight", "bias") if fused.ours[0] in biased else ("weight",)


def _read(name: str, fused: Fused, index: int, parameter: str) -> Recipe:
    """How a parameter of ours is made of theirs with this name."""
    if fused.is_renaming:
        return Recipe((name,))
    make = functools.partial(_taken, fused=fused, index=index, parameter=parameter)
    if fused.find is None:
        return Recipe((name,), make)
    is_turned = fused.transposed and parameter == "weight"
    find = functools.partial(fused.find, index)
    return Recipe((name,), make, functools.partial(_read_found, name=name, find=find, is_turned=is_turned))


def _read_found(
    read: ReadPart,
    part: Sequence[slice],
    *,
    name: str,
    find: Callable[[slice], Sequence[slice]],
    is_turned: bool,
) -> torch.Tensor:
    import torch

    if is_turned:
        return torch.cat([read(name, (part[1], found)) for found in find(part[0])], dim=1).T.contiguous()
    return torch.cat([read(name, (found, *part[1:])) for found in find(part[0])])


def _taken(tensor: torch.Tensor, *, fused: Fused, index: int, parameter: str) -> torch.Tensor:
    if fused.transposed and parameter == "weight":
        tensor = tensor.T.contiguous()
    return fused.part(tensor, index)


def _given(*tensors: torch.Tensor, fused: Fused, parameter: str) -> torch.Tensor:
    joined = fused.join(*tensors)
    return joined.T.contiguous() if fused.transposed and parameter == "weight" else joined


def _differences(config: TransformerConfig, table: Table) -> Iterator[str]:
    """Keys in which the model that a table stands for computes something else."""
    table = dict(table)
    table.pop("name")
    layer = {key: value for key, value in table.pop("feed_forward").items() if key != "name"}
    table["feed_forward"] = attrs.evolve(config.feed_forward, config=MLPConfig(**layer))
    table["layers"] = tuple(LayerConfig(**one) for one in table.pop("layers", ()))
    if "mixer" in table:
        name = table["mixer"]["name"].split(":")[-1]
        unknown = ComponentRef(kind="sequence_mixer", name=name, provider="", factory="", config=None)
        table["mixer"] = unknown if config.mixer is None else attrs.evolve(config.mixer, name=name)
    for key, scaling in (("rope_scaling", Llama3Scaling), ("yarn", YarnScaling), ("long_rope", LongRope)):
        if key in table:
            given: Table = {name: tuple(one) if isinstance(one, list) else one for name, one in table[key].items()}
            table[key] = scaling(**given)
    ours, theirs = _computed(config), _computed(TransformerConfig(**table))
    return (key for key, value in ours.items() if not _alike(value, theirs[key]))


def _computed(config: TransformerConfig) -> Table:
    """All that decides on what a model computes, defaults filled in."""
    keys = (
        *("dim", "n_layers", "n_heads", "max_seq_len", "norm", "norm_placement", "norm_eps", "qk_norm"),
        *("qk_norm_over", "tie_embeddings", "learned_positions", "attention_bias", "attention_softcap"),
        *("output_softcap", "parallel_residual", "embed_multiplier", "output_multiplier", "residual_multiplier"),
        "rope_scaling",
    )
    found: Table = {key: getattr(config, key) for key in keys}
    found |= {"n_kv_heads": config.kv_heads, "head_dim": config.head_size}
    found["long_rope"] = None if config.long_rope is None else config.frequency_scaling
    found["yarn"] = None if config.yarn is None else attrs.evolve(config.yarn, logit_scale=None)
    layers = [config.layer(number) for number in range(config.n_layers)]
    found["attention_multiplier"] = [config.logit_scale(one) for one in layers]
    found["window"] = [one.window if one.window < config.max_seq_len else 0 for one in layers]
    found["attention_sinks"] = [one.attention_sinks for one in layers]
    found["rotary_fraction"] = [config.rotary_size(one) for one in layers]
    turned = [one for one in layers if config.rotary_size(one)]
    found |= {key: [getattr(one, key) for one in turned] for key in ("rope_theta", "rope_factor", "rope_stretched")}
    found["mixer"] = [getattr(one.mixer, "name", one.mixer) for one in layers]
    for number, one in enumerate(layers):
        mlp = one.feed_forward.config
        known = isinstance(mlp, MLPConfig)
        found[f"feed_forward of layer {number}"] = (
            [mlp.width(config.dim), mlp.activation.qualified_name, mlp.is_gated, mlp.bias]
            if known
            else one.feed_forward.name
        )
    return found


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
