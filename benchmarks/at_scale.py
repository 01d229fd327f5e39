"""Measure ten thousand members: steps, memory and checkpoints, ours and Orbax's, and a fleet whose workers are killed.

python benchmarks/at_scale.py            measure, and render the pages
python benchmarks/at_scale.py --smoke    run small cases once; write nothing
"""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from _measure import Report, Tables, arguments
from flax import nnx

from plurax.ensemble import Batches, Ensemble, Trainer, load, load_member, save
from plurax.ensemble.fleet import fit_fleet

RATES = (1e-3, 1e-1)
POINTS = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)


class Tiny(nnx.Module):
    """Two dense layers with 33 parameters, which learn a product of two numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(2, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(nnx.tanh(self.hidden(x)))


def loss(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def make_trainer(size: int, which: list[int]) -> Trainer:
    rates = np.geomspace(*RATES, size)[which].tolist()
    return Trainer(loss, optax.adam, hyperparams={"learning_rate": rates}, strategy="vmap")


def members(which: list[int]) -> Ensemble[Any]:
    return Ensemble.create(Tiny, len(which), seed=which)


def batches(_: list[int]) -> Batches:
    return Batches((POINTS, POINTS.prod(1, keepdims=True)), 20, key=jax.random.key(0))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


def megabytes(directory: Path) -> float:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / 1e6


def one_machine(size: int, steps: int) -> dict[str, Any]:
    """Return a row for one process: called in a process of its own, since memory is its largest so far."""
    every = [*range(size)]
    create, ensemble = timed(lambda: members(every))
    trainer = make_trainer(size, every)
    state = trainer.init(ensemble)
    options: dict[str, Any] = {"steps": steps, "progress": False, "history_every": steps}
    trainer.fit(state, batches(every), **options)  # compiles
    fit, (after, _) = timed(lambda: trainer.fit(state, batches(every), **options))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "saved"
        write, _ = timed(lambda: save(path, after))
        read, _ = timed(lambda: load(path, state))
        one, _ = timed(lambda: load_member(path, size // 2, ensemble))
        size_of = megabytes(path)
    return {
        "members": size,
        "create (s)": create,
        "steps/s": steps / fit,
        "member-steps/s": size * steps / fit,
        "checkpoint (MB)": size_of,
        "write (s)": write,
        "read (s)": read,
        "read one member (s)": one,
        "largest memory (MB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def sizes(numbers: tuple[int, ...], steps: int) -> Tables:
    command = [sys.executable, __file__, "--one"]
    rows = []
    for size in numbers:
        done = subprocess.run([*command, f"{size}", f"{steps}"], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout))
    return rows, []


def by_orbax(tree: Any, path: Path, item: Any = None) -> Any:
    """Write a tree without `item`, else read those of its parts."""
    from orbax.checkpoint import PyTreeCheckpointer, args

    with PyTreeCheckpointer() as checkpointer:
        if item is None:
            return checkpointer.save(path, tree)
        return checkpointer.restore(path, args.PyTreeRestore(item, partial_restore=True))


def ways(size: int) -> dict[str, tuple[Any, Any, Any]]:
    """Return how members are written, read, and read alone: by this library, and by Orbax in two forms."""
    ensemble = members([*range(size)])
    stacked = ensemble.trainable
    each = {f"{i:06d}": jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(size)}
    middle = f"{size // 2:06d}"
    return {
        "save": (
            partial(save, state_or_ensemble=ensemble),
            partial(load, like=ensemble),
            partial(load_member, i=size // 2, like=ensemble),
        ),
        "Orbax, members stacked": (partial(by_orbax, stacked), lambda p: by_orbax(None, p, stacked), None),
        "Orbax, a subtree for each member": (
            partial(by_orbax, each),
            lambda p: by_orbax(None, p, each),
            lambda p: by_orbax(None, p, {middle: each[middle]}),
        ),
    }


def formats(size: int, few: int, flips: int) -> Tables:
    """Compare our checkpoints with those of Orbax: times of many members, and changed bits in the files of a few."""
    rows, of_few = [], ways(few)
    with tempfile.TemporaryDirectory() as directory:
        for name, (write, read, read_one) in ways(size).items():
            path, small = Path(directory) / name, Path(directory) / f"few, {name}"
            row = {f"{size} members": name, "write (s)": timed(partial(write, path))[0]}
            row |= {"read (s)": timed(partial(read, path))[0]}
            row |= {"read one member (s)": timed(partial(read_one, path))[0] if read_one else "all are read"}
            of_few[name][0](small)
            # Orbax writes thousands of lines about files that it cannot read, also when its objects are freed.
            with redirect_stderr(io.StringIO()):
                seen = noticed(small, of_few[name][1], flips)
                gc.collect()
            rows.append(row | {"MB": megabytes(path), f"changed bits that are noticed, {few} members": seen})
    return rows, []


def noticed(path: Path, read: Callable[[Path], Any], flips: int) -> str:
    """Return how many of some single bits that change in the files make reading raise."""
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
    lengths = np.array([file.stat().st_size for file in files], float)
    generator, raised = np.random.default_rng(0), 0
    logging.disable()
    for _ in range(flips):
        file = files[generator.choice(len(files), p=lengths / lengths.sum())]
        before = file.read_bytes()
        changed, place = bytearray(before), generator.integers(len(before))
        changed[place] ^= 1 << int(generator.integers(8))
        file.write_bytes(changed)
        try:
            read(path)
        except Exception:  # any error is a notice
            raised += 1
        file.write_bytes(before)
    logging.disable(logging.NOTSET)
    return f"{raised} of {flips}"


def killing(kills: int, killed: list[int], ended: threading.Event) -> None:
    """Kill workers of a fleet at random times; add them to a list."""
    generator = random.Random(0)
    while len(killed) < kills and not ended.wait(generator.uniform(2, 4)):
        working = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has ended
                name = path.read_text()
                if name.startswith("ray::train_group"):
                    working.append(int(path.parent.name))
        if working:
            killed.append(generator.choice(working))
            with suppress(ProcessLookupError):
                os.kill(killed[-1], signal.SIGKILL)


def fleets(size: int, group_size: int, steps: int, kills: int) -> Tables:
    """Train members in groups on four workers, undisturbed and with workers that are killed."""
    import ray

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    rows, found = [], []
    for number in (0, kills):
        with tempfile.TemporaryDirectory() as directory:
            ended, killed = threading.Event(), list[int]()
            killer = threading.Thread(target=killing, args=(number, killed, ended))
            killer.start()
            seconds, (ensemble, _) = timed(
                lambda directory=directory: fit_fleet(
                    partial(make_trainer, size),
                    members,
                    batches,
                    size=size,
                    group_size=group_size,
                    steps=steps,
                    checkpoint_every=max(1, steps // 10),
                    history_every=steps,
                    directory=directory,
                    progress=False,
                )
            )
            ended.set()
            killer.join()
            found.append(ensemble)
            row = {"members": size, "groups": -(-size // group_size), "workers": 4, "workers killed": len(killed)}
            row |= {"seconds": seconds, "member-steps/s": size * steps / seconds}
            rows.append(row | {"checkpoints (MB)": megabytes(Path(directory))})
    same = all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, found), strict=True))
    rows[1] |= {"equal to the bit": "yes" if same else "NO"}
    ray.shutdown()
    return rows, []


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one_machine(*map(int, sys.argv[2:4]))))
        return
    options = arguments(__doc__).parse_args()
    smoke = options.smoke
    numbers = (10,) if smoke else (100, 1000, 10_000)
    Report("at_scale", options, "flax", "optax", "orbax-checkpoint", "ray").measure(
        {
            "Members of 33 parameters in one process": lambda: sizes(numbers, 2 if smoke else 200),
            "Checkpoints and Orbax": lambda: formats(*((4, 2, 2) if smoke else (1000, 50, 60))),
            "A million member-steps in a fleet": lambda: fleets(*((6, 3, 20, 0) if smoke else (10_000, 1250, 100, 5))),
        }
    )


if __name__ == "__main__":
    main()
