"""Flops and bytes from shapes, against XLA's own analysis and formulas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from plurax.transforms.program._ir.cost import flops, memory
from plurax.transforms.program._ir.hlo import HloProgram

pytestmark = pytest.mark.smoke


def program_of(fun: Callable[..., Any], *args: Any) -> HloProgram:
    """Return the program as lowered, before XLA's optimizations."""
    return HloProgram(jax.jit(fun).lower(*args).as_text("hlo"))


def total(program: HloProgram) -> int:
    """Sum the flops of a program without loops and calls."""
    return sum(flops(program, x) for x in program.computations[program.entry])


def by_xla(fun: Callable[..., Any], *args: Any) -> float:
    found: Any = jax.jit(fun).lower(*args).cost_analysis()
    return found.get("flops", 0.0) + found.get("transcendentals", 0.0)


def convolution(x: Any, w: Any, **settings: Any) -> Any:
    settings = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME", **settings}
    return lax.conv_general_dilated(x, w, **settings)


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape)


CASES: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]] = {
    "product": (jnp.matmul, (ones(3, 4), ones(4, 5))),
    "product of batches": (jnp.matmul, (ones(2, 3, 4), ones(2, 4, 5))),
    "two axes summed": (lambda x, y: lax.dot_general(x, y, (((0, 2), (1, 0)), ((), ()))), (ones(2, 3, 4), ones(4, 2))),
    "elementwise": (lambda x: jnp.tanh(x) * 2.0 + jnp.exp(x), (ones(3, 5),)),
    "sum": (lambda x: x.sum(0), (ones(7, 3),)),
    "maximum": (lambda x: x.max(), (ones(7, 3),)),
    "pooling": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 3), (2, 1), "VALID"), (ones(8, 9),)),
    "convolution": (convolution, (ones(2, 3, 9, 7), ones(4, 3, 3, 2))),
    "without padding": (lambda x, w: convolution(x, w, padding="VALID"), (ones(2, 3, 9, 7), ones(4, 3, 3, 2))),
    "strides": (lambda x, w: convolution(x, w, window_strides=(2, 3)), (ones(2, 3, 9, 7), ones(4, 3, 3, 2))),
    "dilated window": (lambda x, w: convolution(x, w, rhs_dilation=(2, 1)), (ones(2, 3, 9, 7), ones(4, 3, 3, 2))),
    "dilated input": (
        lambda x, w: convolution(x, w, padding=[(2, 1), (1, 1)], lhs_dilation=(2, 3)),
        (ones(2, 3, 5, 4), ones(4, 3, 3, 2)),
    ),
    "groups": (lambda x, w: convolution(x, w, feature_group_count=2), (ones(2, 6, 9, 7), ones(4, 3, 3, 2))),
    "groups of the batch": (lambda x, w: convolution(x, w, batch_group_count=2), (ones(4, 3, 9, 7), ones(4, 3, 3, 2))),
    "one place axis": (convolution, (ones(2, 3, 9), ones(4, 3, 5))),
    "three place axes": (convolution, (ones(2, 3, 4, 5, 6), ones(4, 3, 1, 3, 2))),
    "gradient of the weights": (
        lambda x, w: jax.grad(lambda w: convolution(x, w, window_strides=(2, 1)).sum())(w),
        (ones(2, 3, 9, 7), ones(4, 3, 3, 2)),
    ),
}

FORM = ("NHWC", "OHWI", "NHWC")


@pytest.mark.parametrize("name", CASES)
def test_flops_are_those_of_xla(name: str) -> None:
    fun, args = CASES[name]
    expected = by_xla(fun, *args)
    assert expected > 0
    assert total(program_of(fun, *args)) == expected


def test_library_calls_for_products_count() -> None:
    axes = '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}'
    text = f"""HloModule jit_f

ENTRY %main (x: f32[3,4], y: f32[4,5]) -> (f32[3,5], s8[8]) {{
  %x = f32[3,4]{{1,0}} parameter(0)
  %y = f32[4,5]{{1,0}} parameter(1)
  ROOT %gemm = (f32[3,5]{{1,0}}, s8[8]{{0}}) custom-call(%x, %y), backend_config={{"dot_dimension_numbers":{axes}}}
}}
"""
    assert total(HloProgram(text)) == 2 * 3 * 5 * 4


@pytest.mark.parametrize("kind", ["Forward", "BackwardInput", "BackwardFilter"])
def test_library_calls_for_convolutions_count(kind: str) -> None:
    """A gradient by cuDNN has the window and the labels of the convolution, and as many operations."""
    image, kernel, out = "f32[2,9,7,3]{3,2,1,0}", "f32[5,3,3,3]{3,2,1,0}", "f32[2,5,4,5]{3,2,1,0}"
    first, second, result = {
        "Forward": (image, kernel, out),
        "BackwardInput": (out, kernel, image),
        "BackwardFilter": (image, out, kernel),
    }[kind]
    settings = "window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f"
    text = f"""HloModule jit_f

ENTRY %main (x: {first[:-9]}, y: {second[:-9]}) -> ({result[:-9]}, u8[8]) {{
  %x = {first} parameter(0)
  %y = {second} parameter(1)
  ROOT %conv = ({result}, u8[8]{{0}}) custom-call(%x, %y), {settings}, custom_call_target="__cudnn$conv{kind}"
}}
"""
    strided = lambda x, w: lax.conv_general_dilated(x, w, (2, 2), ((1, 1), (1, 1)), dimension_numbers=FORM)
    assert total(HloProgram(text)) == by_xla(strided, ones(2, 9, 7, 3), ones(5, 3, 3, 3))


def test_a_product_reads_and_writes_each_array_once() -> None:
    program = program_of(jnp.matmul, ones(3, 4), ones(4, 5))
    (dot,) = (x for x in program.instructions.values() if x.opcode == "dot")
    assert memory(program, dot) == 4 * (3 * 4 + 4 * 5 + 3 * 5)


def test_types_have_their_sizes() -> None:
    program = program_of(lambda x, y: x[:, None] & y, jnp.ones(3, bool), jnp.ones(5, bool))
    (both,) = (x for x in program.instructions.values() if x.opcode == "and")
    assert memory(program, both) == 3 * 15
    program = program_of(lambda x: -x, jnp.ones((3, 5), jnp.bfloat16))
    (negated,) = (x for x in program.instructions.values() if x.opcode == "negate")
    assert memory(program, negated) == 2 * 2 * 15
    program = program_of(lambda x: -x, jnp.ones((3, 5), jnp.complex64))
    (negated,) = (x for x in program.instructions.values() if x.opcode == "negate")
    assert memory(program, negated) == 2 * 8 * 15


def test_slices_and_in_place_updates_count_only_their_part() -> None:
    def update(x: Any, y: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(x, lax.dynamic_slice(y, (i, 0), (1, 5)) * 2.0, (i, 0))

    program = HloProgram(jax.jit(update, donate_argnums=0).lower(ones(7, 5), ones(9, 5), 3).compile().as_text())
    moved = sum(memory(program, x) for x in program.computations[program.entry] if x.opcode == "fusion")
    assert 4 * (5 + 5) <= moved <= 4 * (5 + 5) + 64  # and the indices, a few integers
