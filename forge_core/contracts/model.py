"""Models: what they declare about themselves, so that passes need not know them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_core.contracts.builder import Builder
    from forge_core.contracts.loss import Loss, LossSum

SHARD_ROLES = (
    *("column", "row", "vocab", "embedding", "expert", "router", "whole", "sequence", "residual", "replicate", "tower"),
)
"""The roles of modules that Forge's own passes know."""
ShardRole = str
"""The role of a module under tensor parallelism (axis ``tp``). A package may bring more than ``SHARD_ROLES``, for a
pass of its own; a pass refuses one that it does not know.

=============  ============================  ===========================  ==================================
role           sharded                       reads                        gives
=============  ============================  ===========================  ==================================
``column``     weights, by output features   whole activations            this rank's features
``row``        weights, by input features    this rank's features         a sum over ranks: residual stream
``embedding``  the table, by vocabulary      token ids (or positions)     a sum over ranks: residual stream
``vocab``      the head, by vocabulary       whole activations            logits of this rank's vocabulary
``expert``     each expert of a stack        whole activations            this rank's part of the sum
               (``StackedExperts``), by
               hidden features; over ``ep``
               the stack itself
``router``     nothing                       what experts read            what steers them
``replicate``  nothing                       this rank's features         this rank's features
``whole``      nothing                       what ``column`` reads        what ``row`` gives
``sequence``   its input, by token           this rank's tokens of the    whole activations
                                             residual stream
``residual``   its input, by token           this rank's tokens of the    the same tokens
                                             residual stream
``tower``      nothing                       the same on each rank        the same on each rank
=============  ============================  ===========================  ==================================

A ``column`` module is an ``nn.Linear``; or it has ``out_features`` and, in place of ``weight``, one ``bias`` of so many
numbers, and its forward sees those of this rank. A norm over features of all ranks is ``column``, too: it has
``out_features`` and a ``weight`` of so many numbers, reads and gives this rank's features, and is given by keyword
``mean_square``, ``(…, 1)`` fp32, that of all ranks' features.

A ``replicate`` module whose work depends on which features or heads a rank has, such as one that drops some, has an
attribute ``part``, 0, which becomes the number of the rank along ``tp``.

The gradients of what is whole on each rank:

- ``router`` and ``replicate``: the sum over ranks, as each sees the gradient of its own features alone.
- ``sequence`` and ``residual``: the sum over ranks, as each has other tokens: one of n equal stretches of the B·S
  tokens, sample by sample, in the shape ``(B, S / n, …)``. What a ``residual`` module is given beside hidden states,
  ``(B, S)`` of all tokens, reaches it for its own tokens alone.
  What it is given by keyword comes whole, from a ``tower``; then hidden states do, too, as its rows are those of the
  microbatch.
- ``whole``: each rank does all of the work, and its gradient counts once.
- ``tower``: the gradient of what it gives is summed over ranks, as each reads it for its own tokens or features; so
  that of its parameters is whole. Modules within it may be ``column`` and ``row``, between which lies this rank's
  features; what they read and give is whole on each rank, and is no residual stream.

Examples: a norm before attention is ``sequence``; a norm right after the embedding, or of what a layer gives, is
``residual``; a norm of each head is ``replicate``, one over all heads ``column``; an encoder of images beside the
decoder is a ``tower``. Without ``sequence`` modules a module without a role works on whole activations; with them,
every module that has parameters has a role."""

PARAMETER_ROLES = ("matrix", "embedding", "head", "norm", "bias", "expert")
"""The roles of parameters that Forge's own optimizers know."""
ParameterRole = str
"""The role of a parameter to an optimizer. ``head`` is the output matrix when it is not tied to the embedding. A
package may bring more than ``PARAMETER_ROLES``; an optimizer or parametrization that has no rule for one says so."""

Recompute = Literal["keep", "recompute"]


class Initializer(Protocol):
    """Fills parameters and buffers, each from a generator of its own seeded by (run seed, name).

    The values do not depend on how a tensor is sharded, on which pipeline stage holds it, or on the order of calls.
    """

    def fill(self, name: str, tensor: torch.Tensor, fill: Callable[[torch.Tensor, torch.Generator], object]) -> None:
        """Call ``fill(full, generator)``, which must write all of ``full`` in place, and keep this rank's part of it.

        Args:
            name: the qualified name in the whole model, such as ``blocks.3.attention.q.weight``.
            tensor: the parameter or buffer to write, possibly a ``DTensor``.
            fill: given a plain tensor of the global shape and of ``tensor``'s dtype, and a generator on its device.
        """

    def fill_each(
        self, name: str, tensor: torch.Tensor, fill: Callable[[torch.Tensor, torch.Generator], object]
    ) -> None:
        """Same as ``fill``, for a stack of tensors along the first dimension (experts), each with a generator of its
        own.

        No rank draws more than the ones it holds, and one of them at a time.

        Args:
            fill: given one of the stack.
        """


