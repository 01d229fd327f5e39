"""Compilation, control flow, custom rules and cells from MindSpore's tutorials, with their numbers."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from plurax.transforms import grad, jacfwd, vmap
from plurax.transforms.program import scan_layers, stack_layers

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """Load an example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their field types there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def static_graph() -> Any:
    return example("static_graph_tour")


@pytest.fixture(scope="module")
def rules() -> Any:
    return example("custom_rules")


@pytest.fixture(scope="module")
def control_flow() -> Any:
    return example("control_flow")


@pytest.fixture(scope="module")
def cells() -> Any:
    return example("cells_tour")


# Static graphs


def test_tree_map_has_the_program_of_the_loop(static_graph):
    found = static_graph.one_rule_for_each_type(entries=7, rounds=1)["instructions"]
    assert found["jax.tree.map"] == found["a loop"] > found["one array"]


def test_a_type_without_a_rule_is_refused(static_graph):
    with pytest.raises(TypeError, match="add supports numbers and arrays, not str"):
        jax.tree.map(static_graph.add, [1, "a"], [2, "b"])


def test_a_changed_attribute_changes_the_result_but_not_of_a_static_self(static_graph):
    found = static_graph.a_class_of_ones_own()
    assert found["registered"] == [10, 15, -15]
    assert found["static self"] == [10, 10]
    assert found["traced"] == {"registered": 2, "static self": 1}


def test_a_hundred_steps_with_a_branch_give_minus_5050_either_way(static_graph):
    found = static_graph.select_or_cond(steps=100, side=3, rounds=1)
    assert [int(result[0]) for result in found["results"].values()] == 4 * [-5050]
    cond, where, cond_in_a_loop, where_in_a_loop = found["instructions"].values()
    assert cond > 2 * where > 10 * where_in_a_loop
    assert where_in_a_loop < cond_in_a_loop < where


def test_the_branch_that_where_throws_away_makes_its_slope_nan(static_graph):
    slopes = static_graph.where_twice()
    assert np.isnan(slopes["where"][0])
    assert slopes["where"][1] == 0.25
    assert slopes["where twice"] == slopes["cond"] == [0.0, 0.25]


def test_hswish_of_each_row_is_that_of_the_loop(static_graph):
    static_graph.map_instead_of_a_loop(rows=5, rounds=1)  # compares all four results
    assert float(static_graph.hswish(jnp.float32(1.5))) == 1.125


def test_both_results_of_depend_must_be_used(static_graph):
    found = static_graph.one_before_the_other()
    assert list(found["kept"].values()) == [False, False, True]
    assert found["said"] == 3 * ["before", "after"]


def test_a_donated_state_is_shared_with_the_result(static_graph):
    found = static_graph.no_redundant_copies(size=64)
    assert found["bytes"]["kept"][1] == 0
    assert found["bytes"]["donated"][1] == 4 * 64 * 7
    assert found["deleted"]
    assert "fun does not reuse `state`, an array of shape (64, 7) and dtype float32" in found["refused"]


def test_a_weight_assigned_in_each_iteration_has_a_gradient_of_three(static_graph):
    assert set(static_graph.assigned_in_a_loop().values()) == {3.0}


# Control flow under vmap


def test_a_predicate_for_each_lane_runs_both_branches_and_a_shared_one_does_not(control_flow):
    assert control_flow.which_branches_run() == {
        "cond, not mapped": (["case"], {"a": 1}),
        "vmap(cond)": (["select"], {"a": 5, "b": 5}),
        "vmap(cond), shared predicate": (["case"], {"a": 5}),
        "vmap(cond, chunk_size=1)": (["select", "while"], {"a": 5, "b": 5}),
        "lax.map(cond)": (["case", "while"], {"a": 2, "b": 3}),
        "vmap(switch)": (["select"], {"a": 5, "b": 5, "c": 5}),
    }


def test_all_forms_of_a_branch_give_the_same(control_flow):
    spent = control_flow.what_a_branch_costs(slices=5, side=3, rounds=1)  # compares the results
    assert [len(times) for times in spent.values()] == 4 * [4]


