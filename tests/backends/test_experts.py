"""Mixtures of experts against the reference, and a token's bits whatever company its experts keep."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.cpu.lowering import lower
from octavo.core.errors import ConfigError
from octavo.graph.schema import (
    Activation,
    Add,
    CombineExperts,
    Dispatch,
    ExpertGatedLinear,
    ExpertLinear,
    Route,
    Routing,
    SelectRows,
    Tensor,
)
from octavo.quantization.formats import WeightType
from tests.backends.harness import ISAS, MAX_TOKENS, QUANTIZED, Bench, Pair, relative_error

pytestmark = pytest.mark.parametrize("isa", ISAS)
SOME_TYPES = (WeightType.F32, WeightType.BF16, WeightType.Q4_0, WeightType.Q8_0)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def mixture(
    bench: Bench, experts: int, top_k: int, width: int, inner: int, kind: WeightType, scores: np.ndarray | None = None
) -> tuple[Tensor, Tensor]:
    """(output, routes) of a mixture over MAX_TOKENS kinds of tokens."""
    x = bench.rows("x", normal(MAX_TOKENS, width))
    routed = bench.rows("scores", normal(MAX_TOKENS, experts, seed=3) * 2 if scores is None else scores)
    routes = bench.g(Route(routed, top_k, Routing.SOFTMAX_THEN_TOP_K, renormalize=True, scale=1.5))
    gate, up = (bench.weight(n, normal(experts, inner, width, seed=i), kind) for i, n in enumerate(("gate", "up")))
    down = bench.weight("down", normal(experts, width, inner, seed=2), kind)
    hidden = bench.g(ExpertGatedLinear(bench.g(Dispatch(x, routes)), routes, gate, up, Activation.SILU))
    return bench.g(CombineExperts(bench.g(ExpertLinear(hidden, routes, down)), routes)), routes


@pytest.mark.parametrize("routing", list(Routing))
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2), (4, 4), (60, 4), (128, 8)])
def test_routes_name_the_best_experts_and_weigh_them(
    isa: str, experts: int, top_k: int, renormalize: bool, routing: Routing
) -> None:
    bench = Bench()
    scores = bench.rows("scores", normal(30, experts) * 4)
    pair = bench.build(bench.g(Route(scores, top_k, routing, renormalize, scale=2.5)))
    for rows in (1, 7, 30):
        got, want = pair.native(isa).rows(rows), pair.expected(rows)
        chosen = np.s_[:, :top_k]
        assert np.array_equal(got[chosen], want[chosen]), "ids"
        assert np.array_equal(got[:, 2 * top_k :], want[:, 2 * top_k :]), "rows of Dispatch"
        assert relative_error(got, want) < 1e-6


def test_ties_go_to_the_lower_id_and_bad_scores_name_experts_that_exist(isa: str) -> None:
    scores = np.array([[1, 3, 3, 3], [0, 0, 0, 0], [np.nan, 1, np.nan, 2], [np.nan] * 4, [np.inf, np.inf, 0, 0]])
    bench = Bench()
    route = Route(bench.rows("scores", scores), 3, Routing.TOP_K_THEN_SOFTMAX, False, 1.0)
    got = bench.build(bench.g(route)).native(isa).rows(5)
    assert got[:, :3].tolist() == [[1, 2, 3], [0, 1, 2], [3, 1, 0], [0, 1, 2], [0, 1, 2]]
    assert np.allclose(got[:2, 3:6], 1 / 3)
    assert sorted(got[:, 6:].reshape(-1).tolist()) == list(range(15))


@pytest.mark.parametrize("kind", [*SOME_TYPES, WeightType.INT8, WeightType.FP8_E4M3])
@pytest.mark.parametrize(("experts", "top_k"), [(3, 3), (8, 2), (40, 4)])
def test_a_mixture_matches_the_reference(isa: str, experts: int, top_k: int, kind: WeightType) -> None:
    bench = Bench()
    width, inner = (64, 96) if kind in QUANTIZED else (45, 70)
    pair = bench.build(mixture(bench, experts, top_k, width, inner, kind)[0])
    native = pair.native(isa)
    for rows in (1, 2, 13, MAX_TOKENS):
        assert relative_error(native.rows(rows), pair.expected(rows)) < 2e-6
    small = pair.native(isa, float_activations=False).rows(MAX_TOKENS)
    assert relative_error(small, pair.expected(MAX_TOKENS)) < 0.02


@pytest.mark.parametrize("kind", SOME_TYPES)
def test_a_token_has_the_same_bits_whoever_else_is_routed(isa: str, kind: WeightType) -> None:
    bench = Bench()
    pair = bench.build(mixture(bench, 12, 3, 64, 96, kind)[0])
    whole = pair.native(isa, threads=2, float_activations=False).rows(MAX_TOKENS)
    rng = np.random.default_rng(0)
    for threads in (1, 3):
        native = pair.native(isa, threads=threads, float_activations=False)
        for rows in (1, 2, 9, 40):
            ids = rng.permutation(MAX_TOKENS)[:rows]
            assert native.step(ids, [rows]).tobytes() == whole[ids].tobytes()


def test_all_tokens_may_want_the_same_experts(isa: str) -> None:
    """More rows an expert than a block of rows, and experts with none."""
    scores = np.zeros((MAX_TOKENS, 16))
    scores[:, [5, 11, 15]] = [3, 2, 1]
    bench = Bench()
    pair = bench.build(mixture(bench, 16, 3, 64, 64, WeightType.Q8_0, scores)[0])
    native = pair.native(isa)
    assert relative_error(native.rows(MAX_TOKENS), pair.expected(MAX_TOKENS)) < 2e-6
    assert relative_error(native.rows(1), pair.expected(1)) < 2e-6


def test_two_mixtures_in_a_row_do_not_mix(isa: str) -> None:
    """And the last product, whose rows are selected, may be a mixture's neighbour."""
    bench = Bench()
    first, _ = mixture(bench, 6, 2, 64, 32, WeightType.Q4_0)
    x = bench.g(Add(first, bench.rows("x2", normal(MAX_TOKENS, 64, seed=9))))
    scores = bench.rows("scores2", normal(MAX_TOKENS, 3, seed=10))
    routes = bench.g(Route(scores, 1, Routing.TOP_K_THEN_SOFTMAX, renormalize=False, scale=1.0))
    w = bench.weight("w", normal(3, 48, 64, seed=11), WeightType.Q4_0)
    y = bench.g(CombineExperts(bench.g(ExpertLinear(bench.g(Dispatch(x, routes)), routes, w)), routes))
    pair = bench.build(bench.g(SelectRows(y)))
    assert relative_error(pair.native(isa).rows(20, (3, 19)), pair.expected(20, (3, 19))) < 2e-6


