"""MindSpore's guide to cells: names, a reference implementation, initialization, freezing.

Precision, frozen parameters and files are tested in `test_precision.py`, `test_parameters.py` and `test_files.py`.
"""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.nnx import initializers as init

from plurax.transforms import grad
from plurax.transforms.modules import (
    freeze,
    named_parameters,
    reinitialize,
)


class MyCell(nnx.Module):
    """A network followed by a ReLU."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def __call__(self, x: Any) -> Any:
        return nnx.relu(self.net(x))


def convolution(**options: Any) -> MyCell:
    return MyCell(nnx.Conv(120, 240, (4, 4), use_bias=False, rngs=nnx.Rngs(0), **options))


def test_parameters_have_the_name_of_their_place():
    found = named_parameters(convolution())
    assert {name: x.shape for name, x in found.items()} == {"net.kernel": (4, 4, 120, 240)}
    assert sum(x.size for x in found.values()) == 460_800


WEIGHTS = {"as initialized": (init.he_normal(), 7e-6), "all 0.1": (init.constant(0.1), 5e-6)}


@pytest.mark.parametrize("weights", WEIGHTS)
class TestACellAgainstItsReference:
    """Convolutions of (2, 12, 12, 120) images in [-1, 1), against windows summed in double precision.

    MindSpore's guide reports 2.94e-6 against PyTorch for one draw of images, with weights of 0.1. The sums have 1,920
    terms and reach 9. Over draws, the error against the exact sums is 2.6e-6 to 3.3e-6 on a CPU with AVX-512 and up to
    5.8e-6 on one with AVX2, and 4.4e-6 to 1e-5 in PyTorch.
    """

    X = np.random.default_rng(0).uniform(-1, 1, (2, 12, 12, 120)).astype(np.float32)

    def cell(self, weights: str, **options: Any) -> MyCell:
        return reinitialize(convolution(**options), {nnx.Conv: WEIGHTS[weights][0]}, jax.random.key(0))

    def slowly(self, kernel: np.ndarray, low: int, high: int) -> np.ndarray:
        """Pad with zeros and sum window by window."""
        x = np.pad(self.X.astype(float), ((0, 0), (low, high), (low, high), (0, 0)))
        size = x.shape[1] - 3
        y = np.empty((2, size, size, 240))
        for i, j in np.ndindex(size, size):
            y[:, i, j] = np.tensordot(x[:, i : i + 4, j : j + 4], kernel.astype(float), 3)
        return np.maximum(y, 0)

    def test_paddings_differ(self, weights: str):
        same, valid = (np.asarray(self.cell(weights, padding=padding)(self.X)) for padding in ("SAME", "VALID"))
        with pytest.raises(ValueError, match=r"operands could not be broadcast together with shapes \(2,12,12,240\)"):
            same - valid

    @pytest.mark.parametrize(
        ("padding", "around"), [("VALID", (0, 0)), (0, (0, 0)), ("SAME", (1, 2)), (((1, 2), (1, 2)), (1, 2))]
    )
    def test_each_is_its_reference(self, weights: str, padding: Any, around: tuple[int, int]):
        cell = self.cell(weights, padding=padding)
        expected = self.slowly(np.asarray(cell.net.kernel[...]), *around)
        assert np.abs(np.asarray(cell(self.X)) - expected).max() <= WEIGHTS[weights][1]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not a test dependency")
def test_a_cell_matches_pytorch():
    import torch

    x = TestACellAgainstItsReference.X
    for initializer, _ in WEIGHTS.values():
        cell = reinitialize(convolution(padding="VALID"), {nnx.Conv: initializer}, jax.random.key(0))
        kernel = torch.from_numpy(np.array(cell.net.kernel[...])).permute(3, 2, 0, 1)
        y = torch.nn.functional.conv2d(torch.from_numpy(x).permute(0, 3, 1, 2), kernel).relu()
        assert np.abs(np.asarray(cell(x)) - y.permute(0, 2, 3, 1).numpy()).max() <= 2e-5


class Network(nnx.Module):
    """The guide's network: two convolutions with batch norms and pools, and a dense layer on the last 5 by 5 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer1 = nnx.Sequential(nnx.Conv(3, 12, (3, 3), rngs=rngs), nnx.BatchNorm(12, rngs=rngs), nnx.relu)
        self.layer2 = nnx.Sequential(nnx.Conv(12, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.relu)
        self.fc = nnx.Linear(100, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in (self.layer1, self.layer2):
            x = nnx.max_pool(layer(x), (2, 2), (2, 2))
        return self.fc(x.reshape(-1, 100))


def test_each_kind_of_layer_is_initialized_its_own_way():
    model: Any = Network(nnx.Rngs(0))
    rules = {
        nnx.Conv: init.variance_scaling(2.0, "fan_out", "normal"),  # HeNormal(mode="fan_out")
        nnx.BatchNorm: {"scale": init.ones, "bias": init.zeros},
        nnx.Linear: {"kernel": init.variance_scaling(1 / 3, "fan_in", "uniform"), "bias": init.zeros},  # HeUniform(√5)
    }
    for norm in (model.layer1.layers[1], model.layer2.layers[1]):
        norm.scale[...], norm.bias[...] = jnp.full_like(norm.scale, 7), jnp.full_like(norm.bias, 7)
    found = named_parameters(reinitialize(model, rules, jax.random.key(0)))
    assert found.keys() == named_parameters(model).keys()
    for name in ("layer1.layers.1", "layer2.layers.1"):
        assert (found[f"{name}.scale"] == 1).all()
        assert (found[f"{name}.bias"] == 0).all()
    kernel = found["layer1.layers.0.kernel"]
    assert abs(float(kernel.std()) / np.sqrt(2 / (9 * 12)) - 1) < 0.2  # 324 numbers: five standard deviations
    kernel, bias = found["fc.kernel"], found["fc.bias"]
    assert 0.095 < np.abs(kernel).max() <= 1 / np.sqrt(100)
    assert (bias == 0).all()
    np.testing.assert_array_equal(found["layer1.layers.0.bias"], named_parameters(model)["layer1.layers.0.bias"])


class TestFreezing:
    """When `freeze` gives the same gradients as `stop_gradient`, and when it does not."""

    def test_if_something_trains_before_it_only_freezing_will_do(self):
        net = nnx.Dict(a=nnx.Linear(3, 3, rngs=nnx.Rngs(0)), b=nnx.Linear(3, 2, rngs=nnx.Rngs(1)))
        x = jnp.ones((4, 3))
        frozen = grad(lambda net: net.b(net.a(x)).sum())(freeze(net, "b"))
        assert [*frozen] == ["a"]
        assert np.abs(frozen["a"]["kernel"][...]).max() > 0
        cut = grad(lambda net: jax.lax.stop_gradient(net.b(net.a(x))).sum())(net)
        assert not any(np.any(x) for x in jax.tree.leaves(cut))

    def test_if_nothing_trains_before_it_both_give_the_same(self):
        net = nnx.Dict(a=nnx.Linear(3, 3, rngs=nnx.Rngs(0)), b=nnx.Linear(3, 2, rngs=nnx.Rngs(1)))
        x = jnp.ones((4, 3))
        frozen = grad(lambda net: net.b(net.a(x)).sum())(freeze(net, "a"))
        cut = grad(lambda net: net.b(jax.lax.stop_gradient(net.a(x))).sum())(net)
        np.testing.assert_array_equal(frozen["b"]["kernel"][...], cut["b"]["kernel"][...])
