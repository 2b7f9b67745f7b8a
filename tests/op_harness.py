"""Runs one operator of domain `dspark`: its ONNX body, on ONNX Runtime, with numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from dspark_trt.plugins.graph import DOMAIN, IR_VERSION, OPSET

Signature = tuple[tuple[str, str, int], ...]  # (input, dtype, number of dimensions)


def run_op(
    function: onnx.FunctionProto,
    feeds: Mapping[str, np.ndarray],
    *,
    threads: int = 1,
    **attributes: Any,
) -> dict[str, np.ndarray]:
    """The operator's outputs by name; `feeds` holds exactly its inputs."""
    assert set(feeds) == set(function.input), set(feeds) ^ set(function.input)
    session = op_session(function, feeds, threads=threads, **attributes)
    results = session.run(None, {name: np.ascontiguousarray(a) for name, a in feeds.items()})
    return dict(zip(function.output, results, strict=True))


def op_session(
    function: onnx.FunctionProto,
    feeds: Mapping[str, np.ndarray],
    *,
    threads: int = 1,
    **attributes: Any,
) -> ort.InferenceSession:
    """A session of a model that is one node; all dimensions are free."""
    signature = tuple((n, feeds[n].dtype.name, feeds[n].ndim) for n in function.input)
    return _session(
        function.SerializeToString(), signature, tuple(sorted(attributes.items())), threads
    )


@cache
def _session(
    body: bytes, signature: Signature, attributes: tuple[tuple[str, Any], ...], threads: int
) -> ort.InferenceSession:
    model = one_node_model(onnx.FunctionProto.FromString(body), signature, dict(attributes))
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_mem_pattern = False
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def one_node_model(
    function: onnx.FunctionProto, signature: Signature, attributes: Mapping[str, Any]
) -> onnx.ModelProto:
    """A model that calls `function` once on graph inputs of its inputs' names."""
    node = helper.make_node(
        function.name, function.input, function.output, domain=DOMAIN, **attributes
    )
    node.overload = function.overload
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [None] * ndim
        )
        for name, dtype, ndim in signature
    ]
    types = onnx.shape_inference.infer_function_output_types(
        function, [i.type for i in inputs], list(node.attribute)
    )
    outputs = [helper.make_value_info(n, t) for n, t in zip(function.output, types, strict=True)]
    graph = helper.make_graph([node], function.name, inputs, outputs)
    return helper.make_model(
        graph,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        functions=[function],
    )


def ancestors(function: onnx.FunctionProto, output: str) -> set[str]:
    """Every tensor that `output` of the body depends on, inputs of the function among them."""
    made_from = {name: _uses(node) for node in function.node for name in node.output}
    found, todo = set(), [output]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += made_from.get(name, ())
    return found


def _uses(node: onnx.NodeProto) -> set[str]:
    """What a node reads, the tensors that its subgraphs capture included."""
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            for inner in attribute.g.node:
                names |= _uses(inner)
    return names