@pytest.mark.parametrize("taken", [[], [2], [0, 1, 4]])
def test_a_bucket_changes_only_the_selected_examples(control_flow, taken):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 3)), jnp.float32)
    found = control_flow.in_a_bucket(np.isin(np.arange(5), taken), x)
    for i in range(5):
        expected = control_flow.dear(x[i]) if i in taken else x[i]
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-6)


def test_a_mapped_loop_turns_until_the_last_lane_is_done(control_flow):
    counted, trips = control_flow.counted("turn"), jnp.array([1, 5, 2])

    def loop(n: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda i: i < n, lambda i: counted(i) + 1, jnp.zeros_like(n))

    control_flow.CALLS.clear()
    np.testing.assert_array_equal(jax.block_until_ready(vmap(loop)(trips)), trips)
    assert control_flow.CALLS["turn"] == 3 * 5
    control_flow.CALLS.clear()
    np.testing.assert_array_equal(jax.block_until_ready(vmap(loop, chunk_size=2)(trips)), trips)
    assert control_flow.CALLS["turn"] == control_flow.computed(np.asarray(trips), 2) == 2 * 5 + 2


def test_sorted_chunks_wait_less(control_flow):
    found, iterations, order = control_flow.what_a_loop_costs(side=12, limit=30, chunk=16, rounds=1)
    needed, together, chunked, in_order = (work for work, _, _ in found.values())
    assert needed == iterations.sum()
    assert together == iterations.size * iterations.max()
    assert needed < in_order < chunked < together
    assert sorted(order) == list(range(144))


def test_reverse_mode_refuses_a_loop_with_mapped_bounds(control_flow):
    found = control_flow.bounds_of_their_own()
    assert found["a Python int"] == (["while"], [8, 8, 27], "12, 12, 27")
    assert found["a shared bound and a mask"] == (["select", "while"], [2, 32, 27], "1, 80, 27")
    program, values, slope = found["an array: a bound for each slice"]
    assert (program, values) == (["select", "while"], [2, 32, 27])
    assert slope.startswith("error: Reverse-mode differentiation does not work")


def test_a_mapped_cond_excludes_the_gradient_of_the_other_branch(control_flow):
    slopes = control_flow.in_the_branch_not_taken()
    assert np.isnan(slopes["vmap(where)"][0])
    assert slopes["vmap(where)"][1:] == [0.25, 0.0, 0.25]
    assert slopes["vmap(where), where twice"] == slopes["vmap(cond)"] == [0.0, 0.25, 0.0, 0.25]


# Custom rules


def test_the_rule_for_vmap_agrees_with_a_loop_whatever_is_mapped(rules):
    rng = np.random.default_rng(3)
    w, x = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 3, 2, 2, 4), (3, 2, 5, 4, 2)))
    found = rules.agrees_with_a_loop(w, x)
    assert len(found) == 9
    assert max(found.values()) < 1e-5


def groups(fun: Any, *args: jax.Array) -> set[int]:
    """Return the group counts of the convolutions in a program."""
    text = str(jax.make_jaxpr(fun)(*args))
    return {int(part.split()[0]) for part in text.split("feature_group_count=")[1:]}


def test_no_order_of_maps_makes_a_grouped_convolution(rules):
    w, x = jnp.ones((3, 2, 2, 2, 4)), jnp.ones((5, 2, 6, 4, 2))
    assert groups(vmap(rules.native), w, x[:3]) == {3}
    for inner, outer in (((0, None), (None, 0)), ((None, 0), (0, None))):
        fun = vmap(vmap(rules.convolve, inner), outer)
        assert groups(fun, w, x) <= {1}
    thrice = vmap(vmap(vmap(rules.convolve, (0, None)), (None, 0)))
    every = jnp.ones((4, 3, 2, 2, 2, 4)), jnp.ones((4, 5, 2, 6, 4, 2))
    assert groups(thrice, *every) <= {1}
    assert thrice(*every).shape == (4, 5, 3, 2, 5, 3, 4)


