"""Train one ensemble by several processes: each has its devices, and loads its own part of the examples.

The files beside this one start it under Slurm, Open MPI, Kubeflow and Ray; docs/launchers.md explains them. On this
machine, without any of these,

    python examples/cluster/train.py --processes 2 --out demo/cluster

starts two processes. Start the same command again to go on from the newest checkpoint, as a cluster does after it has
taken machines away: it sends SIGTERM, and all processes write a checkpoint of the same step and end with code 143.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import grain
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from sklearn.datasets import load_digits

from plurax.ensemble import Ensemble, ProcessBatches, Trainer

BATCH = 64
# A process that dies ends all others after the first of these times, one that raises an error after the second.
TIMES = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 60}


class MLP(nnx.Module):
    """Two dense layers, for digits of 64 pixels."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 48, rngs=rngs)
        self.out = nnx.Linear(48, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits (batch, 10) for images (batch, 64)."""
        return self.out(nnx.relu(self.hidden(x)))


class Digits:
    """The examples; a large data set would be read from files here, one example at a time."""

    def __init__(self) -> None:
        self.images, self.labels = load_digits(return_X_y=True)

    def __repr__(self) -> str:
        return "Digits"  # Grain compares it when a run goes on

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        return (self.images[i] / 16).astype(np.float32), self.labels[i].astype(np.int32)


def loss(model: MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def connect(detection: str) -> None:
    """Connect this process with the others, if there are any."""
    if "JAX_NUM_PROCESSES" in os.environ:  # by Kubeflow, or by `start`; JAX reads JAX_COORDINATOR_ADDRESS itself
        count, index = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
        jax.distributed.initialize(num_processes=count, process_id=index, **TIMES)
    elif detection:
        jax.distributed.initialize(cluster_detection_method=detection, **TIMES)


def train(out: Path, members: int, steps: int) -> None:
    """Train in all processes, which are connected. Each calls this function with the same arguments."""
    by_process = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    devices = np.array(by_process).reshape(jax.process_count(), -1)
    # Members over the devices of a process, examples over the processes: only gradients go from one to another.
    mesh = Mesh(devices.T, ("ensemble", "data"))
    index, count = ProcessBatches.part(mesh)
    examples = grain.MapDataset.source(Digits()).shuffle(seed=0).repeat()
    loader = examples[index::count].batch(BATCH // count).to_iter_dataset()
    trainer = Trainer(loss, optax.adam(3e-3), mesh=mesh, strategy="vmap")
    state = trainer.init(Ensemble.create(MLP, members, seed=0, mesh=mesh))
    _, history = trainer.fit(state, ProcessBatches(loader, mesh), steps=steps, checkpoint_dir=out, checkpoint_every=100)
    last = [row["loss"] for row in history[-members:]]
    say = f"process {index} of {count} on {jax.local_device_count()} of {jax.device_count()} devices"
    print(f"{say}: {members} members, {steps} steps, losses {min(last):.3f} to {max(last):.3f}", flush=True)


def start(processes: int, arguments: list[str]) -> None:
    """Start processes on this machine with the variables that Kubeflow sets, and end with their code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    common = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    each = [os.environ | common | {"JAX_PROCESS_ID": str(i)} for i in range(processes)]
    started = [subprocess.Popen([sys.executable, __file__, *arguments], env=variables) for variables in each]
    codes = [process.wait() for process in started]
    raise SystemExit(next((code for code in codes if code), 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoints, seen by all machines")
    parser.add_argument("--members", type=int, default=8, help="number of members (8)")
    parser.add_argument("--steps", type=int, default=300, help="number of steps (300)")
    parser.add_argument("--detection", default="", help='how JAX finds the processes: "slurm", "ompi" or "mpi4py"')
    parser.add_argument("--processes", type=int, help="start so many processes on this machine")
    options = parser.parse_args()
    if options.processes:
        passed = ["--out", str(options.out), "--members", str(options.members), "--steps", str(options.steps)]
        start(options.processes, passed)
    connect(options.detection)
    train(options.out, options.members, options.steps)


if __name__ == "__main__":
    main()
