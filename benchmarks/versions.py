"""Compare the speed on other versions of JAX with that on this one.

python benchmarks/versions.py --other PYTHON ...    measure with this and other interpreters, and render the page
python benchmarks/versions.py --one                 measure with this interpreter; print milliseconds as JSON
python benchmarks/versions.py --smoke               run small cases once, with this interpreter; write nothing
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _short_steps
import jax
import jax.numpy as jnp
import numpy as np
import optax
import privacy
from _measure import Report, arguments, interleaved, spread
from _models import LEARNING_RATE, ByHand, LeNet5, Transformer, cross_entropy
from _scaling import Small, data
from tqdm import tqdm

from plurax.ensemble import Ensemble, Trainer
from plurax.transforms import clipped_grad

HERE = Path(__file__).parent
Times = dict[str, dict[str, float]]  # milliseconds of each row: ours, and in plain JAX


def calls(smoke: bool) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return what is timed: ours, and in plain JAX the ordinary gradient, or the training step by hand."""
    generator = np.random.default_rng(0)
    jobs = {
        "MLP 784-256-256-10, 256 examples": privacy.mlp(generator, 256, (784, 256, 256, 10)),
        "CNN, 32 images of 28 by 28": privacy.cnn(generator, 32, 28),
        "LSTM of 128, 64 series of 32 steps": privacy.lstm(generator, 64, 32, 32, 128),
        "GPT of two blocks of 128, 16 sequences of 64": privacy.gpt(16, 64, 2, 128, 1000),
    }
    found = {}
    for name, job in list(jobs.items())[: 1 if smoke else None]:
        args = (job.params, job.x, job.y)
        ours = clipped_grad(job.loss, l2_clip_norm=privacy.CLIP, batch_argnums=(1, 2))
        found[f"clipped_grad: {name}"] = {
            "ours": privacy.compiled(ours, *args).call,
            "plain JAX": privacy.compiled(jax.grad(job.loss), *args).call,
        }
    tokens = jnp.asarray(generator.integers(0, 128, (16, 32)).astype(np.int32)), data((16,), 16)[1]
    found["fit: ten MLPs 16-16-10, 200 steps"] = fits(Small, 10, data((16,), 32), 200)
    if not smoke:
        found["fit: four LeNet-5, 5 steps"] = fits(LeNet5, 4, data((32, 32, 1), 32), 5)
        found["fit: four transformers, 5 steps"] = fits(Transformer, 4, tokens, 5)
    return found


def fits(kind: type, size: int, batch: Any, steps: int) -> dict[str, Callable[[], Any]]:
    ensemble = Ensemble.create(kind, size, seed=0)
    trainer, hand = Trainer(cross_entropy, optax.adam(LEARNING_RATE), strategy="vmap"), ByHand(ensemble)
    state, step = trainer.init(ensemble), _short_steps.by_hand(hand.train)

    def by_hand() -> Any:
        params, opt_state = jax.tree.map(jnp.copy, (hand.params, hand.opt_state))
        for _ in range(steps):
            params, opt_state, losses = step(params, opt_state, *batch)
        return params, losses

    def ours() -> Any:
        return trainer.fit(state, (batch for _ in range(steps)), steps=steps, progress=False)[0]

    return {"ours": ours, "plain JAX": by_hand}


def one(smoke: bool) -> Times:
    """Measure with this interpreter."""
    times: Times = {}
    for row, ways in calls(smoke).items():
        found = interleaved(ways, rounds=1 if smoke else 7, seconds=0 if smoke else 0.1)
        times[row] = {way: found[way]["ms"]["median"] for way in ways}
    first = {way: _short_steps.in_new_process(name, 10) for way, name in (("ours", "ours"), ("plain JAX", "hand"))}
    times["first step of ten MLPs, in a new process"] = {way: seconds * 1e3 for way, seconds in first.items()}
    demo = [str(HERE.parent / "examples" / "ensemble_digits.py"), *(["--steps", "2"] if smoke else [])]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run([sys.executable, *demo, "--out", folder], stdout=subprocess.DEVNULL, check=True)
        times["make demo"] = {"ours": (time.perf_counter() - start) * 1e3}
    return times


def in_turn(pythons: list[str], runs: int, smoke: bool) -> dict[str, list[Times]]:
    """Measure with each interpreter in turn; return the runs by version of JAX."""
    found: dict[str, list[Times]] = {}
    command = [str(HERE / "versions.py"), "--one", *(["--smoke"] if smoke else [])]
    for python in tqdm(pythons * runs, unit="run", leave=False):
        done = subprocess.run([python, *command], stdout=subprocess.PIPE, text=True, check=True)
        version, times = json.loads(done.stdout.splitlines()[-1])
        found.setdefault(version, []).append(times)
    return found


def ratio(mine: list[Times], theirs: list[Times], row: str, way: str) -> dict[str, Any] | None:
    """Return the ratio of times in runs that follow each other."""
    if way not in mine[0][row]:
        return None
    return spread(a[row][way] / b[row][way] for a, b in zip(mine, theirs, strict=True))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--other", nargs="+", default=[], metavar="PYTHON", help="interpreters with another JAX")
    parser.add_argument("--one", action="store_true", help="measure this version once, and print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps([jax.__version__, one(options.smoke)]))
        return
    if not (options.other or options.smoke):
        print("nothing to compare with: give --other an interpreter whose environment has another JAX")
        return
    report = Report("versions", options, "flax", "optax")
    found = in_turn([sys.executable, *options.other], 1 if options.smoke else 3, options.smoke)
    here = found.pop(jax.__version__)
    rows = [
        {"": row, f"jax {jax.__version__} (ms)": spread(times[row]["ours"] for times in here)}
        | {
            f"{version} / {jax.__version__}, {way}": ratio(times, here, row, way)
            for version, times in found.items()
            for way in ("ours", "plain JAX")
        }
        for row in here[0]
    ]
    report.add("Time on other versions of JAX", rows)
    report.publish()


if __name__ == "__main__":
    main()
