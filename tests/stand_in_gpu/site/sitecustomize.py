"""Gives a process the stand-in for a GPU as it imports torch, if ``TORCH_STAND_IN_GPU`` names the library."""

import importlib.util
import os
import sys


class Around:
    """Runs a generator around the import of a module: to its ``yield`` before that, and on when it is there."""

    def __init__(self, module, steps):
        self._module, self._steps = module, steps

    def find_spec(self, name, path=None, target=None):
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        next(self._steps)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_go_on(module):
            execute(module)
            next(self._steps, None)

        spec.loader.exec_module = execute_and_go_on
        return spec


def torch_with(library):
    import stand_in_gpu

    loaded = stand_in_gpu.load(library)
    yield
    stand_in_gpu.replace(loaded)


def inductor_without_kernels():
    import stand_in_gpu

    yield
    stand_in_gpu.replace_compiler(sys.modules["torch._inductor.compile_fx"])


if "TORCH_STAND_IN_GPU" in os.environ:
    sys.meta_path.insert(0, Around("torch", torch_with(os.environ["TORCH_STAND_IN_GPU"])))
    sys.meta_path.insert(0, Around("torch._inductor.compile_fx", inductor_without_kernels()))
