"""Ensembles from MindSpore's and PyTorch's tutorials, with their shapes and numbers."""

import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

from plurax.ensemble import Ensemble, Trainer, load_member, save

RATES = [1e-2, 1e-3, 2e-3, 3e-3]

# One worker trains the models that several tests share.
pytestmark = pytest.mark.xdist_group("LeNets")


class LeNet5(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 6, (5, 5), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(6, 16, (5, 5), padding="VALID", rngs=rngs)
        self.fc1 = nnx.Linear(400, 120, rngs=rngs)
        self.fc2 = nnx.Linear(120, 84, rngs=rngs)
        self.fc3 = nnx.Linear(84, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        return self.fc3(nnx.relu(self.fc2(nnx.relu(self.fc1(x.reshape(len(x), -1))))))


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(784, 128, rngs=rngs)
        self.fc2 = nnx.Linear(128, 128, rngs=rngs)
        self.fc3 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        return self.fc3(nnx.relu(self.fc2(nnx.relu(self.fc1(x.reshape(len(x), -1))))))


def loss(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def digits(*shape):
    """Return real digits at 32 by 32 pixels, with leading dimensions `shape`."""
    images, labels = load_digits(return_X_y=True)
    count = int(np.prod(shape))
    large = np.kron(images[:count].reshape(-1, 8, 8) / 16, np.ones((4, 4)))
    return large.reshape(*shape, 32, 32, 1).astype(np.float32), labels[:count].reshape(shape).astype(np.int32)


@nnx.jit
def alone(model, x):
    return model(x)


@pytest.fixture(scope="module")
def lenets():
    return Ensemble.create(LeNet5, 4, seed=0)


def test_inference_with_one_batch_for_all(lenets):
    images, _ = digits(3)
    logits = lenets(images)
    assert logits.shape == (4, 3, 10)
    np.testing.assert_allclose(logits, [alone(member, images) for member in lenets], rtol=1e-4, atol=1e-5)


def test_inference_with_a_batch_each(lenets):
    images, _ = digits(4, 3)
    logits = lenets(images, in_axes=0)
    assert logits.shape == (4, 3, 10)
    np.testing.assert_allclose(logits, [alone(m, x) for m, x in zip(lenets, images, strict=True)], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def trained(lenets):
    images, labels = digits(10, 4, 3)
    trainer = Trainer(loss, optax.amsgrad, hyperparams={"learning_rate": RATES}, in_axes=0)
    return trainer.fit(trainer.init(lenets), zip(images, labels, strict=True), steps=10, progress=False)


def test_ten_steps_of_amsgrad_are_those_of_each_member_alone(lenets, trained):
    _, history = trained
    curves = np.array([row["loss"] for row in history]).reshape(10, 4)
    np.testing.assert_allclose(curves[0], np.log(10), atol=0.25)
    images, labels = digits(10, 4, 3)
    for i, member in enumerate(lenets):
        opt_state = optax.amsgrad(RATES[i]).init(nnx.state(member, nnx.Param))
        for s in range(10):
            value, opt_state = step_alone(member, opt_state, RATES[i], images[s, i], labels[s, i])
            np.testing.assert_allclose(curves[s, i], value, rtol=2e-3, atol=1e-5)


@nnx.jit
def step_alone(model, opt_state, rate, x, y):
    value, gradient = nnx.value_and_grad(loss)(model, x, y)
    params = nnx.state(model, nnx.Param)
    updates, opt_state = optax.amsgrad(rate).update(gradient, opt_state, params)
    nnx.update(model, optax.apply_updates(params, updates))
    return value, opt_state


def test_a_trained_member_alone_gives_what_the_ensemble_gave(tmp_path, trained):
    ensemble = trained[0].ensemble
    images, _ = digits(3)
    together = ensemble(images)
    save(tmp_path / "lenets", ensemble)
    for i in range(4):
        for member in (ensemble[i], load_member(tmp_path / "lenets", i, LeNet5(nnx.Rngs(9)))):
            assert type(member) is LeNet5
            np.testing.assert_allclose(alone(member, images), together[i], rtol=1e-4, atol=1e-5)


def test_ten_perceptrons_with_both_options():
    data = np.random.default_rng(0).normal(size=(10, 64, 28, 28)).astype(np.float32)
    models = [MLP(nnx.Rngs(i)) for i in range(10)]
    ensemble = Ensemble.stack(models)
    own, shared = ensemble(data, in_axes=0), ensemble(data[0])
    assert own.shape == shared.shape == (10, 64, 10)
    np.testing.assert_allclose(own, [alone(m, x) for m, x in zip(models, data, strict=True)], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(shared, [alone(m, data[0]) for m in models], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(own[0].argmax(axis=-1), shared[0].argmax(axis=-1))
    assert np.isfinite(own).all()