def test_the_rule_has_second_derivatives_unlike_custom_vmap_alone(rules):
    rng = np.random.default_rng(4)
    w, x = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 1, 1, 2), (1, 3, 2, 1)))
    of = {name: jacfwd(grad(rules.squares(fun))) for name, fun in (("rule", rules.convolve), ("plain", rules.native))}
    np.testing.assert_allclose(of["rule"](w, x), of["plain"](w, x), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="Linearization failed"):
        grad(rules.squares(rules.batched))(w, x)


@pytest.mark.parametrize("e", [0.0, 0.3, 0.999])
def test_keplers_equation_is_solved(rules, e):
    mean = jnp.linspace(0, jnp.pi, 101)
    E = vmap(rules.kepler, in_axes=(0, None))(mean, e)
    np.testing.assert_allclose(E - e * jnp.sin(E), mean, atol=2e-6)


def test_the_rule_for_jvp_is_right_where_the_loop_has_none(rules):
    found = rules.a_rule_for_jvp(planets=9, rounds=1)
    assert found["residual"] < 1e-14
    assert found["deviation"] < 1e-5
    assert found["refused"].startswith("ValueError: Reverse-mode differentiation does not work for lax.while_loop")


def test_the_vjp_rule_stores_one_iteration(rules):
    found = rules.a_rule_for_vjp(size=32, rounds=1)
    assert found["deviation"] < 1e-12
    kept, by_rule = found["bytes"].values()
    assert kept > 60 * 32 * 8 > 10 * by_rule
    assert list(found["slopes"].values()) == [0.0, 4.0, 12.0, 5.0]


def test_a_wrong_rule_is_detected(rules):
    assert set(rules.wrong_rules().values()) == {"AssertionError"}


# Cells


def test_a_cell_agrees_with_the_same_in_another_place(cells):
    same, pad = cells.compare_a_cell().values()
    assert same == ((2, 12, 12, 240), None)
    assert pad[0] == (2, 9, 9, 240)
    assert pad[1] <= 5e-6  # 3.3e-6 on a CPU with AVX2


def test_compiled_and_step_by_step_give_one_result(cells):
    compiled, stepwise = cells.compiled_and_step_by_step(steps=3).values()
    np.testing.assert_allclose(compiled[0], stepwise[0], rtol=1e-5)
    assert (compiled[1], stepwise[1]) == (1, 3)


def test_what_must_not_be_traced_says_so(cells):
    found = cells.what_may_not_be_compiled()
    assert found["jnp.square(x)"] == ("9", "6")
    for name, error in (
        ("np.square(x)", "TracerArrayConversionError"),
        ("x * np.asarray(x)", "TracerArrayConversionError"),
        ("x * float(x)", "ConcretizationTypeError"),
        ("a thread", "UnexpectedTracerError"),
        ("appending to a list", "UnexpectedTracerError"),
    ):
        assert found[name] == (error, error)
    assert found["x * x if x > 0 else x"] == ("TracerBoolConversionError", "6")
    compiled, slope = found["x * x.item()"]
    assert compiled == "ConcretizationTypeError"
    assert slope != "6"  # jax 0.10 silently drops the derivative of `item()`
    assert found["random"][0] == "one"


def test_the_sampler_gives_back_how_often_each_value_was_drawn(cells):
    found = cells.a_backward_pass_of_ones_own()
    np.testing.assert_array_equal(found["guide"], [[0, 1, 0, 2, 0], [0, 2, 0, 0, 1]])
    assert "callbacks do not support JVP" in found["refused"]
    x, weights = jnp.array([[0.1, 0.6, 0.7], [0.9, 0.2, 0.3]]), jnp.array([[1.0, 2, 4, 8], [1, 2, 4, 8]])
    for sample in (cells.sampler, cells.take_positions, cells.native):
        values = sample(x, 5, 4)
        gradient = grad(lambda x, sample=sample: jnp.sum(weights * sample(x, 5, 4)))(x)
        expected = [[float(weights[i][values[i] == x[i, j]].sum()) for j in range(3)] for i in range(2)]
        np.testing.assert_allclose(gradient, expected)
        assert gradient[1, 0] == 15


