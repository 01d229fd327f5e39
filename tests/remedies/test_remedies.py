"""Each error that recommends something is raised, and what it recommends is run."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from ._registry import CASES, Fails, recommendations

for file in sorted(Path(__file__).parent.glob("of_*.py")):
    import_module(f".{file.stem}", __package__)

# Texts that look like a recommendation and are none, or that cannot be run here, and why.
_SEVERAL = "needs several processes"
NONE: dict[str, str] = {
    "Trainer.fit: got a {}, a data set that yields single examples; pass {}.": "needs PyTorch",
    "ProcessBatches: the axis `data` must give each process a part of equal length, but of its slices {}; order the "
    "devices of the mesh by their processes along `data`.": _SEVERAL,
    "ProcessBatches: the mesh has no device of this process; use one that has.": _SEVERAL,
    "ProcessBatches: the processes have {} batches; give each as many.": _SEVERAL,
    "ProcessBatches: there are no batches after {}, and they have no length, so other processes may have more; repeat "
    "them without an end and pass steps, or give them a length.": _SEVERAL,
    "ProcessBatches: this process has a first part of {}, but process {} one of {}; make them equal.": _SEVERAL,
    "{}: no process has all of member {}; shard all arrays alike along axis 0.": "needs several processes",
    "arrays spread over {} of {} processes; use one, or all.": "needs several processes",
    "the checkpoints in {} are renamed to step_*.earlier, and the run starts anew.": "says what has been done",
    "It is skipped, and will be renamed if a new one has its name.": "says what is done",
    "the adversary {}; a canary {}, put in or left out at random": "is the threat model of an audit",
    ", inside the backward pass": "is a part of a report",
    "DPSGD.from_plan: config has no noise yet; pass config.calibrate(epsilon=..., delta=...).": "needs jax-privacy 2.2",
    "compile_for: {} needs the TPU compiler; install it with pip install 'plurax[tpu]'.": "needs that compiler",
}


@pytest.mark.parametrize("name", CASES)
def test_what_an_error_recommends_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    fails = Fails(case.texts)
    case.run(fails)
    assert not fails.left


def test_each_recommendation_has_a_case() -> None:
    found = recommendations()
    known = {text for case in CASES.values() for text in case.texts}
    assert not known & set(NONE)
    assert not {text: places for text, places in found.items() if text not in known and text not in NONE}
    assert not [text for text in [*known, *NONE] if text not in found]
