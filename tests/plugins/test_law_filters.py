"""top-k, top-p and min-p on vocabularies larger and smaller than what is sorted first."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from reference.law import target_law

from dspark_trt.plugins.graph import IR_VERSION, OPSET, GraphWriter, rename
from dspark_trt.plugins.law_filters import SHORT, Filters, filtered_law


def run(law: np.ndarray, top_k: list[int], top_p: list[float], min_p: list[float]) -> np.ndarray:
    """`filtered_law` of rows that are all read."""
    g = GraphWriter()
    filters = Filters.of(g, "top_k", "top_p", "min_p", "hot")
    rename(g.nodes, filtered_law(g, law="law", filters=filters), "out")
    types = {
        "law": TensorProto.DOUBLE,
        "top_k": TensorProto.INT32,
        "top_p": TensorProto.FLOAT,
        "min_p": TensorProto.FLOAT,
        "hot": TensorProto.BOOL,
    }
    infos = [
        helper.make_tensor_value_info(name, t, None if name == "law" else ["M"])
        for name, t in types.items()
    ]
    out = helper.make_tensor_value_info("out", TensorProto.DOUBLE, None)
    graph = helper.make_graph(g.nodes, "g", infos, [out])
    model = helper.make_model(
        graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
    )
    feeds = {
        "law": law,
        "top_k": np.array(top_k, np.int32),
        "top_p": np.array(top_p, np.float32),
        "min_p": np.array(min_p, np.float32),
        "hot": np.ones(len(law), bool),
    }
    found = ort.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    return found / found.sum(axis=1, keepdims=True)


CASES = [
    (0, 1.0, 0.0),
    (3, 1.0, 0.0),
    (SHORT, 1.0, 0.0),
    (SHORT + 1, 1.0, 0.0),
    (0, 0.5, 0.0),
    (0, 0.999, 0.0),
    (0, 1.0, 0.05),
    (0, 1.0, 1e-4),
    (SHORT + 200, 0.9, 0.0),
    (40, 0.9, 0.02),
]


@pytest.mark.parametrize("vocab", [5, SHORT, 3 * SHORT])
@pytest.mark.parametrize("spread", [0.0, 0.1, 4.0])
def test_rows_are_filtered_as_the_reference_does(vocab: int, spread: float) -> None:
    """A flat law needs the whole vocabulary, a sharp one its head; each case alone, then all."""
    rng = np.random.default_rng(vocab)
    logits = spread * rng.standard_normal((len(CASES), vocab)).astype(np.float32)
    law = np.stack([target_law(row) for row in logits])
    expected = np.stack(
        [
            target_law(row, top_k=k, top_p=float(np.float32(p)), min_p=float(np.float32(m)))
            for row, (k, p, m) in zip(logits, CASES, strict=True)
        ]
    )
    columns = [list(column) for column in zip(*CASES, strict=True)]
    np.testing.assert_allclose(run(law, *columns), expected, atol=1e-12)
    for i, (k, p, m) in enumerate(CASES):
        alone = run(law[i : i + 1], [k], [p], [m])
        np.testing.assert_allclose(alone, expected[i : i + 1], atol=1e-12)
