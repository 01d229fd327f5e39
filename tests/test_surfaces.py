"""What Plurax reads of JAX that a new version may change: each part has a test that says what has changed.

A failure here is no fault of ours. Mend it in `_core/compat.py` or with a rule, so that the old version works as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from plurax.transforms._core import compat, jaxpr
from plurax.transforms.program._ir.hlo import HloProgram

from ._functions import IMAGE, KERNEL, LINE, OTHERS, WIDE, calls, eqns_of, primitives

pytestmark = pytest.mark.smoke
ROOT = Path(__file__).parents[1]


def on_one_device(fun: Callable[..., Any]) -> Callable[..., Any]:
    mesh, everywhere = jax.make_mesh((1,), ("i",)), jax.P()
    return jax.shard_map(fun, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)


# The parameters of primitives that rules read, and a call that uses the primitive.
PARAMETERS: dict[str, tuple[str, str | tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "approx_top_k": ("reduction_dimension", "jax.lax.approx_max_k"),
    "argmax": ("axes", (jnp.argmax, (WIDE,))),
    "axis_index": ("axis_name", (on_one_device(lambda x: jax.lax.axis_index("i") * x), (LINE,))),
    "broadcast_in_dim": ("broadcast_dimensions shape", "jax.lax.broadcast_in_dim"),
    "concatenate": ("dimension", "jax.lax.concatenate"),
    "cond": ("branches", "jax.lax.cond"),
    "conv_general_dilated": (
        "batch_group_count dimension_numbers feature_group_count lhs_dilation padding precision "
        "preferred_element_type rhs_dilation window_strides",
        "jax.lax.conv_general_dilated",
    ),
    "cumsum": ("axis reverse", (jnp.cumsum, (LINE,))),
    "custom_jvp_call": ("call_jaxpr", (jax.nn.relu, (LINE,))),
    "dot_general": ("dimension_numbers precision preferred_element_type", "jax.lax.dot_general"),
    "dynamic_slice": ("slice_sizes", "jax.lax.dynamic_slice"),
    "fft": ("fft_lengths", "jax.lax.fft"),
    "gather": ("dimension_numbers mode slice_sizes", "x[i]"),
    "integer_pow": ("y", (lambda x: x**3, (LINE,))),
    "jit": ("jaxpr name", "jax.jit"),
    "pad": ("padding_config", "jax.lax.pad"),
    "reduce": ("dimensions", "jax.lax.reduce"),
    "reduce_sum": ("axes", (jnp.sum, (WIDE,))),
    "reduce_window_max": ("padding window_dimensions window_strides", "jax.lax.reduce_window max"),
    "reduce_window_sum": (
        "base_dilation padding window_dilation window_dimensions window_strides",
        "jax.lax.reduce_window sum",
    ),
    "reshape": ("dimensions new_sizes sharding", (lambda x: x.reshape(5, 3), (WIDE,))),
    "rev": ("dimensions", "jax.lax.rev"),
    "scan": ("jaxpr length reverse unroll", "jax.lax.scan"),
    "scatter": ("dimension_numbers mode update_jaxpr", "x.at[i].set"),
    "select_and_gather_add": (
        "padding select_prim window_dimensions window_strides",
        (
            lambda x: jax.jvp(jax.jit(OTHERS["jax.lax.reduce_window max"][0]), (x,), (x,)),
            (IMAGE,),
        ),
    ),
    "slice": ("limit_indices start_indices strides", "jax.lax.slice"),
    "sort": ("dimension is_stable num_keys", (jnp.sort, (LINE,))),
    "split": ("axis sizes", "jax.lax.split"),
    "squeeze": ("dimensions", "jax.lax.squeeze"),
    "top_k": ("axis", (lambda x: jax.lax.top_k(x, 2), (LINE,))),
    "transpose": ("permutation", "jax.lax.transpose"),
    "triangular_solve": (
        "left_side lower transpose_a",
        (lambda x: jax.scipy.linalg.solve_triangular(jnp.eye(5), x), (LINE,)),
    ),
    "while": ("body_jaxpr body_nconsts cond_jaxpr cond_nconsts", "jax.lax.while_loop"),
}
# Read where a version has them, and done without where it does not.
BY_VERSION = {"num_consts", "num_carry", "ft_in", "_prim", "prevent_cse", "policy"}
# Of primitives that exchange values between devices; the tests with several devices fail without them.
COLLECTIVE = {"axis_index_groups"}


def missing(primitive: str, wanted: str, call: Any) -> list[str]:
    """Return a sentence for each parameter that a primitive no longer has."""
    fun, args = OTHERS[call] if isinstance(call, str) else call
    of_it = [eqn for eqn in eqns_of(fun, args) if eqn.primitive.name == primitive]
    if not of_it:
        return [f"no primitive `{primitive}` in the program of {call}"]
    return [
        f"the parameter `{name}` of `{primitive}` is gone; it has {', '.join(of_it[0].params)}"
        for name in wanted.split()
        if name not in of_it[0].params
    ]


@pytest.mark.parametrize("primitive", PARAMETERS)
def test_primitives_have_the_parameters_that_rules_read(primitive: str) -> None:
    assert not missing(primitive, *PARAMETERS[primitive])


def test_a_missing_parameter_or_primitive_is_named() -> None:
    assert missing("transpose", "permutation order", "jax.lax.transpose") == [
        "the parameter `order` of `transpose` is gone; it has permutation"
    ]
    assert missing("turn", "order", (jnp.sin, (LINE,)))[0].startswith("no primitive `turn`")


def read_parameters(source: str) -> set[str]:
    """Return the constant names that code reads from the parameters of operations."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            owner, key = node.func.value, node.args[0]
        else:
            continue
        if ast.unparse(owner).split(".")[-1] == "params" and isinstance(key, ast.Constant):
            found.add(str(key.value))
    return found