def test_the_forward_pass_of_value_and_grad_runs_once_and_moves_the_statistics_once(cells):
    for runs, least, most in cells.the_forward_pass_runs_once().values():
        assert runs == 1
        np.testing.assert_allclose([least, most], 0.1, rtol=1e-4)  # two updates would give 0.19


# Cells: parameters and shapes


def test_cells_have_named_parameters_initialized_by_type(cells):
    names = cells.parameters_by_name()
    assert len(names) == 12
    assert names["conv2.kernel"] == (3, 3, 6, 8)
    cells.first_values_by_type()  # compares deviations, bounds, ones and zeros


def test_frozen_features_are_unchanged_and_cost_nothing(cells):
    everything, frozen, stopped = cells.frozen_parameters(steps=2).values()
    assert everything[1:] == (8, 4)
    assert frozen[1:] == (0, 4)
    assert stopped[1] > 0  # weight decay
    assert frozen[0] < 0.5 * everything[0]


def test_half_precision_but_for_norms_and_the_loss(cells):
    single, mixed = cells.mixed_precision().values()
    assert (single.pop("loss")[:7], mixed.pop("loss")[:7]) == ("float32", "float32")
    assert set(single.values()) == {"f32", "float32"}
    assert mixed == {"conv_general_dilated": "bf16", "rsqrt": "f32", "dot_general": "bf16", "gradients": "float32"}


def test_files_report_mismatches(cells):
    found = list(cells.files_of_parameters().values())
    assert "lacks `extra.bias`, `extra.kernel`, `head.bias`, `head.kernel`, and has in addition `out.bias`" in found[1]
    assert "lacks `extra.bias`, `extra.kernel`; rename= is for other names" in found[2]
    assert "is damaged" in found[3]


def test_the_hardest_of_the_positives_and_shapes_that_vary(cells):
    found = cells.shapes_that_vary()
    np.testing.assert_allclose(found["loss"], 0.7207259, rtol=1e-6)
    assert found["traces"] <= 9
    assert found["rows"] == {True: 2, False: 1}
    assert "branches must have equal output types" in found["refused"]


# Repeated layers (48 blocks are in `test_layers.py`, micro-batches in `test_accumulate.py`)


class Layer(nnx.Module):
    """A GPT block: attention over a key-value cache that grows by one position."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm, self.out = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.attend = nnx.Linear(width, 3 * width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, cache: Any) -> Any:
        """Process one position (batch, width) with a mask (length,) and a cache; return the output and a new cache."""
        query, key, value = jnp.split(self.attend(self.norm(x)), 3, axis=-1)
        position = mask.sum() - 1
        keys, values = (cache[name].at[:, position].set(new) for name, new in (("key", key), ("value", value)))
        scores = jnp.where(mask, jnp.einsum("bd,btd->bt", query, keys), -jnp.inf)
        return x + self.out(jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), values)), {"key": keys, "value": values}


def test_blocks_of_a_gpt_share_a_mask_and_have_a_cache_each():
    layers = [Layer(4, nnx.Rngs(i)) for i in range(3)]
    stack, tokens = stack_layers(layers), jax.random.normal(jax.random.key(1), (5, 2, 4))
    caches = jax.tree.map(jnp.zeros_like, {"key": jnp.ones((3, 2, 6, 4)), "value": jnp.ones((3, 2, 6, 4))})
    step = jax.jit(lambda x, mask, caches: scan_layers(stack, x, mask, xs=caches))
    apply = jax.jit(lambda layer, x, mask, cache: layer(x, mask, cache))
    by_hand = [jax.tree.map(lambda x, i=i: np.asarray(x)[i], caches) for i in range(3)]
    for position, x in enumerate(tokens):
        mask = jnp.arange(6) <= position
        out, caches = step(x, mask, caches)
        expected = x
        for i, layer in enumerate(layers):
            expected, by_hand[i] = apply(layer, expected, mask, by_hand[i])
        np.testing.assert_allclose(out, expected, atol=1e-5)
    for i, cache in enumerate(by_hand):
        np.testing.assert_allclose(caches["key"][i], cache["key"], atol=1e-5)
