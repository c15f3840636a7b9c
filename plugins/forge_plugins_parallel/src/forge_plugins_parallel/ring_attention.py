"""Ring attention: keys and values go round the ranks that share a sequence, and no rank ever has all of them.

Liu et al. 2023 (arXiv 2310.01889), as torch has it: each rank attends to one rank's keys after the other and merges
what comes out by the sums of exponentials. Shapes: B = batch, H = query heads, H_kv = key and value heads, S =
sequence, C = ranks along ``cp``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from forge_core.errors import ConfigError

_METHOD = 'parallel.passes.context_parallel.method = "ring"'


def attending_in_a_ring(group: ProcessGroup) -> Callable[..., Any]:
    """A forward for modules that compute attention, to be bound in place of their own, which it calls.

    Inside, ``scaled_dot_product_attention`` is that of the whole sequence. It has to be called with ``is_causal``, on
    this rank's chunks ``r`` and ``2·C − 1 − r`` of 2·C: torch's ring has the same order, and takes no other mask.

    Raises:
        ConfigError: at once, this torch has no ring attention; in forward, the module asks for something else, or torch
            has no kernel for it.
    """
    ring = _torchs_ring()

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls: list[str] = []  # torch.compile does not see what a mode keeps in itself
        with _Interception(ring, group, calls):
            attended = type(module).forward(module, *args, **kwargs)
        if not calls:
            raise ConfigError(
                f"{_METHOD} is for modules that call scaled_dot_product_attention, and {type(module).__qualname__} has "
                'not done so (FlexAttention cannot be used); choose another model.attention, or method = "gather"'
            )
        return attended

    return forward


class _Interception(TorchFunctionMode):
    """Takes the calls of attention out of what runs inside, and adds the kernel of each to ``calls``."""

    def __init__(self, ring: Any, group: ProcessGroup, calls: list[str]) -> None:
        super().__init__()
        self._ring = ring
        self._group = group
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Same as ``torch.nn.functional.scaled_dot_product_attention``."""
        if attn_mask is not None or not is_causal or dropout_p:
            asked = "a mask" if attn_mask is not None else "dropout" if is_causal else "no causal order"
            raise ConfigError(f'{_METHOD} is for causal attention, and this model asks for {asked}; take "gather"')
        kernel = kernel_for(query, key, value)
        self._calls.append(kernel.name)
        attended: torch.Tensor = _Ring.apply(query, key, value, self._ring, kernel, self._group, scale)  # type: ignore[no-untyped-call]  # torch's
        return attended