def test_every_parameter_that_the_code_reads_is_listed() -> None:
    files = [path for folder in ("transforms", "ensemble") for path in (ROOT / folder).rglob("*.py")]
    read = set().union(*(read_parameters(path.read_text()) for path in files)) - {"learning_rate"}
    listed = {name for wanted, _ in PARAMETERS.values() for name in wanted.split()}
    assert read - listed - BY_VERSION - COLLECTIVE == set()
    assert read_parameters("eqn.params['a'] + params.get('b', 0) + other['c']") == {"a", "b"}


def test_loops_calls_and_rematerialization_can_be_entered() -> None:
    scan = next(x for x in eqns_of(*OTHERS["jax.lax.scan"]) if x.primitive.name == "scan")
    assert compat.scan_counts(scan.params) == (0, 1), "the counts of `scan` are stored in another way"
    remat = [x for x in eqns_of(*OTHERS["jax.checkpoint"]) if x.primitive.name in jaxpr.REMAT]
    assert remat, "`jax.checkpoint` is another primitive"
    assert {"jaxpr", "prevent_cse", "policy"} <= set(remat[0].params), "`jax.checkpoint` has other parameters"
    for call in ("jax.jit", "jax.checkpoint", "jax.lax.custom_root"):
        called = [jaxpr.called(x)[0] for x in eqns_of(*OTHERS[call]) if x.primitive.name in jaxpr.CALLS]
        assert any(program.eqns for program in called), f"the program of {call} cannot be entered"


KNOWN = (Path(__file__).parent / "primitives.txt").read_text().split()
# Functions with a primitive through which no rule for sparse patterns follows tangents, as on jax 0.10.
WITHOUT_RULE = {"jax.lax.ragged_dot": {"ragged_dot_general"}}


@pytest.mark.slow
@pytest.mark.xdist_group("functions of JAX")
def test_every_primitive_is_known_that_functions_of_jax_use() -> None:
    used = {name: primitives(name)[0] for name in calls()}
    assert len(used) > 600
    new = {(x, next(f for f, xs in used.items() if x in xs)) for xs in used.values() for x in xs - set(KNOWN)}
    assert not new, (
        "JAX uses primitives that Plurax does not know (in brackets a function that uses it): see whether ELEMENTWISE, "
        "IDENTITIES or CALLS in _core/jaxpr.py, the rules for patterns, Laplacians and Taylor mode, and those for "
        "per-example gradients need them, then list them in tests/primitives.txt"
    )


@pytest.mark.slow
@pytest.mark.xdist_group("functions of JAX")
def test_no_function_of_jax_has_lost_its_rules() -> None:
    lost = {name: primitives(name)[1] for name in calls()}
    assert {name: found for name, found in lost.items() if found - WITHOUT_RULE.get(name, set())} == {}


def test_a_lost_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from plurax.transforms._jacobian._sparse import primitive_rules

    rules = {name: rule for name, rule in primitive_rules._RULES.items() if name != "transpose"}
    monkeypatch.setattr(primitive_rules, "_RULES", rules)
    assert primitives.__wrapped__("jax.lax.transpose") == ({"transpose"}, {"transpose"})


def test_known_primitives_are_listed_once_and_in_order() -> None:
    assert sorted(set(KNOWN)) == KNOWN
    assert {*jaxpr.ELEMENTWISE} - {*KNOWN} <= {"add_any", "copy", "copy_p", "stop_gradient"}


