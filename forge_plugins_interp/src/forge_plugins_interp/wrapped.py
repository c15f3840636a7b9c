"""Any module, looked at and changed as a model of ours is: on one process, by the names of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from forge_core.config.sections import AXES
from forge_core.distributed.mesh import Mesh, join_process_group
from forge_core.errors import ConfigError
from forge_plugins_interp.batch_shape import BATCH
from forge_plugins_interp.session import ObservedModel
from forge_plugins_interp.sites import Sites

Inputs = Callable[[Mapping[str, torch.Tensor]], Mapping[str, Any]]
"""From the entries of a batch to the arguments of a forward, by name."""


@attrs.define(eq=False)
class WrappedModel(ObservedModel):
    """A module, and the sites that its modules are. It is a context manager, which closes it."""

    module: nn.Module
    sites: Sites
    _mesh: Mesh
    _batch_dims: tuple[str, ...]
    _inputs: Inputs
    _batch_size: int
    _seed: int
    _stack: ExitStack

    def model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, in the mode that it is in, and return what it gives."""
        return self.module(*args, **kwargs)

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    @property
    def batch_dims(self) -> tuple[str, ...]:
        return self._batch_dims

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def seed(self) -> int:
        return self._seed

    def run_batch(self, source: object, batch: Mapping[str, torch.Tensor]) -> None:
        device = next((one.device for one in self.module.parameters()), torch.device("cpu"))
        self.module(**self._inputs({name: entry.to(device) for name, entry in batch.items()}))

    def close(self) -> None:
        """Leave the process group that it has made."""
        self._stack.close()

    def __enter__(self) -> WrappedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wrap(
    module: nn.Module,
    *,
    dims: tuple[str, ...] = BATCH,
    inputs: Inputs = dict,
    batch_size: int = 8,
    seed: int = 0,
) -> WrappedModel:
    """Look at any module, such as a model of transformers, on one process.

    Its sites are its modules by name (``model.layers.0.mlp``, ``model.layers.0.mlp.input``), and the ones that it
    declares. Of a Llama-like model of transformers, our names of them (``blocks.0.resid_post``) are understood, too.

    Args:
        dims: the names of the first dimensions of the first tensor that forward is given: ``("sample", "position")``
            for tokens ``(B, S)``, ``("sample",)`` for vectors. The value of a module has their names where it begins
            with as many.
        inputs: in an extraction, what forward is given of a batch of the source; by default its entries, by name.
        batch_size: samples of a forward of an extraction.
        seed: of random features.

    Raises:
        ConfigError: this process is one of several.
    """
    stack = ExitStack()
    if not dist.is_initialized():
        join_process_group(torch.device("cpu"))
        stack.callback(dist.destroy_process_group)
    if dist.get_world_size() > 1:
        stack.close()
        raise ConfigError("wrap looks at a module on one process, and this is one of several")
    mesh = Mesh(init_device_mesh("cpu", (1,) * len(AXES), mesh_dim_names=AXES), dict.fromkeys(AXES, 1))
    sites = Sites.placed([module], [], mesh, dims=dims, needed=1)
    return WrappedModel(module, sites, mesh, dims, inputs, batch_size, seed, stack)
