"""The gradient forms of the models of the benchmarks are the listed ones, on each version of JAX."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from plurax.transforms import clipped_grad

ROOT = Path(__file__).parents[4]


@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that the benchmarks compare with
def test_forms_are_those_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    jobs = importlib.import_module("privacy").jobs(smoke=True)
    found = []
    for name, job in jobs.items():
        for method in ("ghost", "book_keeping"):
            fun = clipped_grad(job.loss, l2_clip_norm=1.0, batch_argnums=(1, 2), method=method)
            uses = fun.explain(job.params, job.x, job.y).uses
            found += [f"{name}, {method}: {use.parameter}: {use.rule}, at {use.operation}" for use in uses]
    for module in [
        name for name, x in sys.modules.items() if (getattr(x, "__file__", "") or "").startswith(f"{ROOT}/benchmarks")
    ]:
        del sys.modules[module]
    assert found == (Path(__file__).parent / "forms.txt").read_text().splitlines()