class _Ring(torch.autograd.Function):
    """What torch does with these functions is behind a dispatcher for DTensor. It has no rule for the CPU's kernel, and
    where no kernel fits it computes by plain products, causal in the order of chunks: wrong, without a word. Called
    like this, there is a kernel or there is an error."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring: Any,
        kernel: Kernel,
        group: ProcessGroup,
        scale: float | None,
    ) -> torch.Tensor:
        options = {**kernel.options, "dropout_p": 0.0, "scale": scale}
        out, sums, *rest = ring._templated_ring_attention(
            group, _SEQUENCE, kernel.forward, q, k, v, is_causal=True, **options
        )
        # Merging has given some ranks another layout, of which a model would make, and keep, a copy.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.ring, ctx.kernel, ctx.group = ring, kernel, group
        ctx.options = {
            **dict(zip(kernel.remembered, rest, strict=False)),
            **kernel.backward_options,
            "dropout_p": 0.0,
            "scale": scale,
        }
        return out  # type: ignore[no-any-return]  # torch's

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        gradients = ctx.ring._templated_ring_attention_backward(
            ctx.group,
            _SEQUENCE,
            ctx.kernel.backward,
            gradient,
            ctx.kernel.gradient,
            q,
            k,
            v,
            out,
            sums,
            is_causal=True,
            **ctx.options,
        )
        return *gradients[:3], None, None, None, None


_SEQUENCE = 2
"""The dimension of positions."""


@attrs.frozen
class Kernel:
    """An attention kernel of torch that also gives each query's log-sum-exp, by which results are merged."""

    name: str
    """As torch calls it: ``sdpa_kernel`` may forbid it."""
    fits: Callable[[torch.Tensor, torch.Tensor], bool]
    """Whether it takes such queries and keys."""
    forward: Any
    backward: Any
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Of forward, beyond the ones that all kernels have."""
    remembered: Sequence[str] = ()
    """What backward calls the further results of forward, in their order."""
    backward_options: Mapping[str, Any] = attrs.field(factory=dict)
    gradient: str = "grad_out"
    """What backward calls the gradient that it is given."""


def kernel_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kernel:
    """The first kernel that is enabled and takes such tensors; of those for CUDA, the one that takes grouped heads.

    Raises:
        ConfigError: there is none.
    """
    kernels = CPU_KERNELS if q.device.type == "cpu" else CUDA_KERNELS
    enabled = _enabled()
    for kernel in kernels:
        if kernel.name in enabled and q.shape[-1] == v.shape[-1] and kernel.fits(q, k):
            return kernel
    raise ConfigError(
        f"{_METHOD} finds no attention kernel for {q.dtype} on {q.device.type}, {q.shape[1]} query heads and "
        f"{k.shape[1]} key heads of {q.shape[-1]} features, values of {v.shape[-1]}, and {q.shape[2]} tokens a rank "
        f"(allowed: {', '.join(enabled) or 'none'}). bf16 with heads of a multiple of 8 features fits flash; or take "
        'method = "gather"'
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's
def _enabled() -> list[str]:
    """The kernels that ``torch.nn.attention.sdpa_kernel`` allows here."""
    allowed = torch.backends.cuda  # of the CPU as well
    enabled = {
        "flash": allowed.flash_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's
        "efficient": allowed.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's
        "cudnn": allowed.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's
    }
    return [name for name, is_enabled in enabled.items() if is_enabled]


def _half(q: torch.Tensor) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0


def _fits_efficient(q: torch.Tensor, k: torch.Tensor) -> bool:
    # rows of sixteen bytes; and its sums come padded to 32 queries, which must fit halves of a rank's part as well
    return q.shape[1] == k.shape[1] and q.shape[-1] * q.element_size() % 16 == 0 and q.shape[2] % 64 == 0


def _by_position(operation: Any) -> Callable[..., Any]:
    """Torch.compile believes that an argument called ``out``, as backward has one, is what to write the result to.

    Lengths are those of the factors: what is remembered of forward are those of the last part that came round."""
    order = [argument.name for argument in operation._schema.arguments if not argument.kwarg_only]

    def call(**given: Any) -> Any:
        if "max_q" in order:
            given |= {"max_q": given["query"].shape[_SEQUENCE], "max_k": given["key"].shape[_SEQUENCE]}
        by_name = {name: value for name, value in given.items() if name not in order}
        return operation(*[given[name] for name in order], **by_name)

    return call


_aten = torch.ops.aten
CPU_KERNELS = (
    Kernel(
        "flash",
        lambda q, _: q.is_floating_point(),
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _by_position(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default),
    ),
)
CUDA_KERNELS = (
    Kernel(
        "flash",
        lambda q, _: _half(q) and q.shape[-1] <= 256,
        _aten._scaled_dot_product_flash_attention.default,
        _by_position(_aten._scaled_dot_product_flash_attention_backward.default),
        remembered=("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
    ),
    Kernel(
        "efficient",
        _fits_efficient,
        _aten._scaled_dot_product_efficient_attention.default,
        _by_position(_aten._scaled_dot_product_efficient_attention_backward.default),
        options={"attn_bias": None, "compute_log_sumexp": True},
        remembered=("philox_seed", "philox_offset"),
        backward_options={"attn_bias": None, "grad_input_mask": (True, True, True, False)},
        gradient="grad_out_",
    ),
    Kernel(
        "cudnn",
        lambda q, _: _half(q) and q.shape[-1] <= 128,
        _aten._scaled_dot_product_cudnn_attention.default,
        _by_position(_aten._scaled_dot_product_cudnn_attention_backward.default),
        options={"attn_bias": None, "compute_log_sumexp": True},
        remembered=("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
        backward_options={"attn_bias": None},
    ),
)


@functools.cache
def _torchs_ring() -> Any:
    """The module of torch that has the two halves of ring attention, set to send parts on instead of gathering them.

    Raises:
        ConfigError: it has not, or they are not what they are in torch 2.11 to 2.15.
    """
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        options: Any = ring._cp_options
        for function, first in (
            (ring._templated_ring_attention, ["group", "seq_dim", "op"]),
            (ring._templated_ring_attention_backward, ["group", "seq_dim", "op", "grad_out", "grad_out_name"]),
        ):
            if list(inspect.signature(function).parameters)[: len(first)] != first:
                raise AttributeError(function.__name__)
        ring.set_rotate_method("alltoall")
        options.enable_load_balance = True  # which means our order of chunks
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{_METHOD} is made of what torch 2.11 to 2.15 have, and torch {torch.__version__} has not ({error}); take "
            'method = "gather"'
        ) from error
    return ring
