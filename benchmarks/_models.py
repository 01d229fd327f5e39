"""The models of the measured ensembles, in raw JAX and in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _measure import peer
from flax import nnx

from plurax.ensemble import Ensemble

torch = peer("torch")
LEARNING_RATE = 1e-3


class MLP(nnx.Module):
    """784-128-128-10, the model of PyTorch's tutorial on ensembling."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense1 = nnx.Linear(784, 128, rngs=rngs)
        self.dense2 = nnx.Linear(128, 128, rngs=rngs)
        self.dense3 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense3(nnx.relu(self.dense2(nnx.relu(self.dense1(x.reshape(len(x), -1))))))


class LeNet5(nnx.Module):
    """LeNet-5 on 32x32 images of one channel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 6, (5, 5), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(6, 16, (5, 5), padding="VALID", rngs=rngs)
        self.dense1 = nnx.Linear(400, 120, rngs=rngs)
        self.dense2 = nnx.Linear(120, 84, rngs=rngs)
        self.dense3 = nnx.Linear(84, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        return self.dense3(nnx.relu(self.dense2(nnx.relu(self.dense1(x)))))


class Transformer(nnx.Module):
    """Two blocks of width 64 with 4 heads, over 32 tokens from a vocabulary of 128, and mean pooling."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(128, 64, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))


class Block(nnx.Module):
    """Attention and an MLP, with layer normalization before each."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(64, rngs=rngs), nnx.LayerNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(nnx.gelu(self.wide(self.norm2(x))))


def cross_entropy(model: Callable[..., jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


class ByHand:
    """The same ensemble in raw JAX: parameters as stacked pytrees, `jax` and `optax` only."""

    def __init__(self, ensemble: Ensemble) -> None:
        self.size = len(ensemble)
        self.graphdef, _ = nnx.split(ensemble[0])
        self.params = ensemble.trainable
        self.optimizer = optax.adam(LEARNING_RATE)
        self.opt_state = jax.vmap(self.optimizer.init)(self.params)
        self.members = [jax.tree.map(lambda a, i=i: a[i], (self.params, self.opt_state)) for i in range(self.size)]
        self.apply_jit = jax.jit(self.apply)
        self.train_jit = jax.jit(self.train)

    def apply(self, params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(self.graphdef, params)(x)

    def train(self, params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(lambda x: self.apply(p, x), x, y))(params)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def stacked(self, fun: Callable[..., Any], strategy: str) -> Callable[..., Any]:
        """Return `fun(state, batch)`, mapped over members with stacked state."""

        def mapped(state: Any, batch: Any) -> Any:
            if strategy == "vmap":
                return jax.vmap(lambda s: fun(*s, *batch))(state)
            if strategy == "map":
                return jax.lax.map(lambda s: fun(*s, *batch), state)
            outs = [fun(*jax.tree.map(lambda a, i=i: a[i], state), *batch) for i in range(self.size)]
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

        return jax.jit(mapped)


def chained(step: Callable[[Any], tuple[Any, Any]], state: Any) -> Callable[[], Any]:
    """Return a function that calls `step` with the state of the previous call, and returns the rest of the result."""

    def call() -> Any:
        nonlocal state
        state, rest = step(state)
        return rest

    return call


def torch_candidates(kind: type, size: int, x: np.ndarray, y: np.ndarray) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the forward pass and the training step in PyTorch, each as a loop and with `torch.func.vmap`."""
    nn, func = torch.nn, torch.func

    def layers() -> Any:
        if kind is MLP:
            return nn.Sequential(
                nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
            )
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )

    models = [layers() for _ in range(size)]
    params, buffers = func.stack_module_state(models)
    base = layers().to("meta")
    images = torch.tensor(np.moveaxis(x, -1, 1) if x.ndim == 4 else x)
    labels = torch.tensor(y, dtype=torch.long)

    def apply(params: Any, buffers: Any) -> Any:
        return func.functional_call(base, (params, buffers), (images,))

    def loss(params: Any, buffers: Any) -> Any:
        return nn.functional.cross_entropy(apply(params, buffers), labels)

    optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE) for model in models]
    stacked = torch.optim.Adam(params.values(), lr=LEARNING_RATE)

    def train_loop() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    def train_vmap() -> None:
        grads = func.vmap(func.grad(loss), randomness="error")({k: v.detach() for k, v in params.items()}, buffers)
        for name, param in params.items():
            param.grad = grads[name]
        stacked.step()

    def forward_loop() -> Any:
        with torch.no_grad():
            return [model(images) for model in models]

    def forward_vmap() -> Any:
        with torch.no_grad():
            return func.vmap(apply)(params, buffers)

    return (
        {"torch loop": forward_loop, "torch.func.vmap": forward_vmap},
        {"torch loop": train_loop, "torch.func.vmap": train_vmap},
    )
