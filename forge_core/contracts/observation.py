"""Observation: the values of a model that can be looked at, and how a pass lays them out over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from forge_core.contracts.parallel_pass import ParallelPass

if TYPE_CHECKING:
    from torch import nn


@attrs.frozen(kw_only=True)
class Site:
    """A tensor of each forward, by a name that models share, such as ``blocks.3.resid_post``."""

    module: str
    """The name of the module that has it, relative to whoever declares the site; empty is the declaring module."""
    where: Literal["input", "output"] = "output"
    argument: int = 0
    """Which positional argument of the module's forward, or which element of an output that is a tuple."""
    dims: tuple[str, ...]
    """The names of its dimensions, such as ``("sample", "position", "width")``. A dimension along which a sequence has
    its positions is ``"position"``; one that has the positions of the whole sequence in every layout is ``"key"``."""
    compute: str = ""
    """``"package.module:function"`` to compute it by, where no module has it. The function is given the module and then
    the arguments of its forward, positional and by name, and returns the tensor. ``where`` then says whether it lies
    over ranks as that argument does, or as the output."""
    replace: str = ""
    """``"package.module:function"`` that gives the module's output from another value of a computed tensor. It is given
    the module, that value, and then what ``compute`` is; and where the tensor lies as the output, ``part``, a function
    from a tensor with these dimensions that lies as the argument to this rank's part of it. Without it, the tensor can
    be read only."""
    computed_from: tuple[str, ...] = ()
    """The names of the dimensions of that argument or output, for a tensor that is computed. A dimension of the same
    name lies alike in both."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Given to the functions by name, such as the size of a head."""


def within(name: str, site: Site) -> Site:
    """The site of a module, seen from the module that has it as ``name``."""
    return attrs.evolve(site, module=f"{name}.{site.module}".rstrip("."))


@runtime_checkable
class ObservableModule(Protocol):
    """A module that declares sites: a model, and what its blocks are made of. Each site's tensor exists exactly once a
    forward in evaluation mode. A model that is no ``ObservableModule`` has the input and output of its blocks."""

    def sites(self) -> Mapping[str, Site]:
        """By name, relative to this module; of a model, those of its parts on this pipeline stage."""


@attrs.frozen
class Part:
    """A dimension of which each rank along a mesh axis has a part."""

    axis: str
    dim: int | str
    """The index of the dimension, negative from the end, or its name in ``Site.dims``."""
    order: Literal["contiguous", "balanced", "tokens"] = "contiguous"
    """``"balanced"``: of 2·C chunks, rank r of C has number r and number 2·C − 1 − r. ``"tokens"``: the dimension is
    that of positions, after that of samples, and each rank has an equal stretch of all tokens, sample by sample."""


ANY = -1
"""Stands for every argument."""


@attrs.frozen(kw_only=True)
class Ends:
    """How the values at the ends of one module lie."""

    inputs: Mapping[int, tuple[Part, ...]] = attrs.field(factory=dict)
    """Parts by the index of an argument, or ``ANY``; an argument that is not there is whole on each rank."""
    output: tuple[Part, ...] = ()
    summed_inputs: Mapping[int, tuple[str, ...]] = attrs.field(factory=dict)
    """Mesh axes over which the gradient of an argument, or of ``ANY``, is the sum of what ranks have."""
    summed_output: tuple[str, ...] = ()
    """The same of the output."""
    hidden: str = ""
    """A sentence that says why nothing can be computed from the arguments, if that is so."""


class LaidOutPass(ParallelPass, Protocol):
    """A pass of the phase ``shard`` deals values to ranks; without ``layout``, models it is applied to cannot be
    observed. One of the phase ``swap`` puts other modules in the place of some, and may have a ``layout`` that hides
    what cannot be computed there any more, such as the pattern of an attention kernel with a mask of its own; without
    it, nothing can be computed at modules of its own classes."""

    def layout(self, model: nn.Module) -> Mapping[str, Ends]:
        """Tell how values lie at the modules of one part of the model, be the passes applied or not.

        Returns:
            By canonical names. The empty name stands for all modules, in addition to what they have by their own.
            A module that is not named has whole values on each rank, but for that.
        """
