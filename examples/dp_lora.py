"""Fine-tune a small transformer with LoRA and differential privacy; the frozen base stays as it is, in one copy.

    python examples/dp_lora.py --steps 150 --rank 4

A transformer learns handwritten digits in public. Then it meets the digits of people who want their privacy, written
white on black and mirrored, and only low-rank adapters train, with DP-SGD.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from plurax.transforms.privacy import DPSGD

DELTA = 1e-4
WIDTH, HEADS = 64, 4


class Block(nnx.Module):
    """Attention and an MLP, each after a layer norm and with a residual connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return new features (batch, tokens, width)."""
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in jnp.split(self.qkv(self.norm1(x)), 3, axis=-1))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """A transformer over the eight rows of a digit."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Linear(8, WIDTH, rngs=rngs)
        self.position = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for pixels (batch, 8, 8) in -1 to 1."""
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=1))


def add_lora(model: nnx.Module, rank: int, rngs: nnx.Rngs) -> None:
    """Put an adapter around each dense layer of a model."""
    for _, module in list(nnx.iter_modules(model)):
        for name, layer in list(vars(module).items()):
            if isinstance(layer, nnx.Linear):
                adapted = nnx.LoRA(layer.in_features, rank, layer.out_features, base_module=layer, rngs=rngs)
                setattr(module, name, adapted)


def loss(model: Transformer, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def learn_in_public(model: Transformer, x: np.ndarray, y: np.ndarray, steps: int, seed: int) -> None:
    """Train all parameters without privacy."""
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Transformer, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> None:
        optimizer.update(model, nnx.grad(loss)(model, x, y))

    rng = np.random.default_rng(seed)
    for _ in tqdm(range(steps), desc="in public", unit="step"):
        chosen = rng.choice(len(x), 64, replace=False)
        step(model, optimizer, x[chosen], y[chosen])


def accuracy(model: Transformer, x: np.ndarray, y: np.ndarray) -> float:
    return float((model(x).argmax(-1) == y).mean())


def base_of(model: nnx.Module) -> list[jax.Array]:
    """Return the frozen arrays of a model with adapters."""
    rest = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    return jax.tree.leaves(nnx.to_pure_dict(rest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="private steps (default 150)")
    parser.add_argument("--public-steps", type=int, default=300, help="public steps (default 300)")
    parser.add_argument("--rank", type=int, default=4, help="rank of the adapters (default 4)")
    parser.add_argument("--epsilon", type=float, default=4.0, help="ε of the private training (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default 0; a published model needs a secret key)")
    options = parser.parse_args()
    console = Console()

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)
    labels = labels.astype(np.int32)
    x_public, x_rest, y_public, y_rest = train_test_split(images, labels, train_size=400, random_state=0)
    x_rest = -x_rest[:, :, ::-1]  # white on black, and mirrored
    x, x_test, y, y_test = train_test_split(x_rest, y_rest, test_size=360, random_state=0)

    model = Transformer(nnx.Rngs(options.seed))
    learn_in_public(model, x_public, y_public, options.public_steps, options.seed)
    before = accuracy(model, x_test, y_test)
    add_lora(model, options.rank, nnx.Rngs(options.seed + 1))
    base = base_of(model)

    dp = DPSGD(
        loss,
        optax.adam(1e-2),
        l2_clip_norm=0.5,
        target_epsilon=options.epsilon,
        target_delta=DELTA,
        num_examples=len(x),
        expected_batch_size=256,
        num_steps=options.steps,
    )
    state = dp.init(model, key=jax.random.key(options.seed), wrt=nnx.LoRAParam)
    state, _ = dp.fit(state, (x, y), sizes=(320,))
    console.print(state)

    trained = state.model
    moved = sum(bool((a != b).any()) for a, b in zip(base, base_of(trained), strict=True))
    copies = {a.unsafe_buffer_pointer() for a in base} ^ {a.unsafe_buffer_pointer() for a in base_of(trained)}
    adapters = [jax.tree.leaves(nnx.to_pure_dict(nnx.state(of, nnx.LoRAParam))) for of in (model, trained)]
    learned = sum(bool((a != b).any()) for a, b in zip(*adapters, strict=True))
    table = Table(title=f"{len(x)} private images, δ = {DELTA:g}")
    for head in ("", "before", "after"):
        table.add_column(head, justify="right" if head else "left")
    table.add_row("test accuracy", f"{before:.1%}", f"{accuracy(trained, x_test, y_test):.1%}")
    table.add_row("ε", "0", f"{dp.epsilon(state):.2f}")
    console.print(table)
    sizes = [sum(a.size for a in arrays) for arrays in (base, adapters[0])]
    console.print(
        f"Base: {sizes[0]:,} numbers in {len(base)} arrays; {moved} arrays changed, {len(copies)} were copied. "
        f"Adapters: {sizes[1]:,} numbers in {len(adapters[0])} arrays; {learned} changed."
    )


if __name__ == "__main__":
    main()
