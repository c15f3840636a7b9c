"""Gives a process the stand-in for a GPU as it imports torch, if ``TORCH_STAND_IN_GPU`` names the library."""

import importlib.util
import os
import sys


class _BeforeTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(_BeforeTorch)
        import stand_in_gpu

        library = stand_in_gpu.load(os.environ["TORCH_STAND_IN_GPU"])
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def execute_and_replace(module):
            execute(module)
            stand_in_gpu.replace(library)

        spec.loader.exec_module = execute_and_replace
        return spec


if "TORCH_STAND_IN_GPU" in os.environ:
    sys.meta_path.insert(0, _BeforeTorch)