class StackedExperts(Protocol):
    """A module of the role ``expert``: it reads ``(B, S, D)`` as its first argument and gives ``(B, S, D)``, and all of
    its own parameters are stacks ``(E, …)`` with one entry an expert."""

    def feature_dims(self) -> Mapping[str, int]:
        """The dimension of each parameter along which it has the experts' hidden features. Given equal parts of all of
        them, the module gives a part of its sum. What it does not name is whole on each rank, and counts there for that
        part: the gradient is the sum over ranks."""


class Float8Experts(StackedExperts, Protocol):
    """Experts that can multiply in float8, where they are asked to."""

    def multiply_in_float8(self, capability: tuple[int, int] | None) -> None:
        """From here on, round what is multiplied to float8 whenever it is, forward and backward.

        Parameters are on meta, cut as they will be (``tp``, ``ep``), and stay in their dtype.

        Args:
            capability: the compute capability of the GPU that will do it; ``None``: round, and multiply in the dtype of
                the activations, on any device.

        Raises:
            ConfigError: it cannot; the message says why.
        """


class Model(Protocol):
    """An ``nn.Module`` made of an embedding, blocks, a norm and a head. It is built on the meta device. Once its
    tensors are not named as they were, it has ``state_version`` and ``load_state`` (``VersionedModule``).

    The four parts are attributes with these names, and ``None`` on a pipeline stage that does not hold them. ``embed``,
    ``norm`` and ``head`` may be ``None`` of a whole model, such as an autoencoder, which no pipeline cuts. Further
    parts and units are those of a ``TowerModel``.

    The embedding's table is there before the first block, and the head's weight after the last one (of a
    ``MultiTokenModel``, the last one before the head): a pass may free them while blocks run. A model that uses one of
    them at another time calls it as a module.
    """

    embed: nn.Module | None
    blocks: nn.ModuleDict
    """The repeated units, in order. Keys are global layer indices as strings, stable under pipeline splits. Units of
    sharding, checkpointing, compiling and pipelining come from here. Each is called with the hidden states as its first
    positional argument, and gives hidden states."""
    norm: nn.Module | None
    head: nn.Module | None
    """The output projection, with ``weight`` of shape ``(V, D)``; tied models share it with the embedding's table."""
    vocab_size: int
    max_seq_len: int
    """The longest sequence, in tokens, that ``forward`` accepts."""

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        loss: Loss | None = None,
        **inputs: Any,
    ) -> torch.Tensor | LossSum:
        """Run the parts that are present.

        Args:
            tokens: ``(B, S)`` int64 token ids; hidden states ``(B, S, D)`` on a stage without ``embed``.
            targets: ``(B, S)`` int64, −100 where there is nothing to learn; needed with ``loss``.
            loss: applied to the normed hidden states and ``self.head`` *inside* forward, so that a fused loss never
                builds the full logits and the head's weights are gathered once.
            inputs: other entries of the batch: ``positions`` ``(B, S)`` int64 (position inside its document) and
                ``document`` ``(B, S)`` int64 (equal ids attend to each other); ``cache`` when generating; ``mask``
                under context parallelism. If the model has an attribute ``needs`` with their names in it, also
                ``token_ids`` ``(B, S)`` int64, on a stage without ``embed``; and in training ``noise`` ``(B, S)``
                int64, a number of each token that no other token of the run has. Noise that is a function of it, of
                the layer and the feature is the same in every layout, after a resume and in recomputation.

        Returns:
            With ``loss``, its ``LossSum``. Without, the logits ``(B, S, V)``, or hidden states ``(B, S, D)`` on a stage
            without a head.
        """

    def init_weights(self, rng: Initializer) -> None:
        """Fill every parameter and every buffer through ``rng``. The engine refuses a model that forgets one."""

    def parallel_plan(self) -> Mapping[str, ShardRole]:
        """Name patterns of modules (``*`` stands for one name component) to how each is cut over ``tp``."""

    def recompute_plan(self) -> Mapping[str, Recompute]:
        """Operations (``"aten.mm"``, ``"aten._scaled_dot_product_flash_attention"``) to whether selective activation
        checkpointing keeps their result or computes it again. Operations not named are recomputed."""

    def parameter_roles(self) -> Mapping[str, ParameterRole]:
        """The role of every parameter, by qualified name; names present on this stage only."""

    def flops_per_token(self, seq_len: int) -> float:
        """Forward and backward FLOPs a token: 6 a weight that is multiplied (the embedding table is not), and
        ``12 · layers · D · S`` for attention, without halving for causality (PaLM, appendix B)."""


