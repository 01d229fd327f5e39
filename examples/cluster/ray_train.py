"""Start train.py with Ray Train: on this machine, or on the cluster of RAY_ADDRESS.

python examples/cluster/ray_train.py --workers 2 --out demo/cluster
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")  # Ray's trainer for JAX belongs to its second version

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer


def work(options: dict[str, Any]) -> None:
    """Train in one process; Ray has connected it with the others."""
    from train import train

    train(Path(options["out"]), options["members"], options["steps"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for the checkpoints, seen by all machines")
    parser.add_argument("--workers", type=int, default=2, help="number of processes (2)")
    parser.add_argument("--gpus", action="store_true", help="give each process a GPU")
    parser.add_argument("--members", type=int, default=8, help="number of members (8)")
    parser.add_argument("--steps", type=int, default=300, help="number of steps (300)")
    options = parser.parse_args()
    variables = {} if options.gpus else {"JAX_PLATFORMS": "cpu"}
    # The folder is copied to the workers, which import train.py from it.
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent), "env_vars": variables})
    out = str(options.out.resolve())
    trainer = JaxTrainer(
        work,
        train_loop_config={"out": out, "members": options.members, "steps": options.steps},
        # Ray connects processes only for TPUs and GPUs; with this, JAX_PLATFORMS decides, also for CPUs.
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        # If a process dies, all are started again, and go on from the newest checkpoint.
        run_config=RunConfig(name="plurax", storage_path=f"{out}/ray", failure_config=FailureConfig(max_failures=10)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
