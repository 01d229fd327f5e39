"""PyTorch's tutorial on model ensembling, written with Plurax.

    python examples/torch_ensembling.py --members 10 --batches 20

Ten networks of one architecture are evaluated as one ensemble, each on its own batch or all on the same batch. Where
PyTorch needs `stack_module_state`, `functional_call` and `torch.func.vmap`, Plurax needs `Ensemble.stack` and a call.
If PyTorch is installed, the results are compared with those of PyTorch for the same weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from plurax.ensemble import Ensemble
from plurax.transforms import vmap

BATCH = 64


class SimpleMLP(nnx.Module):
    """784-128-128-10."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(784, 128, rngs=rngs)
        self.fc2 = nnx.Linear(128, 128, rngs=rngs)
        self.fc3 = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for images (batch, 28, 28)."""
        x = x.reshape(len(x), -1)
        return self.fc3(nnx.relu(self.fc2(nnx.relu(self.fc1(x)))))


def of_torch(models: list[SimpleMLP], images: np.ndarray) -> np.ndarray:
    """Evaluate the same weights in PyTorch, as the tutorial does; `images` has one batch for each model."""
    import torch
    from torch import func, nn

    def copy(model: SimpleMLP) -> Any:
        twin = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )
        for layer, source in zip((twin[1], twin[3], twin[5]), (model.fc1, model.fc2, model.fc3), strict=True):
            layer.weight.data = torch.tensor(np.asarray(source.kernel[...].T))
            layer.bias.data = torch.tensor(np.asarray(source.bias[...]))
        return twin

    twins = [copy(model) for model in models]
    params, buffers = func.stack_module_state(twins)

    def functional(params: Any, buffers: Any, x: Any) -> Any:
        return func.functional_call(twins[0], (params, buffers), (x,))

    with torch.no_grad():
        return func.vmap(functional)(params, buffers, torch.tensor(images)).numpy()


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the time of the fastest of twenty calls, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--batches", type=int, default=20, help="number of batches of data, at least --members")
    options = parser.parse_args()
    if not 1 <= options.members <= options.batches:
        parser.error("--members must be at least 1, and at most --batches")
    data = np.random.default_rng(0).normal(size=(options.batches, BATCH, 28, 28)).astype(np.float32)

    models = [SimpleMLP(nnx.Rngs(i)) for i in range(options.members)]
    one = jax.jit(lambda model, x: model(x))
    ensemble = Ensemble.stack(models)
    print(f"{ensemble}, batches of {BATCH}")

    own = jnp.asarray(data[: options.members])
    predictions = ensemble(own, in_axes=0)
    loop = [one(model, x) for model, x in zip(models, own, strict=True)]
    np.testing.assert_allclose(predictions, loop, rtol=1e-4, atol=1e-5)
    print(f"\n1. A batch for each member: ensemble(batches, in_axes=0) -> {predictions.shape}, equal to the loop")

    shared = jnp.asarray(data[0])
    predictions_same = ensemble(shared)
    np.testing.assert_allclose(predictions_same, [one(model, shared) for model in models], rtol=1e-4, atol=1e-5)
    print(f"2. One batch for all:       ensemble(batch) -> {predictions_same.shape}, equal to the loop")
    np.testing.assert_array_equal(jax.jit(vmap(ensemble, in_axes=None))(shared).shape, predictions_same.shape)
    print("   The same with the transform: vmap(ensemble, in_axes=None)(batch)")

    if importlib.util.find_spec("torch") is not None:
        np.testing.assert_allclose(predictions, of_torch(models, np.asarray(own)), rtol=1e-3, atol=1e-4)
        print("3. PyTorch gives the same results with the same weights.")
    else:
        print("3. PyTorch is not installed, so its results are not compared.")

    print(
        f"\nmilliseconds: ensemble {milliseconds(lambda: ensemble(shared)):.2f}, "
        f"loop of jitted members {milliseconds(lambda: [one(model, shared) for model in models]):.2f}"
    )


if __name__ == "__main__":
    main()
