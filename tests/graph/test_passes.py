"""Fusion changes the operations, not their meaning; liveness never lets two living tensors share memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from octavo.graph.builder import Graph, GraphBuilder
from octavo.graph.passes import fuse, plan_arena
from octavo.graph.reference import Reference, ReferenceBatch
from octavo.graph.schema import (
    Add,
    AddRmsNorm,
    Attention,
    Embed,
    GatedLinear,
    Linear,
    RmsNorm,
    Rope,
    RopeTable,
    SelectRows,
    Tensor,
    Weight,
)
from octavo.models.files import ModelFiles
from octavo.models.llama import llama

NUM_LAYERS, VOCAB_SIZE = 3, 60
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rope_theta": 100.0, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def small_llama() -> Graph:
    """With biases of q, k and v."""
    shapes = {"model.embed_tokens": (VOCAB_SIZE, 24), "lm_head": (VOCAB_SIZE, 24), "model.norm": (24,)}
    for i in range(NUM_LAYERS):
        layer = {
            "self_attn.q_proj": (32, 24), "self_attn.k_proj": (16, 24), "self_attn.v_proj": (16, 24),
            "self_attn.o_proj": (24, 32), "mlp.gate_proj": (40, 24), "mlp.up_proj": (40, 24), "mlp.down_proj": (24, 40),
            "input_layernorm": (24,), "post_attention_layernorm": (24,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    stored = {f"{name}.weight": shape for name, shape in shapes.items()}
    stored |= {
        f"{name}.bias": shape[:1] for name, shape in shapes.items() if name[-6:] in ("q_proj", "k_proj", "v_proj")
    }
    return llama(ModelFiles("hf", CONFIG, stored, lambda name: ())).graph


def weights_of(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {w.name: rng.normal(size=w.shape) for w in graph.weights.values()}


def logits(graph: Graph, weights: dict[str, np.ndarray], vocabulary: int = VOCAB_SIZE) -> list[np.ndarray]:
    """Two ragged steps of two sequences."""
    reference, rng = Reference(graph, weights), np.random.default_rng(1)
    steps = []
    for counts in ((5, 1), (3, 4)):
        ids = rng.integers(0, vocabulary, sum(counts))
        batch = ReferenceBatch(ids, (("a", counts[0]), ("b", counts[1])), (counts[0] - 1, sum(counts) - 1))
        steps.append(reference.run(batch)[graph.outputs["logits"].id])
    return steps


def names(graph: Graph) -> Counter[str]:
    return Counter(type(node.op).__name__ for node in graph.nodes)


def test_a_fused_llama_means_the_same_with_eight_operations_a_layer_less() -> None:
    graph = small_llama()
    fused = fuse(graph)
    weights = weights_of(graph)
    for before, after in zip(logits(graph, weights), logits(fused, weights), strict=True):
        assert np.abs(before - after).max() < 1e-12 * np.abs(before).max()
    n = NUM_LAYERS
    found = names(fused)
    assert found["Rope"] == found["GatedActivation"] == 0
    assert found["GatedLinear"] == found["Attention"] == n
    assert found["AddRmsNorm"] == 2 * n - 1, "the last sum is followed by a selection of rows"
    assert found["Linear"] == 3 * n + 1, "QKV, output, down; and the head"


def test_what_a_backend_cannot_pair_or_share_stays_apart() -> None:
    found = names(fuse(small_llama(), may_pair=lambda a, b: False, may_share_input=lambda a, b: False))
    assert found["GatedLinear"] == 0
    assert found["Linear"] == 7 * NUM_LAYERS + 1


def test_a_tensor_with_a_second_reader_is_not_fused_away() -> None:
    g = GraphBuilder()
    x = g(Embed(Weight("e", (9, 16))))
    y = g(Embed(Weight("f", (9, 16))))
    total = g(Add(x, y))
    normed = g(RmsNorm(total, Weight("n", (16,)), 1e-5))
    again = g(Add(x, normed))  # x lives on after the sum
    graph = g.build({"out": again, "total": total}, ())
    fused = fuse(graph)
    assert names(fused)["AddRmsNorm"] == 0
    assert fused.nodes == graph.nodes


@pytest.mark.parametrize("fused", [False, True])
def test_living_tensors_never_share_memory(fused: bool) -> None:
    graph = fuse(small_llama()) if fused else small_llama()

    def size(t: Tensor) -> int:
        return 4 * t.width * (7 if t.rows.name == "TOKENS" else 3)

    arena = plan_arena(graph, size)
    last_use = {t.id: i for i, node in enumerate(graph.nodes) for t in node.inputs}
    last_use |= {t.id: len(graph.nodes) for t in graph.outputs.values()}
    sources = [node.op.x for node in graph.nodes if isinstance(node.op, SelectRows)]
    assert len(sources) == 1
    last_use |= {t.id: len(graph.nodes) for t in sources}  # other rows may be selected later
    living: dict[int, Tensor] = {}
    for i, node in enumerate(graph.nodes):
        in_place = node.op.x.id if isinstance(node.op, AddRmsNorm) else None
        for out in node.outputs:
            begin, end = arena.offsets[out.id], arena.offsets[out.id] + size(out)
            assert begin % 64 == 0
            assert end <= arena.num_bytes
            for other in living.values():
                if other.id == in_place and out == node.outputs[0]:
                    continue
                assert end <= arena.offsets[other.id] or begin >= arena.offsets[other.id] + size(other)
            living[out.id] = out
        living = {k: t for k, t in living.items() if last_use.get(k, -1) > i}
    total = sum(size(t) for node in graph.nodes for t in node.outputs)
    assert arena.num_bytes < total / 3, "memory is reused"


def test_heads_normed_before_their_rotation_are_rotated_by_attention_and_not_taken_for_rows() -> None:
    """Qwen3's queries and keys; and a norm of groups after a sum stays a norm of groups."""
    g = GraphBuilder()
    x, v = (g(Embed(Weight(name, (9, 32)))) for name in "xv")
    q, k = (g(RmsNorm(g(Linear(x, (Weight(n, (32, 32)),), (None,))), Weight(f"{n}n", (16,)), 1e-5, 2)) for n in "qk")
    table = g(RopeTable((1.0, 0.5)))
    attention = Attention(
        g(Rope(q, table, 16, False)), g(Rope(k, table, 16, False)), v, rope=None, rope_interleaved=False, group=0,
        layer=0, num_heads=2, num_kv_heads=2, head_dim=16, scale=0.25, window=3, softcap=5.0,
    )  # fmt: skip
    y = g(RmsNorm(g(Add(x, g(attention))), Weight("n", (32,)), 1e-5, groups=2))
    graph = g.build({"logits": y}, ())
    fused = fuse(graph)
    assert names(fused)["Rope"] == names(fused)["AddRmsNorm"] == 0
    (op,) = (n.op for n in fused.nodes if isinstance(n.op, Attention))
    assert (op.q, op.k, op.rope, op.window, op.softcap) == (q, k, table, 3, 5.0)
    weights = weights_of(graph)
    for a, b in zip(*(logits(form, weights, vocabulary=9) for form in (graph, fused)), strict=True):
        assert np.abs(a - b).max() < 1e-12 * np.abs(a).max()


