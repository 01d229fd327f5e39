"""PyTorch's tutorial on per-sample gradients, with its network and batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from plurax.transforms import per_sample_grad, per_sample_norm

BATCH = 64


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 32, (3, 3), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), padding="VALID", rngs=rngs)
        self.fc1 = nnx.Linear(9216, 128, rngs=rngs)
        self.fc2 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.conv2(nnx.relu(self.conv1(x)))), (2, 2), (2, 2))
        return jax.nn.log_softmax(self.fc2(nnx.relu(self.fc1(x.reshape(len(x), -1)))))


def loss(model, images, labels):
    return -jnp.take_along_axis(model(images), labels[:, None], 1).mean()


def test_64_gradients_and_their_norms_are_those_of_the_loop():
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(BATCH, 28, 28, 1)).astype(np.float32), rng.integers(0, 10, BATCH)
    model = CNN(nnx.Rngs(0))
    # Unlike the rest of the suite, compile with optimization: running takes longer than compiling.
    optimized = {"xla_backend_optimization_level": 3}
    every = jax.jit(per_sample_grad(loss, batch_argnums=(1, 2)), compiler_options=optimized)(model, images, labels)
    every = jax.tree.map(np.asarray, every)
    assert every["fc1"]["kernel"][...].shape == (BATCH, 9216, 128)
    norms = jax.jit(per_sample_norm(loss, batch_argnums=(1, 2)))(model, images, labels)
    gradient_of_one = nnx.grad(loss)

    @nnx.jit
    def one(model, image, label):
        gradient = gradient_of_one(model, image, label)
        return gradient, optax.tree.norm(gradient)

    norms = np.asarray(norms)
    for i in range(BATCH):
        gradient, norm = one(model, images[i : i + 1], labels[i : i + 1])
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-3, atol=1e-5), every, gradient)
        np.testing.assert_allclose(norms[i], norm, rtol=1e-4)