def test_more_routes_than_float32_can_count_are_refused(isa: str) -> None:
    bench = Bench()
    graph = bench.build(mixture(bench, 4, 2, 32, 32, WeightType.F32)[0]).graph
    kinds = {name: tensor.type for name, tensor in bench.tensors.items()}
    lower(graph, kinds, float_activations=True, max_tokens=1 << 23, max_sequences=1)
    with pytest.raises(ConfigError, match=r"is 8,388,609 and each token goes to 2 experts; at most 16,777,216"):
        lower(graph, kinds, float_activations=True, max_tokens=(1 << 23) + 1, max_sequences=1)


def test_operations_that_do_not_follow_their_own_route_are_refused(isa: str) -> None:
    def build(experts: int, late: bool) -> Pair:
        bench = Bench()
        x = bench.rows("x", normal(4, 32))
        routes = [
            bench.g(Route(bench.rows(f"s{i}", normal(4, 8)), 2, Routing.TOP_K_THEN_SOFTMAX, False, 1.0))
            for i in range(2)
        ]
        w = bench.weight("w", normal(experts, 16, 32))
        which = routes[0 if late else 1]
        return bench.build(bench.g(ExpertLinear(bench.g(Dispatch(x, which)), which, w)))

    assert build(8, late=False).native(isa).rows(4).shape == (8, 16)
    for pair in (build(9, late=False), build(8, late=True)):
        with pytest.raises(ValueError, match="does not fit the Route before it"):
            pair.native(isa)