def test_compiled_programs_tell_their_memory_and_lowered_ones_their_operations() -> None:
    lowered = jax.jit(lambda x: jnp.sin(x @ x.T) @ x).lower(jnp.ones((30, 40)))
    assert compat.memory_of(lowered.compile()).temp_size_in_bytes > 0, "`memory_analysis()` counts no temporaries"
    assert compat.flops_of(lowered) > 2 * 30 * 30 * 40, "`cost_analysis()` counts no operations"


def test_the_text_of_compiled_programs_can_be_read() -> None:
    """Shapes, operations and their metadata: what `profile`, `compile_for` and `assert_donated` read."""

    def loop(x: jax.Array) -> jax.Array:
        with jax.named_scope("here"):
            return jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(x @ x), x)

    program = HloProgram(jax.jit(loop).lower(jnp.ones((30, 30))).compile().as_text())
    assert 7 in {n for _, n in program.runs()}, "the number of iterations of a loop is written in another way"
    text = jax.jit(loop, donate_argnums=0).lower(jnp.ones((30, 30))).compile().as_text()
    assert re.search(r"input_output_alias=\{ \{\}: \(0, \{\}, (may|must)-alias\) \}", text), "donated arguments"
    assert "here/while/body" in text, "scopes are written in another way"


def test_settings_have_their_names() -> None:
    for name in ("jax_enable_x64", "jax_enable_preemption_service", "jax_compilation_cache_dir"):
        compat.setting(name)


def test_private_attributes_are_there() -> None:
    """Those that `compat.py` reads; most are done without if they are gone, at a cost in speed or in warnings."""
    lowered = jax.jit(jnp.sin).lower(LINE)
    assert compat.lowered_for(lowered) == compat.devices_of(lowered.compile())
    assert getattr(lowered._lowering, "_device_list", None) is not None, "`lowered._lowering._device_list` is gone"
    repeated = []
    jax.vmap(lambda x: repeated.append(compat.is_repeated(x)))(LINE)
    jax.jit(lambda x: repeated.append(compat.is_repeated(x)))(LINE)
    assert repeated == [True, False], "the attributes of tracers are named otherwise"
    assert compat.code_of(lowered) == compat.code_of(jax.jit(jnp.sin).lower(LINE)), "`jax.extend.mlir`"
    assert compat.sparse_product("bcoo_dot_general") is not None, "`_bcoo_dot_general_impl` is gone"
    assert not compat.inside_a_transform()
    assert jax.jit(lambda x: jnp.array(compat.inside_a_transform()))(LINE), "`get_opaque_trace_state`"
    assert jax.lax.mul_p in compat.jet_rules(), "`jax.experimental.jet`"
    two = jax.make_jaxpr(lambda x, y: (x + 1, y * 2))(LINE, LINE).jaxpr
    assert compat.needed(two, [False, True]) == [False, True], "`dce_jaxpr` returns something else"
    compiled = lowered.compile()
    compat.Dispatched(compiled, (LINE,), {}, jax.tree.structure(0))
    trees = jax.tree.structure(((LINE,), {})), jax.tree.structure(0)
    assert compat.loaded(compat.serialized(compiled), *trees, devices=jax.devices()[:1])


def test_an_error_of_a_newer_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), compat.fragile("a name"):
        raise KeyError("name")
    monkeypatch.setattr(compat, "NEWEST_TESTED", (0, 9))
    ending = rf"tested with is 0\.9, and this is {re.escape(jax.__version__)}. Please report this at https://\S+$"
    match = rf"^a name has changed in JAX \(KeyError: 'name'\)\. .* {ending}"
    with pytest.raises(RuntimeError, match=match), compat.fragile("a name"):
        raise KeyError("name")
    with pytest.raises(RuntimeError, match=r"^the parameter `ft_in` of `sin` has changed in JAX"):
        jaxpr.interpret(*_parts(jnp.sin), [LINE], lambda eqn, values: compat.scan_counts(eqn.params))
    with pytest.raises(KeyError, match="of the caller"):
        jaxpr.interpret(*_parts(jnp.sin), [LINE], lambda eqn, values: dict[str, Any]()["of the caller"])


def _parts(fun: Callable[..., Any]) -> tuple[Any, Any]:
    closed = jax.make_jaxpr(fun)(LINE)
    return closed.jaxpr, closed.consts


def test_convolutions_have_the_axes_that_rules_read() -> None:
    (eqn,) = jax.make_jaxpr(OTHERS["jax.lax.conv_general_dilated"][0])(IMAGE, KERNEL).jaxpr.eqns
    assert {"lhs_spec", "rhs_spec", "out_spec"} <= set(eqn.params["dimension_numbers"]._fields)
