"""Donated buffers are reused, or reported by name."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from plurax.transforms.program import assert_donated

CACHE = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_reused_arguments_pass_and_nothing_is_donated() -> None:
    state = {"w": jnp.ones((3, 5)), "b": jnp.ones(5)}
    step = jax.jit(lambda state, x: jax.tree.map(lambda p: p - x.sum(), state), donate_argnums=0)
    assert_donated(step, state, jnp.ones(7))
    assert_donated(step, {"w": f32(3, 5), "b": f32(5)}, f32(7))
    assert not any(x.is_deleted() for x in state.values())


def test_the_memory_analysis_agrees() -> None:
    step = jax.jit(lambda x, y: x + y, donate_argnums=0)
    assert_donated(step, f32(64, 3), f32(3))
    compiled: Any = step.lower(f32(64, 3), f32(3)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 4 * 64 * 3


def test_arguments_that_are_not_reused_are_named() -> None:
    shrinking = jax.jit(lambda state, x: state["w"][:2] + x.sum(), donate_argnums=0)
    match = r"`state\['w'\]`, an array of shape \(3, 5\) and dtype float32 \(no result has its shape and dtype, or one"
    with pytest.raises(AssertionError, match=match):
        assert_donated(shrinking, {"w": f32(3, 5)}, f32(7))


def test_another_dtype_is_not_reused() -> None:
    half = jax.jit(lambda x: x.astype(jnp.bfloat16), donate_argnums=0)
    with pytest.raises(AssertionError, match="`x`, an array of shape .5,. and dtype float32"):
        assert_donated(half, f32(5))


def test_of_two_arguments_for_one_result_one_is_named() -> None:
    both = jax.jit(lambda x, y: x + y, donate_argnums=(0, 1))
    with pytest.raises(AssertionError, match="does not reuse `y`, an array of shape [^`]*$"):
        assert_donated(both, f32(5), f32(5))


def test_unused_arguments_are_named_and_others_keep_their_names() -> None:
    @partial(jax.jit, donate_argnames=("unused", "x"), static_argnames="n")
    def fun(unused: jax.Array, n: int, x: jax.Array, *more: jax.Array) -> jax.Array:
        return x * n + more[0].sum()

    with pytest.raises(
        AssertionError, match="`unused`, an array of shape .2,. [^`]* .it is not used.; .*donate less.$"
    ):
        assert_donated(fun, f32(2), 3, f32(5), f32(4))


def test_all_that_are_not_reused_are_listed() -> None:
    total = jax.jit(lambda x, y, z: (x.sum() + y.sum(), z), donate_argnums=(0, 1, 2))
    with pytest.raises(AssertionError, match=r"`x`, an array of shape \(5,\) .*, `y`, an array of shape \(4,\) [^`]*$"):
        assert_donated(total, f32(5), f32(4), f32(3))


def test_names_may_have_any_characters() -> None:
    names = ["it's", 'q"q', "ü", "a b"]
    step = jax.jit(lambda state: {name: x + 1.0 for name, x in state.items()}, donate_argnums=0)
    assert_donated(step, {name: f32(3 + i) for i, name in enumerate(names)})


@pytest.mark.slow
def test_a_program_that_is_cached_keeps_the_names_of_this_function(tmp_path: Path) -> None:
    before = {name: jax.config.values[name] for name in CACHE}
    try:
        for name, value in zip(CACHE, (str(tmp_path), 0, -1), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        jax.jit(lambda other, z: other * 3 + z.sum(), donate_argnums=0).lower(f32(7), f32(5)).compile()
        assert list(tmp_path.iterdir())
        assert_donated(jax.jit(lambda state, x: state * 3 + x.sum(), donate_argnums=0), f32(7), f32(5))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_parts_of_modules_are_named() -> None:
    step = jax.jit(lambda model, x: (model(x), model.bias[...]), donate_argnums=0)
    with pytest.raises(AssertionError, match="`model.kernel.value`, an array of shape .3, 2."):
        assert_donated(step, nnx.Linear(3, 2, rngs=nnx.Rngs(0)), f32(4, 3))


def test_functions_without_donation_are_refused() -> None:
    with pytest.raises(ValueError, match="assert_donated: fun donates nothing; name the arguments"):
        assert_donated(jax.jit(jnp.sin), f32(3))
    with pytest.raises(
        TypeError, match="assert_donated: fun must be a function under jax.jit, but got .*; pass jax.jit.fun"
    ):
        assert_donated(lambda x: x, f32(3))
    with pytest.raises(TypeError, match="assert_donated: fun must be a function"):
        assert_donated(3, f32(3))