class GenerativeModel(Model, Protocol):
    """A model that ``forge generate`` can sample from."""

    def make_cache(self, batch_size: int, max_len: int) -> Any:
        """An empty cache of keys and values for ``max_len`` positions, on the device and in the dtype of the weights.

        Passed as ``forward(tokens, cache=cache)``, which appends the new positions and attends to all of them. Prompts
        may be fed in chunks of any length, and rows of a batch may be left-padded: ``positions`` is then given, and is
        −1 at padding, which nothing attends to.
        """


class ContextParallelModel(Model, Protocol):
    """A model whose sequences can be split over ranks: nothing in it but its attention looks at other positions."""

    def context_plan(self) -> Sequence[str]:
        """The qualified names of the modules that compute attention, those on this stage only.

        Their forward's first arguments are ``q, k, v``, positional: ``(B, H, S, head_dim)`` and twice
        ``(B, H_kv, S, head_dim)``, after rotary and other embeddings of positions. A pass puts the ``T ≥ S`` positions
        of the whole sequence in place of the ``S`` of ``k`` and ``v``.

        ``Model.forward`` then is given ``positions``, and ``mask``, which each of these modules has to obey in place of
        causality and documents, without looking at what it is: true where a query sees a key, ``(B or 1, 1, S, T)``
        bool, or a FlexAttention ``BlockMask`` of that shape on CUDA.

        A model with a method ``attention_windows`` gives the numbers of positions that its layers see, 0 for all. If
        there are any, it is given a mapping from each to its mask.

        A pass may as well leave ``k`` and ``v`` and give no ``mask``. These modules then have to call
        ``torch.nn.functional.scaled_dot_product_attention`` with ``is_causal``, which the pass takes for itself.
        """


