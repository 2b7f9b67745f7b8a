"""GraphWriter: names, constants and scopes; functions with overloads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from op_harness import ancestors, run_op

from dspark_trt.plugins.graph import DOMAIN, GraphWriter, make_function, rename


def function_of(write, inputs=("x",), outputs=("y",), **others) -> onnx.FunctionProto:
    return make_function("Toy", inputs, outputs, write, overload="toy", **others)


def run(write, **feeds: np.ndarray) -> np.ndarray:
    return run_op(function_of(write, tuple(feeds)), feeds)["y"]


def constants(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    return [node for node in nodes if node.op_type == "Constant"]


X = np.array([[1.0, -2.0, 3.0]], np.float32)


def test_a_call_appends_a_node_and_gives_its_output() -> None:
    g = GraphWriter()
    y = g.Concat("a", "b", axis=1)
    assert [n.op_type for n in g.nodes] == ["Concat"]
    assert list(g.nodes[0].input) == ["a", "b"] and list(g.nodes[0].output) == [y]
    assert g.nodes[0].attribute[0].i == 1


def test_names_that_are_no_operators_are_no_attributes() -> None:
    with pytest.raises(AttributeError):
        GraphWriter().concat  # noqa: B018


def test_numbers_become_constants_int64_or_float32_unless_given_as_arrays() -> None:
    g = GraphWriter()
    values = [1, 2.0, [3, 4], [0.5], True, np.int32(5), np.float64(6), np.zeros((2, 0), np.int32)]
    for value in values:
        g.value(value)
    tensors = [onnx.numpy_helper.to_array(n.attribute[0].t) for n in constants(g.nodes)]
    assert [t.dtype.name for t in tensors] == [
        "int64", "float32", "int64", "float32", "bool", "int32", "float64", "int32",
    ]  # fmt: skip
    assert [t.shape for t in tensors] == [(), (), (2,), (1,), (), (), (), (2, 0)]


def test_equal_constants_are_one_and_unequal_types_or_shapes_are_not() -> None:
    g = GraphWriter()
    assert g.value(1) == g.value(np.int64(1))
    assert len({g.value(v) for v in (1, [1], 1.0, np.int32(1), True, 0.0, -0.0)}) == 7
    assert len(constants(g.nodes)) == 7


def test_a_branch_sees_outer_constants_and_keeps_its_own() -> None:
    g = GraphWriter()
    outer = g.value(7)

    def branch(sub: GraphWriter) -> list[str]:
        assert sub.value(7) == outer
        return [sub.value(8)]

    g.if_else("c", branch, branch, [TensorProto.INT64])
    assert g.value(8) not in {o for n in g.nodes if n.op_type == "If" for o in n.output}
    assert len(constants(g.nodes)) == 2  # 7, and an 8 of its own
    branches = [a.g for n in g.nodes if n.op_type == "If" for a in n.attribute]
    assert [len(constants(b.node)) for b in branches] == [1, 1]


@pytest.mark.parametrize("condition", [True, False])
def test_if_else_takes_a_branch_and_may_give_an_outer_tensor(condition: bool) -> None:
    def write(g: GraphWriter) -> list[str]:
        doubled = g.Mul("x", 2.0)

        def nested(sub: GraphWriter) -> list[str]:
            inner = sub.if_else("c", lambda s: [s.Neg(doubled)], lambda s: ["x"], [1])
            return [sub.Add(inner[0], 1.0)]

        return g.if_else("c", nested, lambda sub: [doubled], [TensorProto.FLOAT])

    want = 1 - 2 * X if condition else 2 * X
    assert np.array_equal(run(write, x=X, c=np.array(condition)), want)


def test_slices_dims_and_ranges() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    end = np.array([2], np.int64)
    assert np.array_equal(run(lambda g: [g.slice_axis("x", 1, "e", 1)], x=x, e=end), x[:, 1:2])
    assert np.array_equal(run(lambda g: [g.slice_axis("x", -1, 2**62, 0)], x=x), x[-1:])
    assert run(lambda g: [g.dim("x", 1)], x=x).tolist() == [4]
    counted = run(lambda g: [g.range(g.dim("x", 0))], x=x)
    assert counted.dtype == np.int32 and counted.tolist() == [0, 1, 2]


def test_rename_reaches_into_branches() -> None:
    inner = helper.make_graph([helper.make_node("Neg", ["a"], ["b"])], "g", [], [])
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner),
    ]
    rename(nodes, "a", "z")
    assert list(nodes[0].output) == ["z"]
    assert [list(a.g.node[0].input) for a in nodes[1].attribute] == [["z"], ["z"]]


def test_a_function_names_its_outputs_and_its_overload() -> None:
    function = function_of(lambda g: [g.Neg("x")], attributes=("scale",))
    assert list(function.output) == ["y"] and list(function.node[-1].output) == ["y"]
    assert (function.domain, function.overload) == (DOMAIN, "toy")
    assert list(function.attribute) == ["scale"]


def test_a_call_of_an_operator_is_kept_once_by_the_outermost_writer() -> None:
    function = function_of(lambda g: [g.Neg("x")])
    g = GraphWriter()
    g.call(function, ["x"])

    def branch(sub: GraphWriter) -> list[str]:
        return sub.call(function, ["x"])

    g.if_else("c", branch, branch, [TensorProto.FLOAT])
    assert list(g.functions.values()) == [function]
    assert (g.nodes[0].domain, g.nodes[0].overload) == (DOMAIN, "toy")


def test_ancestors_cross_branches() -> None:
    def write(g: GraphWriter) -> list[str]:
        unused = g.Neg("z")
        g.Abs(unused)
        return g.if_else("c", lambda s: [s.Neg("x")], lambda s: ["w"], [TensorProto.FLOAT])

    function = function_of(write, ("x", "w", "c", "z"))
    assert ancestors(function, "y") & set(function.input) == {"x", "w", "c"}
