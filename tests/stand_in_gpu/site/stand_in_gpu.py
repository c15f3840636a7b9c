"""The Python side of ``device.cpp``: what ``torch.cuda`` is missing in a build without CUDA.

torch's Python code for CUDA calls functions that such a build does not have. Each has an answer here, that of an H100.

By hand: ``python stand_in_gpu.py /tmp/gpu.so`` compiles it, and ``TORCH_STAND_IN_GPU=/tmp/gpu.so TRITON_INTERPRET=1
PYTHONPATH=tests/stand_in_gpu/site`` before a command gives it four GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
import sysconfig
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

DEVICES = 4
SOURCE = Path(__file__).parents[1] / "device.cpp"
_CAPACITY = 80 * 2**30


def command(library: Path) -> list[str]:
    """How ``g++`` makes it from ``device.cpp``."""
    torch = Path(str(importlib.util.find_spec("torch").origin)).parent
    headers = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    options = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", *(f"-I{each}" for each in headers))
    libraries = (f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}")
    return ["g++", *options, str(SOURCE), *libraries, "-o", str(library)]


def load(file: str) -> ctypes.CDLL:
    """Before torch is imported."""
    torch = Path(str(importlib.util.find_spec("torch").origin)).parent
    ctypes.CDLL(str(torch / "lib/libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
    library.stand_in_allocated.restype = library.stand_in_peak.restype = ctypes.c_int64
    for function in (library.stand_in_pin, library.stand_in_resize_storage):
        function.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.stand_in_unpin.argtypes = [ctypes.c_int64]
    return library


_library: ctypes.CDLL
_ON_WAIT = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@contextlib.contextmanager
def waits() -> Iterator[Counter[str]]:
    """Counts what makes the host wait for the GPU, as ``operator in file:line``, by the last line of Forge's."""
    counted: Counter[str] = Counter()

    def count(operator: bytes) -> None:
        stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1))]
        if any(file.endswith("_higher_order_ops/flex_attention.py") for file, _ in stack):
            return  # of the products that stand for its kernel
        file, line = next((one for one in stack if "/forge_" in one[0]), ("torch", 0))
        place = f"{Path(file).name}:{line}" if line else file
        counted[f"{operator.decode()} in {place}"] += 1

    called = _ON_WAIT(count)
    _library.stand_in_on_wait(called)
    try:
        yield counted
    finally:
        _library.stand_in_on_wait(None)


def replace(library: ctypes.CDLL) -> None:
    """Once torch is imported."""
    global _library
    _library = library
    _replace_devices(library)
    _replace_sync_debug_mode(library)
    _replace_memory(library)
    _replace_streams(library)
    _replace_generators(library)
    _replace_collectives()
    _replace_profiler()
    _replace_kernels()


def _index(device: Any) -> int:
    import torch

    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return _library.stand_in_device() if index is None else index


def _replace_devices(library: ctypes.CDLL) -> None:
    import torch
    from torch import cuda

    def exchange(index: int) -> int:
        before = library.stand_in_device()
        if index >= 0:
            library.stand_in_set_device(index)
        return before

    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        total_memory=_CAPACITY,
        multi_processor_count=132,
        uuid="stand-in",
    )
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = lambda: True
    cuda._initialized = True
    cuda._lazy_init = cuda.init = lambda: None
    # each a function of its own: torch.compile has a table of them
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda._is_compiled = lambda: True
    cuda.device_count = lambda: DEVICES
    cuda.current_device = lambda: library.stand_in_device()
    cuda.set_device = lambda device: library.stand_in_set_device(_index(device))
    cuda._exchange_device = lambda index: exchange(index)
    cuda._maybe_exchange_device = lambda index: exchange(index)
    cuda.synchronize = lambda device=None: library.stand_in_wait(b"device.synchronize")
    cuda._sleep = lambda cycles: None
    cuda.get_device_name = lambda device=None: properties.name
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.get_device_properties = lambda device=None: properties
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.can_device_access_peer = lambda one, other: True
    # imported by name where torch.compile looks for devices
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch._C._cuda_CUDAAllocator_AllocatorState = type("AllocatorState", (), {})
    torch._C._set_cached_tensors_enabled = lambda enabled: None


def _replace_sync_debug_mode(library: ctypes.CDLL) -> None:
    import torch

    @_ON_WAIT
    def warn(_: bytes) -> None:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def set_mode(mode: int) -> None:
        assert mode < 2, "a function that is called from C++ cannot raise"
        library.stand_in_on_wait(warn if mode else None)

    torch._C._cuda_set_sync_debug_mode = set_mode


