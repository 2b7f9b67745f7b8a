"""From named inputs, weights and written nodes to a checked ONNX model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, shape_inference

from dspark_trt.build.weights import WeightsFile
from dspark_trt.plugins.graph import DOMAIN, IR_VERSION, OPSET, GraphWriter, rename

Dims = Sequence[int | str]


class ModelWriter(GraphWriter):
    """A graph under construction: inputs, outputs, and weights of one weights file."""

    def __init__(self, weights: WeightsFile) -> None:
        super().__init__()
        self.weights = weights
        self._used: dict[str, None] = {}  # an ordered set
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, dims: Dims, dtype: int = TensorProto.INT32) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(dims)))
        return name

    def output(self, value: str, name: str, dims: Dims, dtype: int = TensorProto.INT32) -> None:
        """Make `value` the graph's output `name`."""
        rename(self.nodes, value, name)
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(dims)))

    def weight(self, name: str, array: np.ndarray | None = None) -> str:
        """A stored weight as an initializer; `array` is written where the file lacks it."""
        if array is not None:
            self.weights.add(name, array)
        self._used[name] = None
        return name

    def save(self, path: Path, graph_name: str) -> None:
        """Write the model; checked (schemas, types and shapes) before it counts as written."""
        graph = helper.make_graph(
            self.nodes,
            graph_name,
            self._inputs,
            self._outputs,
            [self.weights.tensor(name) for name in self._used],
        )
        model = helper.make_model(
            graph,
            ir_version=IR_VERSION,
            opset_imports=[
                helper.make_opsetid("", OPSET),
                helper.make_opsetid(DOMAIN, 1),
                helper.make_opsetid("com.microsoft", 1),
            ],
            functions=list(self.functions.values()),
            producer_name="dspark-trt",
        )
        onnx.save_model(model, path)
        onnx.checker.check_model(str(path), full_check=False)
        shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
