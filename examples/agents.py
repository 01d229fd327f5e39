"""Train sixteen reinforcement-learning agents to balance a pole, in parallel, as one program.

    python examples/agents.py --agents 16 --iterations 80 --out demo

The environment, the cart and pole of Barto, Sutton and Anderson (1983), is a few lines of JAX, so an agent and its
environment can be mapped like any function: `vmap(improve)` takes an `Ensemble` as an argument, passes each agent to
`improve` as an ordinary module, and returns an `Ensemble`. Each agent has its own weights, learning rate and random
keys. The script compares the time of all agents in parallel with one after another, and draws `agents.png`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl

mpl.use("Agg")  # draws to a file; needs no window

import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from jax import lax
from rich.console import Console
from tqdm import tqdm

from plurax.ensemble import Ensemble
from plurax.transforms import grad, vmap

STEPS, EPISODES = 200, 16


class Agent(nnx.Module):
    """4-32-2: from position, velocity, angle and angular velocity to the logits of a push to the left or the right."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 32, rngs=rngs)
        self.out = nnx.Linear(32, 2, kernel_init=nnx.initializers.zeros_init(), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (..., 2) for states of the environment (..., 4)."""
        return self.out(nnx.tanh(self.hidden(x)))


def move(world: jax.Array, push: jax.Array) -> jax.Array:
    """Return the state of cart and pole a fiftieth of a second later."""
    _, speed, angle, turn = world
    force = jnp.where(push == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    pulled = (force + 0.05 * turn**2 * sine) / 1.1
    turning = (9.8 * sine - cosine * pulled) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    speeding = pulled - 0.05 * turning * cosine / 1.1
    return world + 0.02 * jnp.stack([speed, speeding, turn, turning])


def play(agent: Agent, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Play an episode; return the states (steps, 4), the pushes (steps,), and whether the pole is still up (steps,)."""
    start, *keys = jax.random.split(key, 1 + STEPS)

    def step(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> Any:
        world, stands = carry
        push = jax.random.categorical(key, agent(world))
        after = move(world, push)
        stands &= (jnp.abs(after[0]) < 2.4) & (jnp.abs(after[2]) < np.radians(12))
        return (jnp.where(stands, after, world), stands), (world, push, stands)

    first = jax.random.uniform(start, (4,), minval=-0.05, maxval=0.05), jnp.array(True)
    return lax.scan(step, first, jnp.stack(keys))[1]


def improve(agent: Agent, opt_state: Any, rate: jax.Array, key: jax.Array) -> tuple[Agent, Any, jax.Array]:
    """Play some episodes and take one policy-gradient step (Williams 1992), with the mean return as a baseline."""
    worlds, pushes, stands = jax.vmap(lambda key: play(agent, key))(jax.random.split(key, EPISODES))
    left = jnp.cumsum(stands[:, ::-1], axis=1)[:, ::-1].astype(float)  # the remaining steps with the pole up
    advantages = left - left.mean(axis=0)
    advantages /= advantages.std() + 1e-6

    def objective(agent: Agent) -> jax.Array:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(agent(worlds)), pushes[..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * advantages * stands) / stands.sum()

    gradients = grad(objective)(agent)
    updates, opt_state = optax.scale_by_adam().update(gradients, opt_state)
    nnx.update(agent, optax.apply_updates(nnx.state(agent, nnx.Param), jax.tree.map(lambda u: -rate * u, updates)))
    return agent, opt_state, stands.sum(axis=1).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=16, help="number of agents (default 16)")
    parser.add_argument("--iterations", type=int, default=80, help="training iterations (default 80)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the picture")
    options = parser.parse_args()
    for name in ("agents", "iterations"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, but got {getattr(options, name)}")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    agents = Ensemble.create(Agent, options.agents, seed=0)
    rates = jnp.geomspace(3e-3, 3e-2, options.agents)
    opt_state = vmap(lambda agent: optax.scale_by_adam().init(nnx.state(agent, nnx.Param)))(agents)
    learn = jax.jit(vmap(improve))
    learn_alone = jax.jit(improve_one)
    keys = jax.random.split(jax.random.key(1), (options.iterations, options.agents))

    jax.block_until_ready(learn(agents, opt_state, rates, keys[0])[2])  # compiles
    start, curves = time.perf_counter(), []
    for i in tqdm(range(options.iterations), unit="iteration"):
        agents, opt_state, length = learn(agents, opt_state, rates, keys[i])
        curves.append(np.asarray(length))
    together = (time.perf_counter() - start) / options.iterations

    graph, params = nnx.split(agents[0])
    state = jax.tree.map(lambda x: x[0], opt_state)
    jax.block_until_ready(learn_alone(graph, params, state, rates[0], keys[0, 0]))
    start = time.perf_counter()
    for _ in range(3):
        jax.block_until_ready(learn_alone(graph, params, state, rates[0], keys[0, 0]))
    alone = (time.perf_counter() - start) / 3
    lengths = np.array(curves)
    last = lengths[-10:].mean(axis=0)
    console.print(
        f"{options.agents} agents in parallel: {1e3 * together:.0f} ms per iteration; one agent: {1e3 * alone:.0f} ms. "
        f"Training them one after another takes {options.agents * alone / together:.1f} times as long."
    )
    console.print(
        f"Episode length at the end: {np.median(last):.0f} of {STEPS} steps (median of the agents), {last.max():.0f} "
        f"for the best agent, with learning rate {float(rates[last.argmax()]):.3f}."
    )
    picture = options.out / "agents.png"
    draw(picture, lengths, np.asarray(rates))
    console.print(f"Picture: {picture}")


def improve_one(graph: Any, params: Any, *args: Any) -> Any:
    """Apply `improve` to a single agent, given as graph definition and parameters."""
    agent, opt_state, length = improve(nnx.merge(graph, params), *args)
    return nnx.state(agent, nnx.Param), opt_state, length


def draw(path: Path, lengths: np.ndarray, rates: np.ndarray) -> None:
    """Plot the episode length of each agent during training."""
    figure, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    colors = mpl.colormaps["viridis"](np.linspace(0, 0.95, len(rates)))
    for curve, color in zip(lengths.T, colors, strict=True):
        ax.plot(curve, color=color, linewidth=1)
    ax.plot(np.median(lengths, axis=1), color="black", linewidth=2.5, label="median of the agents")
    ax.axhline(STEPS, color="0.5", linestyle=":", linewidth=1)
    scale = mpl.cm.ScalarMappable(mpl.colors.LogNorm(rates.min(), max(rates.max(), 1.01 * rates.min())), "viridis")
    figure.colorbar(scale, ax=ax, label="learning rate")
    ax.set(xlabel="training iteration", ylabel=f"steps until the pole falls (at most {STEPS})")
    ax.set_title("Episode length during training")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