def _replace_memory(library: ctypes.CDLL) -> None:
    import torch
    from torch import cuda

    def stats(device: Any = None) -> dict[str, int]:
        now, peak = library.stand_in_allocated(), library.stand_in_peak()
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
        values = {f"{kind}.all.{when}": n for kind in kinds for when, n in (("current", now), ("peak", peak))}
        return {**values, "num_alloc_retries": 0, "num_ooms": 0}

    for module in (cuda, cuda.memory):
        module.memory_stats = stats
        module.memory_allocated = module.memory_reserved = lambda device=None: library.stand_in_allocated()
        module.max_memory_allocated = module.max_memory_reserved = lambda device=None: library.stand_in_peak()
        module.reset_peak_memory_stats = lambda device=None: library.stand_in_reset_peak()
        module.mem_get_info = lambda device=None: (_CAPACITY - library.stand_in_allocated(), _CAPACITY)
        module.empty_cache = lambda: None

    resize_on_host = torch.UntypedStorage.resize_

    def resize(storage: Any, n_bytes: int) -> Any:
        if storage.device.type != "cuda":
            return resize_on_host(storage, n_bytes)
        library.stand_in_resize_storage(storage._cdata, n_bytes)
        return storage

    def register(address: int, n_bytes: int, flags: int) -> int:
        library.stand_in_pin(address, n_bytes)
        return 0

    def unregister(address: int) -> int:
        library.stand_in_unpin(address)
        return 0

    torch.UntypedStorage.resize_ = resize
    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=unregister, cudaError=SimpleNamespace(success=0)
    )
    cuda.cudart = lambda: runtime
    cuda.check_error = lambda code: None


def _replace_streams(library: ctypes.CDLL) -> None:
    import torch
    from torch import cuda

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **same: Any) -> Stream:
            if same:
                return torch.Stream.__new__(cls, **same)
            return torch.Stream.__new__(cls, torch.device("cuda", _index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
            return torch.Event.__new__(cls, torch.device("cuda", _index(None)), enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            super().record(stream or current_stream())
            self._recorded = time.perf_counter()

        def elapsed_time(self, end: Any) -> float:  # torch's takes no event of another class
            return 1e3 * (end._recorded - self._recorded)

        def wait(self, stream: Any = None) -> None:
            super().wait(stream or current_stream())

    class StreamContext:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            if self._stream is not None:
                self._before = current_stream(self._stream.device)
                torch.accelerator.set_stream(self._stream)

        def __exit__(self, *_: object) -> None:
            if self._stream is not None:
                torch.accelerator.set_stream(self._before)

    def current_stream(device: Any = None) -> Stream:
        now = torch.accelerator.current_stream(torch.device("cuda", _index(device)))
        return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)

    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event
    cuda.current_stream = current_stream
    cuda.stream = cuda.StreamContext = StreamContext
    cuda.set_stream = torch.accelerator.set_stream


def _replace_generators(library: ctypes.CDLL) -> None:
    import torch
    from torch import cuda

    generators = tuple(torch.Generator(f"cuda:{index}") for index in range(DEVICES))
    for generator in generators:
        torch.ops.stand_in_gpu.set_default(generator)

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def set_all(states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    for module in (cuda, cuda.random):
        module.default_generators = generators
        module.get_rng_state = lambda device="cuda": generators[_index(device)].get_state()
        module.set_rng_state = lambda state, device="cuda": generators[_index(device)].set_state(state) and None
        module.get_rng_state_all = lambda: [generator.get_state() for generator in generators]
        module.set_rng_state_all = set_all
        module.manual_seed = lambda seed: generators[_index(None)].manual_seed(seed) and None
        module.manual_seed_all = seed_all


def _replace_collectives() -> None:
    """``device.cpp`` hands tensors of the GPU to the gloo of the same group; another one stands for NCCL."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout = timedelta(minutes=10)
            self.config = SimpleNamespace(blocking=True)

    class ProcessGroupNCCL(dist.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            super().__init__(store, rank, size, timeout=options._timeout)

        def eager_connect_single_device(self, device: torch.device) -> None:
            pass

    ProcessGroupNCCL.Options = Options

    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    torch.cuda.nccl.version = lambda: (2, 27, 3)


def _replace_profiler() -> None:
    """It finds no kernels. Without this it would record events of CUDA for each operator, which this build cannot."""
    from torch.autograd import profiler

    kinds = {profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA}
    profiler._supported_activities = lambda: kinds


def replace_compiler(compile_fx: ModuleType) -> None:
    """Once it is imported. Graphs are traced, differentiated, decomposed and cut as ever. Then they are called operator
    by operator: there is nothing that could run Inductor's kernels."""

    def call(graph: Any, inputs: Any, **_: Any) -> Any:
        return compile_fx.make_boxed_func(graph.forward)

    compile_fx._compile_fx_inner = call


def _replace_kernels() -> None:
    global _kernels
    import stand_in_attention
    import stand_in_float8

    _kernels = (stand_in_attention.register(), stand_in_float8.register())


if __name__ == "__main__":
    subprocess.run(command(Path(sys.argv[1]).absolute()), check=True)
