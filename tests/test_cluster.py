"""The scripts of examples/cluster, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ._processes import Process, free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]  # `ray.init` would join the cluster of another test

CLUSTER = Path(__file__).parents[1] / "examples" / "cluster"
STEPS = 400


def started(script: str, *options: str, **variables: str) -> subprocess.Popen[str]:
    return Process(
        [sys.executable, str(CLUSTER / script), *options], env={**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    )


def ended(*processes: subprocess.Popen[str]) -> str:
    """Return what processes print that end with code 0."""
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return "".join(out for out, _ in outputs)


def losses(shown: str) -> list[str]:
    """Return what each process printed of its losses."""
    return [line.partition("losses ")[2] for line in shown.splitlines() if "losses " in line]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the losses that two processes of this machine print."""
    out = tmp_path_factory.mktemp("local")
    first, second = losses(ended(started("train.py", "--processes", "2", "--steps", f"{STEPS}", "--out", str(out))))
    assert first == second
    assert {path.name for path in out.iterdir()} == {f"step_{STEPS - 100:08d}", f"step_{STEPS:08d}"}
    return first


def test_as_slurm_starts_it(tmp_path: Path, expected: str) -> None:
    # JAX chooses the port by the number of the job.
    job = {"SLURM_JOB_ID": f"{(free_port() + 1) % 4096}", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    options = ("--detection", "slurm", "--steps", f"{STEPS}", "--out", str(tmp_path))
    each = [started("train.py", *options, **job, SLURM_PROCID=f"{i}", SLURM_LOCALID=f"{i}") for i in range(2)]
    assert losses(ended(*each)) == [expected, expected]


def test_after_sigterm_the_same_command_goes_on(tmp_path: Path, expected: str) -> None:
    options = ("--processes", "2", "--out", str(tmp_path))
    starter = started("train.py", *options, "--steps", "100000")
    wait_for(tmp_path / "step_00000100")
    first = children(starter.pid)[0]
    os.kill(first, signal.SIGTERM)
    starter.communicate(timeout=60)
    assert starter.returncode == 143
    step = int(max(tmp_path.glob("step_*")).name[5:])
    shown = losses(ended(started("train.py", *options, "--steps", f"{step + 10}")))
    assert len(shown) == 2
    assert shown[0] == shown[1]


def test_ray_train_starts_all_again_after_a_kill(tmp_path: Path, expected: str) -> None:
    starter = started("ray_train.py", "--steps", f"{STEPS}", "--out", str(tmp_path))
    wait_for(tmp_path / "step_00000100")
    workers = [pid for pid, name in named().items() if name.startswith("ray::RayTrainWorker")]
    os.kill(workers[-1], signal.SIGKILL)
    assert f"losses {expected}" in ended(starter)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def children(parent: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def named() -> dict[int, str]:
    """Return the names of all processes."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_text().replace("\0", " ")
        except OSError:  # it has ended
            continue
    return found
