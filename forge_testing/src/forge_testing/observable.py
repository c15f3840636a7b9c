"""Conformance of what a model declares to be looked at (contract: ``forge_core.contracts.observation``)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from forge_core.contracts.observation import ObservableModule, Site
from forge_core.registry.imports import load_reference

Values = dict[str, list[torch.Tensor]]


class ObservableConformance:
    """Checks of a model's ``sites``; ``ModelConformance`` has them. A model without ``sites`` is not checked."""

    seq_len: ClassVar[int]

    @abstractmethod
    def build_model(self, seed: int = 0) -> Any:
        """Build the model on the CPU, with its initial values."""

    @abstractmethod
    def tokens(self) -> torch.Tensor:
        """Token ids ``(2, S)``."""

    @abstractmethod
    def inputs(self) -> Mapping[str, torch.Tensor]:
        """What else forward is given."""

    def test_every_site_has_its_dims_once_a_forward(self) -> None:
        model, sites = self._observable()
        tokens = self.tokens()

        with torch.no_grad(), observed(model, sites) as seen:
            model(tokens, **self.inputs())

        sizes = {"sample": len(tokens), "position": tokens.shape[1], "key": tokens.shape[1]}
        for name, site in sites.items():
            values = seen.get(name, [])
            assert len(values) == 1, f"the site {name} is computed {len(values)} times in a forward, and must be once"
            assert_dims(name, site, values[0], sizes)

    def test_looking_at_sites_changes_nothing(self) -> None:
        model, sites = self._observable()

        with torch.no_grad():
            expected = model(self.tokens(), **self.inputs())
            with observed(model, sites):
                found = model(self.tokens(), **self.inputs())

        # products of matrices are rounded by where their tensors lie in memory, which is elsewhere if some are kept
        nearly = torch.allclose(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
        assert nearly, "the logits are others while sites are looked at"

    def test_a_site_put_back_gives_what_its_module_gave(self) -> None:
        model, sites = self._observable()
        modules = _modules(model)
        replaced = [name for name, site in sites.items() if site.replace]
        if not replaced:
            pytest.skip("no site has replace")

        for name in replaced:
            site, pairs = sites[name], []

            def after(module: nn.Module, args: Any, kwargs: Any, output: Any, site: Site = site) -> None:
                value = function(name, site.compute)(module, *args, **kwargs, **site.options)  # noqa: B023
                own = {"part": lambda tensor: tensor} if site.where == "output" else {}
                given = function(name, site.replace)(module, value, *args, **kwargs, **site.options, **own)  # noqa: B023
                pairs.append((given, output))  # noqa: B023

            handle = modules[site.module].register_forward_hook(after, with_kwargs=True)
            with torch.no_grad():
                model(self.tokens(), **self.inputs())
            handle.remove()
            for given, output in pairs:
                difference = (given - output).abs().max().item()
                assert difference < 1e-4, (
                    f"the site {name}: replace, of the value that compute gives, changes what "
                    f"{site.module} gives by {difference:.3g}"
                )

    def test_sites_are_there_with_a_cache(self) -> None:
        model, sites = self._observable()
        if not hasattr(model, "make_cache"):
            pytest.skip("the model has no make_cache")
        half = self.seq_len // 2

        with torch.no_grad(), observed(model, sites) as seen:
            cache = model.make_cache(2, self.seq_len)
            for part in (slice(half), slice(half, None)):
                model(self.tokens()[:, part], cache=cache, **_cut(self.inputs(), part, self.seq_len))

        # what stands beside the decoder, as an encoder of images does, is looked at once
        beside = tuple(f"{part}." for part in model.stage_of()) if hasattr(model, "stage_of") else ()
        twice = [name for name, site in sites.items() if not f"{site.module}.".startswith(beside)] if beside else sites
        passed_by = [name for name in twice if len(seen.get(name, [])) != 2]
        assert not passed_by, f"with a cache, two forwards do not compute {', '.join(passed_by)} twice"

    def _observable(self) -> tuple[Any, Mapping[str, Site]]:
        model = self.build_model().eval()
        if not isinstance(model, ObservableModule):
            pytest.skip("the model declares no sites")
        sites: Mapping[str, Site] = model.sites()
        modules = _modules(model)
        for name, site in sites.items():
            assert site.module in modules, f"the site {name} is at {site.module!r}, which is no module of the model"
        return model, sites


@contextmanager
def observed(model: nn.Module, sites: Mapping[str, Site]) -> Iterator[Values]:
    """All values of the sites, forward by forward."""
    seen: Values = {}
    modules, handles = _modules(model), []
    for name, site in sites.items():

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name, site: Site = site) -> None:
            seen.setdefault(name, []).append(_value(name, site, module, args, kwargs, output))

        handles.append(modules[site.module].register_forward_hook(after, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _value(name: str, site: Site, module: nn.Module, args: Any, kwargs: Any, output: Any) -> torch.Tensor:
    if site.compute:
        value = function(name, site.compute)(module, *args, **kwargs, **site.options)
    else:
        ends = args if site.where == "input" else output if isinstance(output, tuple) else (output,)
        assert len(ends) > site.argument, (
            f"the site {name} is {site.where} {site.argument} of {site.module}, which has {len(ends)}"
        )
        value = ends[site.argument]
    assert isinstance(value, torch.Tensor), f"the site {name} is a {type(value).__name__}, and must be a tensor"
    return value.detach().clone()


def assert_dims(name: str, site: Site, value: torch.Tensor, sizes: Mapping[str, int]) -> None:
    """The value has the declared dimensions, with these sizes by name."""
    assert value.ndim == len(site.dims), (
        f"the site {name} has the shape {tuple(value.shape)}, and declares {len(site.dims)} dims: "
        f"{', '.join(site.dims)}"
    )
    for dim, size in zip(site.dims, value.shape, strict=True):
        expected = sizes.get(dim, size)
        assert size == expected, f"the site {name} has {size} along its dim {dim!r}, and there are {expected}"


def _modules(model: Any) -> dict[str, nn.Module]:
    return dict(model.named_modules())


def function(name: str, reference: str) -> Any:
    """The function of a site that is computed."""
    return load_reference(reference, what=f"the function of site {name}", owner=reference.partition(".")[0])


def _cut(inputs: Mapping[str, torch.Tensor], part: slice, length: int) -> dict[str, torch.Tensor]:
    return {name: one[:, part] if one.ndim > 1 and one.shape[1] == length else one for name, one in inputs.items()}