def test_a_query_that_is_read_twice_is_not_rotated_in_place() -> None:
    g = GraphBuilder()
    q, k, v = (g(Embed(Weight(name, (9, 16)))) for name in "qkv")
    table = g(RopeTable((1.0, 0.5)))
    attention = Attention(
        g(Rope(q, table, 16, False)), g(Rope(k, table, 16, False)), v, rope=None, rope_interleaved=False, group=0,
        layer=0, num_heads=1, num_kv_heads=1, head_dim=16, scale=0.25,
    )  # fmt: skip
    graph = g.build({"out": g(Add(g(attention), q))}, ())
    assert names(fuse(graph))["Rope"] == 2


def test_fusion_leaves_ropes_that_differ() -> None:
    graph = small_llama()
    nodes = list(graph.nodes)
    at = next(i for i, n in enumerate(nodes) if isinstance(n.op, Rope))
    rope = nodes[at].op
    assert isinstance(rope, Rope)
    other = type(rope)(rope.x, rope.table, rope.head_dim, not rope.interleaved)
    nodes[at] = type(nodes[at])(other, nodes[at].outputs)
    fused = fuse(Graph(tuple(nodes), graph.outputs, graph.kv_groups))
    assert names(fused)["Rope"] == 2
    ropes = [n.op.rope is not None for n in fused.nodes if isinstance(n.op, Attention)]
    assert ropes == [False] + [True] * (NUM_LAYERS - 1)
    assert {GatedLinear, Linear} <= {type(n.op) for n in fused.nodes}
