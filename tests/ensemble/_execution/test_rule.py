"""The execution that "auto" starts with, by the platform that a step is compiled for."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, Execution, Trainer
from plurax.ensemble._members.strategy import by_rule
from plurax.transforms._core.target import compiling_for

pytestmark = pytest.mark.smoke


class Net(nnx.Module):
    """A convolution and a layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, 4, (3, 3), strides=(2, 2), rngs=rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(nnx.relu(self.conv(x)).mean((1, 2)))


def loss(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


def program(*shape: int, taps: int = 3) -> Any:
    """Return the program of the gradients of a convolution."""
    form = ("NHWC", "HWIO", "NHWC")
    convolved = lambda w, x: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=form).sum()
    kernel = jax.ShapeDtypeStruct((taps, taps, shape[-1], 8), jnp.float32)
    return jax.make_jaxpr(jax.grad(convolved))(kernel, jax.ShapeDtypeStruct(shape, jnp.float32)).jaxpr


MEMBER_BY_MEMBER = Execution("map")
PRODUCTS, PRODUCTS_IN_TURN = Execution("vmap", products=True), Execution("map", products=True)


@pytest.mark.parametrize(
    ("shape", "platform", "expected"),
    [
        ((4, 28, 28, 1), "cpu", PRODUCTS),
        ((64, 28, 28, 1), "cpu", PRODUCTS_IN_TURN),
        ((64, 28, 28, 1), "gpu", PRODUCTS),
        ((4096, 28, 28, 1), "gpu", MEMBER_BY_MEMBER),
        ((64, 28, 28, 1), "tpu", Execution("vmap")),
    ],
)
def test_convolutions(shape: tuple[int, ...], platform: str, expected: Execution) -> None:
    assert by_rule(program(*shape), platform) == expected


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_without_convolutions(platform: str) -> None:
    assert by_rule(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 4))).jaxpr, platform) == Execution("vmap")


@pytest.mark.parametrize(
    ("platform", "expected"), [("cpu", Execution("loop", products=True)), ("gpu", MEMBER_BY_MEMBER)]
)
def test_convolutions_that_are_not_rewritten(platform: str, expected: Execution) -> None:
    assert by_rule(program(2, 28, 28, 1, taps=9), platform) == expected


@pytest.mark.parametrize(("platform", "convolutions"), [("cpu", 6), ("cuda", 6), ("tpu", 2)])
def test_a_traced_step_follows_the_platform_that_it_is_compiled_for(platform: str, convolutions: int) -> None:
    trainer = Trainer(loss, optax.sgd(0.1))
    state = trainer.init(Ensemble.create(Net, 3, seed=0))
    with compiling_for(SimpleNamespace(platform=platform)):
        program = jax.make_jaxpr(trainer.step)(state, jnp.ones((5, 8, 8, 1)))
    assert str(program).count("conv_general_dilated[") == convolutions  # one for each member, or for all
