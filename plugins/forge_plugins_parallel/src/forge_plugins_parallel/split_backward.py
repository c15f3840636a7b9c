"""A backend of ``torch.compile`` for pipeline schedules that compute gradients of inputs and of parameters apart."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import AOTInput, GradAOTOutput
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import free_symbols

_KEPT = "forge: kept for the gradients of parameters"


def split_backward(graph: fx.GraphModule, inputs: Sequence[Any], mode: str | None = None) -> Any:
    """Compile as ``inductor`` does, but backward in two parts, of which those run that autograd asks for.

    The first part computes gradients of inputs, and keeps what the second one, gradients of parameters, needs of it.
    torch's schedules ask for the first and later for the second (``torch.distributed.pipelining._backward``): a
    backward of one part would compute all gradients both times. What forward saved stays until the second has run.

    Args:
        graph: of dynamo.
        inputs: examples of what the graph is given.
        mode: of ``torch.compile``.
    """
    from torch._inductor import list_mode_options  # it takes seconds to import
    from torch._inductor.compile_fx import compile_fx

    options = list_mode_options(mode) if mode else None
    with functorch_config.patch(enable_autograd_cache=False):  # it stores one part
        return compile_fx(graph, inputs, inner_compile=partial(_compile, set()), config_patches=options)


def _compile(parameters: set[AOTInput], graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Same as ``compile_fx_inner``, which compiles forward, and a backward that has nothing to split.

    Args:
        parameters: among the inputs of forward. Noted when it is compiled, which is before backward.
        graph: of forward or backward.
        inputs: examples of what it is given.
        options: of ``compile_fx_inner``.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    facts = TracingContext.get().fw_metadata
    assert facts is not None, "AOTAutograd has them before it compiles a graph"
    if facts.bw_donated_idxs:
        facts.bw_donated_idxs.clear()  # neither part may write into what forward saved, which both read
    if options.get("is_backward"):
        by_input = _gradients_by_input(graph)
        of_parameters = {index for one in parameters for index in by_input.get(one, ())}
        if of_parameters and of_parameters != {index for positions in by_input.values() for index in positions}:
            return _TwoParts(graph, of_parameters, inputs, options)
    elif not options.get("is_inference"):
        given = graph.graph.find_nodes(op="placeholder")
        parameters |= {_whole(given[index].meta["desc"]) for index in facts.static_input_indices}
    return compile_fx_inner(graph, inputs, **options)


class _TwoParts:
    """A compiled backward, as AOTAutograd calls it.

    Args:
        graph: gives the gradients of forward's inputs in their order, and ``None`` where there is none.
        parameters: the positions of parameters among them.
        inputs: examples of what is given: what forward saved, then gradients of its outputs.
        options: of ``compile_fx_inner``.
    """

    def __init__(
        self, graph: fx.GraphModule, parameters: Collection[int], inputs: Sequence[Any], options: dict[str, Any]
    ) -> None:
        from torch._inductor.compile_fx import compile_fx_inner

        self._boxed_call = True  # what is given comes as a list, to be emptied
        outputs, given = _outputs(graph), graph.graph.find_nodes(op="placeholder")
        self._parts = [index for index, one in enumerate(_described(graph)) if hasattr(one, "base")]
        self._meshes = {
            index: given.index(outputs[index])
            for index in self._parts
            if outputs[index] in given and not _is_tensor(outputs[index])
        }
        of_inputs = [None if index in {*parameters, *self._meshes} else node for index, node in enumerate(outputs)]
        of_parameters = [node if index in parameters else None for index, node in enumerate(outputs)]
        first, second = _cut(graph, of_inputs, of_parameters)
        needed = {one for node in second for one in node.all_input_nodes} | {*of_parameters}
        kept = [node for node in graph.graph.nodes if node in needed and node in first - second - {*given}]
        self._parameters = set(parameters)
        self._n_outputs = len(outputs)
        self._no_parameters = {i: nothing_like(outputs[i].meta["val"]) for i in self._parts if i in self._parameters}
        self._by_input = list(_gradients_by_input(graph).values())
        # where sizes vary, any tensor may be the only one to tell the size of another
        vary = any(free_symbols(one) for one in inputs if isinstance(one, torch.Tensor | torch.SymInt))
        self._read_again = [index for index, node in enumerate(given) if vary or node in needed]
        given_later = [*(given[index] for index in self._read_again), *kept]
        self._first = compile_fx_inner(_part(graph, given, first, [*of_inputs, *kept]), inputs, **options)
        self._second = compile_fx_inner(
            _part(graph, given_later, second, of_parameters),
            [node.meta["val"] for node in given_later],
            **{**options, "static_input_idxs": ()},
        )

    def __call__(self, given: list[Any]) -> list[Any]:
        node: Any = torch._C._current_autograd_node()
        asked = _asked(node, self._by_input)
        read_again = [given[index] for index in self._read_again]
        meshes = {index: given[position] for index, position in self._meshes.items()}
        gradients: list[Any] = [None] * self._n_outputs
        kept, nothing = node.metadata.pop(_KEPT, (None, {}))
        if kept is None or asked - self._parameters:
            results = self._first(given)
            gradients, kept = list(results[: self._n_outputs]), results[self._n_outputs :]
            nothing = {i: nothing_like(gradients[i]) for i in self._parts if gradients[i] is not None}
        given.clear()
        if asked & self._parameters:
            of_parameters = self._second([*read_again, *kept])
            for index in self._parameters:
                gradients[index] = of_parameters[index]
        else:
            node.metadata[_KEPT] = kept, nothing
        stand_ins = {**meshes, **self._no_parameters, **nothing}
        for index in self._parts:  # they are put together, also where autograd drops the whole
            if gradients[index] is None:
                gradients[index] = stand_ins[index]
        return gradients


def nothing_like(gradient: Any) -> Any:
    """A tensor of its shape, which autograd checks, that takes no memory; a size is itself."""
    if not isinstance(gradient, torch.Tensor):
        return gradient
    return torch.empty((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)


def _asked(node: Any, by_input: Sequence[Sequence[int]]) -> set[int]:
    """The gradients that the running backward wants of an autograd node: it returns them or goes on from them."""
    following = [function for function, _ in node.next_functions if function is not None]
    if len(following) != len(by_input):  # forward has detached an input
        return {index for positions in by_input for index in positions}
    asked = zip(following, by_input, strict=True)
    return {index for function, positions in asked if _will_run(function) for index in positions}


def _gradients_by_input(graph: fx.GraphModule) -> Mapping[AOTInput, Sequence[int]]:
    """The positions of gradients, for each input of forward that requires one: autograd has no others, such as sizes.
    A tensor of a subclass may have several inside."""
    found: dict[AOTInput, list[int]] = {}
    for index, (one, node) in enumerate(zip(_described(graph), _outputs(graph), strict=False)):  # tokens are not there
        gradient = _whole(one)
        if isinstance(gradient, GradAOTOutput):
            positions = found.setdefault(gradient.grad_of, [])
            positions += [index] if _is_tensor(node) else []
    return found


def _described(graph: fx.GraphModule) -> Sequence[Any]:
    """AOTAutograd's descriptions of outputs. They have a ``base`` where they are parts of a subclass, of which
    ``DTensor`` has two: a tensor and a mesh."""
    descriptions: Sequence[Any] = graph.graph.find_nodes(op="output")[0].meta["desc"]
    return descriptions


def _whole(described: Any) -> Any:
    while hasattr(described, "base"):
        described = described.base
    return described


def _will_run(function: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(function)
    except RuntimeError:  # a leaf that torch.autograd.grad was asked about, for which torch does not answer
        return True


def _cut(
    graph: fx.GraphModule, of_inputs: Sequence[fx.Node | None], of_parameters: Sequence[fx.Node | None]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes of both parts: the first has all that gradients of inputs need, the second the rest.

    Numbers, such as sizes, cannot be kept as tensors are, and are computed in both.
    """
    later = _ancestors(of_parameters)
    acting = {node for node in graph.graph.nodes if node.op == "call_function" and node.is_impure()} - later
    first = _ancestors([*of_inputs, *acting])
    first |= {node for node in later if node.target is operator.getitem and node.args[0] in first}
    second = later - first
    while numbers := {
        one
        for node in second
        for one in node.all_input_nodes
        if one not in second and one.op != "placeholder" and not isinstance(one.meta.get("val"), torch.Tensor)
    }:
        second |= numbers
    return first, second


def _ancestors(nodes: Iterable[fx.Node | None]) -> set[fx.Node]:
    """These nodes and all they are computed from."""
    found: set[fx.Node] = set()
    ahead = [node for node in nodes if node is not None]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += node.all_input_nodes
    return found


def _part(
    graph: fx.GraphModule, given: Sequence[fx.Node], nodes: Collection[fx.Node], outputs: Sequence[fx.Node | None]
) -> fx.GraphModule:
    """A graph of some nodes of another.

    Args:
        given: nodes whose values it is given.
        nodes: what it computes.
        outputs: what it returns, in the strides of the other graph, which the other part and autograd count on.
    """
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in given:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = node.meta
    for node in graph.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = made.node_copy(node, copies.__getitem__)
    end = made.output(tuple(None if node is None else copies[node] for node in outputs))
    end.meta["user_visible_output_idxs"] = [index for index, node in enumerate(outputs) if node is not None]
    return fx.GraphModule(graph, made)


def _is_tensor(node: Any) -> bool:
    return node is not None and isinstance(node.meta["val"], torch.Tensor)


def _outputs(graph: fx.GraphModule) -> Sequence[Any]:
    outputs: Sequence[Any] = graph.graph.find_nodes(op="output")[0].args[0]
    return outputs
