"""A thin ONNX writer: a node is a call, a tensor is its name.

    g = GraphWriter()
    y = g.Add(g.MatMul("x", "w"), 1.0)

`g.<OpType>(inputs..., attr=value)` appends a node and gives the name of its output; numbers, lists
and arrays among the inputs become constants (ints int64 unless given as an array). The bodies of
our operators and the graphs of the builder are both written with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DOMAIN = "dspark"
OPSET = 20
IR_VERSION = 10  # the first with function overloads

Value = str | int | float | Sequence[int] | Sequence[float] | np.ndarray


class GraphWriter:
    """Appends nodes to a list; subgraphs share the names of their parent."""

    def __init__(self, parent: GraphWriter | None = None) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.functions: dict[tuple[str, str], onnx.FunctionProto] = {}
        self._numbers: Iterator[int] = parent._numbers if parent else count()
        self._parent = parent
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def __getattr__(self, op_type: str) -> Callable[..., str]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def call(*inputs: Value, **attributes: Any) -> str:
            return self.op(op_type, inputs, **attributes)[0]

        return call

    def op(
        self,
        op_type: str,
        inputs: Sequence[Value],
        *,
        outputs: int = 1,
        domain: str = "",
        overload: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Append one node; gives the names of its outputs."""
        names = [self.value(v) for v in inputs]
        results = [self.name(op_type.lower()) for _ in range(outputs)]
        node = helper.make_node(op_type, names, results, domain=domain, **attributes)
        if overload:
            node.overload = overload
        self.nodes.append(node)
        return results

    def call(
        self, function: onnx.FunctionProto, inputs: Sequence[Value], **attributes: Any
    ) -> list[str]:
        """Append a node that calls one of our operators and keep its body for the model."""
        key = (function.name, function.overload)
        root = self
        while root._parent is not None:
            root = root._parent
        root.functions.setdefault(key, function)
        return self.op(
            function.name,
            inputs,
            outputs=len(function.output),
            domain=DOMAIN,
            overload=function.overload,
            **attributes,
        )

    def name(self, stem: str) -> str:
        """A name that nothing else in this graph has."""
        return f"{stem}_{next(self._numbers)}"

    def value(self, value: Value) -> str:
        """The name of `value`: itself, or that of a constant made for it."""
        if isinstance(value, str):
            return value
        array = np.asarray(value)
        if not isinstance(value, bool | np.ndarray | np.generic):
            array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        key = (array.dtype.str, array.shape, array.tobytes())
        scope: GraphWriter | None = self
        while scope is not None:  # a constant of an outer graph is visible in its subgraphs
            if key in scope._constants:
                return scope._constants[key]
            scope = scope._parent
        name = self.name("constant")
        tensor = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        self._constants[key] = name
        return name

    def if_else(
        self,
        condition: str,
        then: Callable[[GraphWriter], Sequence[str]],
        otherwise: Callable[[GraphWriter], Sequence[str]],
        types: Sequence[int],
    ) -> list[str]:
        """An `If` node; both branches give tensors of element `types` (TensorProto values)."""
        branches = []
        for stem, write in (("then", then), ("else", otherwise)):
            sub = GraphWriter(self)
            # Each branch renames its results, so that an outer tensor can be one of them.
            results = [sub.Identity(name) for name in write(sub)]
            infos = [
                helper.make_tensor_value_info(r, t, None)
                for r, t in zip(results, types, strict=True)
            ]
            branches.append(helper.make_graph(sub.nodes, self.name(stem), [], infos))
        return self.op(
            "If", [condition], outputs=len(types), then_branch=branches[0], else_branch=branches[1]
        )

    def slice_axis(self, x: str, start: Value, end: Value, axis: int) -> str:
        """`x[..., start:end, ...]` on one axis; start and end are numbers or 1-D tensors."""
        bounds = [v if isinstance(v, str) else [v] for v in (start, end)]
        return self.Slice(x, bounds[0], bounds[1], [axis])

    def dim(self, x: str, axis: int) -> str:
        """The length of one axis of `x`, as an int64 tensor [1]."""
        return self.Shape(x, start=axis, end=axis + 1)

    def to(self, x: str, dtype: int) -> str:
        """Cast to a TensorProto element type."""
        return self.Cast(x, to=dtype)

    def int32(self, x: str) -> str:
        return self.Cast(x, to=TensorProto.INT32)

    def int64(self, x: str) -> str:
        return self.Cast(x, to=TensorProto.INT64)

    def range(self, end: str) -> str:
        """`0 .. end - 1` as int32 [end], for an int64 `end` [1]."""
        last = self.int32(self.Squeeze(end, [0]))
        return self.Range(np.int32(0), last, np.int32(1))


def rename(nodes: Sequence[onnx.NodeProto], old: str, new: str) -> None:
    """Call the tensor `old` `new` wherever `nodes` and their subgraphs make or use it.

    An `Identity` would do too, but ONNX Runtime may keep it, and then K/V pages are copied whole.
    """
    for node in nodes:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = new
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                rename(attribute.g.node, old, new)


def make_function(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    write: Callable[[GraphWriter], Sequence[str]],
    *,
    overload: str,
    attributes: Sequence[str] = (),
) -> onnx.FunctionProto:
    """An operator of ours: `write` appends its body and gives the tensors behind `outputs`.

    `overload` names the static dimensions that the body was written for, so that one model can
    hold the same operator for several (a target's and a drafter's heads, say). `attributes` are
    for the kernel that takes the body's place on another backend; the body has them written in.
    """
    g = GraphWriter()
    results = write(g)
    for result, output in zip(results, outputs, strict=True):
        rename(g.nodes, result, output)
    function = helper.make_function(
        DOMAIN,
        name,
        list(inputs),
        list(outputs),
        g.nodes,
        [helper.make_opsetid("", OPSET)],
        attributes=list(attributes),
    )
    function.overload = overload
    return function
