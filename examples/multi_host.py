"""Train one ensemble over the devices of several processes, as on several hosts, and load the result in one process.

    python examples/multi_host.py --processes 2 --out demo

starts all processes on this machine, each with two CPU devices. On a cluster, start the same script once on each host,
with the address of the first: `--process 0 --processes 4 --coordinator host0:8476`, and so on. (On clusters that JAX
detects, such as Slurm or Cloud TPUs, `jax.distributed.initialize()` needs no arguments.)

Every process runs the same program on the same batches. It holds, trains and writes only its own members; the processes
communicate only for the checkpoint.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from plurax.ensemble import Ensemble, Trainer, load, load_member, metrics

BATCH = 64


class MLP(nnx.Module):
    """Two dense layers, for digits of 64 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 48, rngs=rngs)
        self.out = nnx.Linear(48, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for images (batch, 64)."""
        return self.out(nnx.relu(self.hidden(x)))


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images (1797, 64) in 0 to 1, and labels (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int32)


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches, the same in every process, since all use one seed."""
    images, labels = digits()
    generator = np.random.default_rng(0)
    for _ in range(steps):
        chosen = generator.choice(1440, BATCH, replace=False)
        yield images[chosen], labels[chosen]


def loss(model: MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def train(process: int, processes: int, coordinator: str, members: int, steps: int, out: Path) -> None:
    """Train the members of one process; every process calls this function."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(coordinator, processes, process)
    mesh = jax.make_mesh((jax.device_count(),), ("ensemble",))
    ensemble = Ensemble.create(MLP, members, seed=0, mesh=mesh)
    trainer = Trainer(loss, optax.adam(3e-3), strategy="vmap", mesh=mesh)
    state, history = trainer.fit(trainer.init(ensemble), batches(steps), checkpoint_dir=out, progress=process == 0)
    mine = sorted(
        {
            i
            for shard in state.ensemble.trainable["out"]["bias"].addressable_shards
            for i in range(*shard.index[0].indices(members))
        }
    )
    last = [row["loss"] for row in history[-members:]]
    print(
        f"process {process} of {processes}, {jax.local_device_count()} of {jax.device_count()} devices: trained and "
        f"wrote members {mine}; all losses {min(last):.3f} to {max(last):.3f}",
        flush=True,
    )


def read(members: int, out: Path) -> None:
    """Load the whole ensemble and a single member, in one process and on one device."""
    path = max(out.glob("step_*"))
    ensemble = load(path, jax.eval_shape(lambda: Ensemble.create(MLP, members, seed=0)))
    images, labels = digits()
    images, labels = images[1440:], labels[1440:]
    prediction = ensemble.predict(images, kind="classification")
    alone = load_member(path, members - 1, MLP(nnx.Rngs(0)))
    np.testing.assert_allclose(alone(images), ensemble(images)[-1], rtol=1e-5, atol=1e-5)
    each = metrics.accuracy(prediction.members, labels)
    print(
        f"read {path.name} in one process: accuracy {float(metrics.accuracy(prediction.mean, labels)):.1%} of the "
        f"ensemble, {float(each.min()):.1%} to {float(each.max()):.1%} of a member;\n"
        f"member {members - 1}, loaded alone, gives the same logits"
    )


def start(processes: int, arguments: list[str]) -> None:
    """Start all processes on this machine, and wait for them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    options = ["--processes", str(processes), "--coordinator", coordinator, *arguments]
    started = [
        subprocess.Popen([sys.executable, __file__, "--process", str(i), *options], stdout=subprocess.PIPE, text=True)
        for i in range(processes)
    ]
    for process in started:  # prints their reports in order, without the log of the connection
        print(*(line for line in process.stdout if line.startswith("process")), sep="", end="", flush=True)
    if any([process.wait() for process in started]):
        raise SystemExit("a process failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="number of processes (2)")
    parser.add_argument("--process", type=int, help="index of this process; by default, all are started here")
    parser.add_argument("--coordinator", help="address and port of the first process, such as host0:8476")
    parser.add_argument("--members", type=int, default=8, help="number of members (8)")
    parser.add_argument("--steps", type=int, default=200, help="number of steps (200)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="directory for the checkpoints (demo)")
    options = parser.parse_args()
    out = options.out / "multi_host"
    if options.process is not None:
        train(options.process, options.processes, options.coordinator, options.members, options.steps, out)
        return
    start(
        options.processes,
        ["--members", str(options.members), "--steps", str(options.steps), "--out", str(options.out)],
    )
    read(options.members, out)


if __name__ == "__main__":
    main()
