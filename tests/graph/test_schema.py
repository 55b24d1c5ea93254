"""Shape rules, the builder, and that the native reader was generated from this very schema."""

from __future__ import annotations

from dataclasses import fields

import pytest

from octavo.backends.cpu.backend import create_executor
from octavo.core.records import KVGroup
from octavo.graph.builder import Graph, GraphBuilder
from octavo.graph.reference import Reference
from octavo.graph.schema import (
    OPERATIONS,
    Activation,
    Add,
    AddRmsNorm,
    Attention,
    CombineExperts,
    Dispatch,
    Embed,
    ExpertGatedLinear,
    ExpertLinear,
    GatedActivation,
    GatedLinear,
    GateRows,
    LayerNorm,
    Linear,
    Op,
    RmsNorm,
    Rope,
    Route,
    Routing,
    Rows,
    SelectRows,
    Tensor,
    Weight,
)

X = Tensor(0, 64, Rows.TOKENS)
NARROW = Tensor(1, 32, Rows.TOKENS)
SELECTED = Tensor(2, 64, Rows.SELECTED)
ROUTES = Tensor(3, 6, Rows.TOKENS)
DISPATCHED = Tensor(4, 64, Rows.TOKENS, copies=2)


def attention(q: Tensor = X, k: Tensor = NARROW, v: Tensor = NARROW, heads: int = 4, kv_heads: int = 2) -> Attention:
    return Attention(q, k, v, None, False, 0, 0, num_heads=heads, num_kv_heads=kv_heads, head_dim=16, scale=0.25)


@pytest.mark.parametrize(
    "op",
    [
        RmsNorm(X, Weight("w", (63,)), 1e-5),
        AddRmsNorm(X, NARROW, Weight("w", (64,)), 1e-5),
        AddRmsNorm(X, X, Weight("w", (32,)), 1e-5),
        Add(X, NARROW),
        Add(X, SELECTED),
        Linear(X, (Weight("w", (8, 63)),), (None,)),
        Linear(X, (Weight("w", (8, 64)),), (Weight("b", (7,)),)),
        Linear(X, (Weight("w", (8, 64)),), ()),
        Linear(X, (), ()),
        GatedActivation(X, NARROW, Activation.SILU),
        GatedLinear(X, Weight("g", (8, 64)), Weight("u", (9, 64)), Activation.SILU),
        GatedLinear(X, Weight("g", (8, 63)), Weight("u", (8, 63)), Activation.SILU),
        Rope(X, NARROW, 30, True),
        Rope(X, NARROW, 16, True),
        attention(q=NARROW),
        attention(k=X),
        attention(heads=4, kv_heads=3),
        SelectRows(SELECTED),
        SelectRows(DISPATCHED),
        RmsNorm(X, Weight("w", (64,)), 1e-5, groups=3),
        RmsNorm(X, Weight("w", (32,)), 1e-5, groups=4),
        LayerNorm(X, Weight("w", (64,)), Weight("b", (63,)), 1e-5),
        Add(X, DISPATCHED),
        GateRows(X, NARROW),
        GateRows(DISPATCHED, Tensor(5, 1, Rows.TOKENS)),
        Route(X, 65, Routing.SOFTMAX_THEN_TOP_K, False, 1.0),
        Route(SELECTED, 2, Routing.SOFTMAX_THEN_TOP_K, False, 1.0),
        Dispatch(DISPATCHED, ROUTES),
        ExpertLinear(X, ROUTES, Weight("w", (4, 8, 64))),
        ExpertLinear(DISPATCHED, ROUTES, Weight("w", (8, 64))),
        ExpertLinear(DISPATCHED, ROUTES, Weight("w", (4, 8, 63))),
        ExpertGatedLinear(DISPATCHED, ROUTES, Weight("g", (4, 8, 64)), Weight("u", (4, 9, 64)), Activation.SILU),
        CombineExperts(X, ROUTES),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_the_operation(op: Op) -> None:
    with pytest.raises(ValueError, match=type(op).__name__):
        GraphBuilder()(op)


def test_outputs_have_the_declared_rows_and_widths() -> None:
    g = GraphBuilder()
    x = g(Embed(Weight("e", (10, 64))))
    q, k = g.outputs_of(Linear(x, (Weight("q", (48, 64)), Weight("k", (16, 64))), (None, None)))
    last = g(SelectRows(q))
    assert [(t.rows, t.width) for t in (x, q, k, last)] == [
        (Rows.TOKENS, 64), (Rows.TOKENS, 48), (Rows.TOKENS, 16), (Rows.SELECTED, 48),
    ]  # fmt: skip
    assert len({t.id for t in (x, q, k, last)}) == 4


def test_rows_of_experts_are_counted_until_they_are_combined() -> None:
    g = GraphBuilder()
    dispatched = g(Dispatch(X, ROUTES))
    product = g(ExpertLinear(g(RmsNorm(dispatched, Weight("n", (64,)), 1e-5)), ROUTES, Weight("w", (4, 8, 64))))
    assert (dispatched.copies, product.copies, product.width) == (2, 2, 8)
    assert g(CombineExperts(product, ROUTES)).copies == 1


def test_one_weight_name_with_two_shapes_is_an_error() -> None:
    g = GraphBuilder()
    g(Embed(Weight("e", (10, 64))))
    x = g(Embed(Weight("e", (11, 64))))
    with pytest.raises(ValueError, match="declared as"):
        _ = g.build({"x": x}, ()).weights


def test_every_operation_has_a_reference() -> None:
    dispatch = Reference.__dict__["_compute"].dispatcher
    base = dispatch.dispatch(Op)
    assert [op.__name__ for op in OPERATIONS if dispatch.dispatch(op) is base] == []


def test_a_native_module_from_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    create_executor(None, 1)
    monkeypatch.setattr("octavo.graph.schema.__file__", __file__)
    with pytest.raises(Exception, match="another operation schema"):
        create_executor(None, 1)


def test_a_graph_prints_one_line_an_operation() -> None:
    g = GraphBuilder()
    x = g(RmsNorm(g(Embed(Weight("table", (10, 64)))), Weight("norm", (64,)), 1e-5))
    graph: Graph = g.build({"x": x}, (KVGroup("full", 1, 1, 32),))
    assert str(graph).splitlines() == [
        "%0[tokens, 64] = Embed(weight=table)",
        "%1[tokens, 64] = RmsNorm(x=%0, weight=norm, eps=1e-05, groups=1)",
    ]
    assert all(f.name in str(graph) for f in fields(RmsNorm))