class TowerModel(Model, Protocol):
    """A model with more than an embedding, blocks, a norm and a head, such as an encoder of images. Each of these
    methods is optional, and a model may have one without the others."""

    def units(self) -> Sequence[str]:
        """The qualified names of further modules that are gathered, recomputed and compiled on their own, as blocks
        are: the layers of an encoder. Those present on this stage only, in the order in which they run.

        Each is called with hidden states as its first positional argument, and gives hidden states. None of them is in
        another one, or in a block. A pass may put another module in its place, which has the same name.
        """

    def stage_of(self) -> Mapping[str, Literal["first", "last"]]:
        """Attributes of the model that are parts of it beside ``embed``, ``blocks``, ``norm`` and ``head``, and have
        parameters, with the pipeline stage that they belong to; the same on all stages.

        Like the others, such a part is ``None`` on a stage that does not hold it.
        """

    def flops_of(self, unit: str) -> float:
        """Forward and backward FLOPs a token of ``embed``, of a block (``blocks.3``), or of a part in ``stage_of``, by
        which pipeline stages are balanced. Of a part, those of a sequence, divided by its tokens.

        Without it all blocks count the same, and what ``flops_per_token`` has beside the head is theirs.
        """

    def flops_beside(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Forward and backward FLOPs of a batch beyond ``flops_per_token`` for each of its tokens, padding included,
        such as those of the images that it really has; less than 0 if it has fewer than were counted. The metric
        ``mfu`` counts with it. Asked of the first part of each rank, with its batches in the host's memory.
        """


class AliasedModel(Model, Protocol):
    """A model that has names for groups of its parameters."""

    def parameter_aliases(self) -> Mapping[str, Sequence[str]]:
        """Patterns of parameter names (``*`` stands for anything, dots included), by the group's name.

        A job writes ``@connector`` for ``{"connector": ["vision.connector.*"]}`` where patterns of parameters are asked
        for: in ``[[phases]]``, and in the groups of an optimizer. It is asked of the whole model, with what passes have
        added. Groups may overlap; one that means no parameter of this model is as if it were not there.
        """


class FreezableModel(Model, Protocol):
    """A model that can leave work out while a phase does not train some of its parameters."""

    def set_frozen(self, names: Collection[str]) -> None:
        """From the next forward on, train none of these parameters: this replaces what was said before.

        Called on every part before the first step of each start, and where a phase begins. The parameters still require
        gradients, and are given to the optimizer; gradients that they get are dropped. So a model need do nothing, and
        may run a module that is frozen as a whole without gradients and in evaluation mode, also after ``train()``. It
        must do so on all ranks alike.

        Args:
            names: of parameters of the whole model, on any pipeline stage.
        """


class TravellingModel(Model, Protocol):
    """A model whose pipeline stages need more of earlier ones than hidden states.

    A stage without ``head`` then gives ``(hidden, {name: tensor})``, and the next one is given the tensors as keyword
    arguments of ``forward``, and gives them in its turn, changed or not, if it has no head either. Gradients go back
    the same way. Where nothing needs one, as of what a frozen encoder has made, zeros do.
    """

    def travels(self, shapes: Mapping[str, Sequence[int]]) -> Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]:
        """Names, shapes and dtypes of what goes from stage to stage beside hidden states, for a batch of these shapes.

        Names are the same for all batches and on all stages, and those of arguments that no entry has. Shapes have no
        dimension of size 0, and may differ from microbatch to microbatch. Empty: hidden states alone, and a stage gives
        just these.

        Between stages lies what forward has given, whole over ``tp``, as hidden states are: a module of the role
        ``sequence`` gathers what ranks have by position, and one of the role ``whole`` shares it out again, as it does
        the output of a layer. Over ``cp`` each rank sends what it has.

        Args:
            shapes: of each entry of the batch, as forward sees it: under ``cp``, of this rank's positions.

        Returns:
            By name, the shape on this rank, and a floating dtype, or ``None`` for that of hidden states.
        """


class MultiTokenModel(Model, Protocol):
    """A model that also predicts tokens further ahead than the next, each with an auxiliary loss of its own."""

    n_predictors: int
    """So many of the last ``blocks`` of the whole model do that, and belong to the stage that has the head, which each
    of them uses once. Such a block may give further tensors beside the hidden states, after them."""

    def count_targets(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, int]:
        """Tokens of a batch in the host's memory that auxiliary losses are means over, by their names; losses without a
        number of their own are divided by that of valid targets. The names are the same for all batches."""


class ModelConfig(Protocol):
    """Numbers that a model's config class may have as fields or properties, each optional.

    Passes ask for them by these names, so that `forge validate` refuses what a build would refuse. A number that is not
    there is not checked before the build.
    """

    dim: int
    """Width of the residual stream, D."""
    n_layers: int
    """Entries of ``blocks``, those of ``n_predictors`` not counted."""
    n_predictors: int
    """Same as ``MultiTokenModel.n_predictors``; 0 where it is not there."""
    n_experts: int | None
    """Routed experts of a sparse block; 0 if no block is sparse, ``None`` if that is not known before the build."""
    vocab_size: int | None
    """Rows of the embedding table and of the head, where the model says so and not the data."""
    head_size: int
    """Features of a query that a key is multiplied with."""
    beyond_causal: str
    """The key that asks attention for more than causal order, such as a sliding window; empty if none does."""
    output_multiplier: float
    """Factor on the logits. A parametrization sets this and the next three."""
    residual_multiplier: float
    """Factor on the output of each layer before it is added to the residual stream."""
    attention_multiplier: float
    """Factor on the logits of attention, beside ``1 / √head_size``."""
    init_layers: int | None
    """The number of layers that initial values depend on, if they do; by default ``n_layers``."""

    def matrices(self) -> Mapping[str, tuple[int, int, ShardRole]]:
        """Output features, input features and role of the kinds of linear layers, by the keys that decide their sizes.

        Kinds that are known before the build; of a model with ``n_experts = 0``, all.
        """


class ModelFactory(Protocol):
    """The signature of the factory that a description names."""

    def __call__(self, config: Any, /, *, vocab_size: int, build: Builder) -> nn.Module:
        """Build the model on the current default device (the engine sets ``meta``).

        Args:
            config: an instance of the component's config class. If it has a field ``vocab_size: int | None``, the
                engine takes a number there over the data's, and refuses one that is smaller.
            vocab_size: rows of the embedding table and of the head.
            build: builds nested components.
        """


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def canonical_name(name: str) -> str:
    """The name, of a module or a tensor, in the model as it was built: without what wrappers (compile, checkpointing)
    put between."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def fits(name: str, pattern: str) -> bool:
    """Return whether a plan's pattern means ``name``: ``blocks.*.head`` means ``blocks.3.head``, and not
    ``blocks.3.head.norm``."""
    return name.count(".") == pattern.count(".") and is_within(name, pattern)


def longest_first(patterns: Iterable[str]) -> list[str]:
    """Sort patterns so that the first that fits is the closest: a table's own order is lost when a job is written."""
    return sorted(patterns, key=lambda one: (-len(one), one))


def is_within(name: str, pattern: str) -> bool:
    """Return whether ``name`` is of a module that the pattern means, or of one in it."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(w in ("*", part) for part, w in zip(parts, wanted, strict=False))
