"""Write runs and files with one version of JAX, and read and continue them with another.

    python tests/exchange.py write FOLDER
    python tests/exchange.py read FOLDER

`smoke.py` does both with the versions of `.venv` and those it tests. Warnings are errors.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from plurax.ensemble import Ensemble, Trainer, load, load_member, save
from plurax.transforms.modules import load_params, save_params
from plurax.transforms.privacy import DPSGD

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
Y = np.arange(24) % 3
WEIGHTS = {"w": np.full((4, 3), 0.1, np.float32), "b": np.zeros(3, np.float32)}
KEY = 5


class Net(nnx.Module):
    """A network with running statistics and a random state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)  # a bias before the norm has no gradient but rounding
        self.second = nnx.Linear(8, 3, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def fitted(folder: Path, steps: int) -> tuple[Any, Any]:
    """Fit an ensemble, and privately a layer, up to this step; both runs resume what lies in the folder."""
    options: dict[str, Any] = {"progress": False, "checkpoint_every": 2}
    trainer = Trainer(
        lambda net, x, y: cross_entropy(net(x), y), optax.adam, hyperparams={"learning_rate": np.array([0.01, 0.02])}
    )
    start = trainer.init(Ensemble.create(Net, 2, seed=0))
    state, history = trainer.fit(start, [(X, Y)] * steps, checkpoint_dir=folder / "fit", **options)
    private = DPSGD(
        lambda w, x, y: cross_entropy(x @ w["w"] + w["b"], y),
        optax.sgd(0.1),
        l2_clip_norm=1.0,
        noise_multiplier=1.0,
        target_delta=1e-3,
        num_examples=24,
        expected_batch_size=6,
        num_steps=8,
    )
    own, _ = private.fit(
        private.init(WEIGHTS, key=jax.random.key(KEY)),
        (X, Y),
        steps=steps if steps < 8 else None,
        checkpoint_dir=folder / "private",
        **options,
    )
    assert [row["step"] for row in history][-1] == steps
    return state, own


def numbers(state: Any, own: Any) -> dict[str, Any]:
    """Return what both runs have learned."""
    return {"mean": np.asarray(state.ensemble.predict(X, kind="classification").mean), **own.model}


def write(folder: Path) -> None:
    """Write four steps of both runs, an ensemble, parameters, and the numbers after four and after eight steps."""
    state, own = fitted(folder, 4)
    save(folder / "ensemble", state.ensemble)
    save_params(folder / "member.safetensors", state.ensemble[0])
    np.savez(folder / "four.npz", **numbers(state, own))
    np.savez(folder / "eight.npz", **numbers(*fitted(folder / "whole", 8)))


def read(folder: Path) -> None:
    """Read and continue all of it, and compare it with the numbers of the version that wrote it."""
    ensemble = load(folder / "ensemble", Ensemble.create(Net, 2, seed=1))
    agree(ensemble.predict(X, kind="classification").mean, np.load(folder / "four.npz")["mean"])
    alone = load_member(folder / "ensemble", 0, ensemble), load_params(folder / "member.safetensors", ensemble[1])
    for member in alone:
        agree(member.first.kernel[...], ensemble[0].first.kernel[...], atol=0)
    found, expected = numbers(*fitted(folder, 8)), np.load(folder / "eight.npz")
    for name in expected:
        agree(found[name], expected[name])


def agree(found: Any, expected: Any, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "read"):
        sys.exit(__doc__)
    warnings.simplefilter("error")
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
    print(f"{sys.argv[1]}: jax {jax.__version__}")
