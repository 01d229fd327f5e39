"""Test an installation: the wheel alone, and with each extra alone, in new environments.

    python tests/try_release.py [--python INTERPRETER]... dist

Run by `make release`. It needs a network, and takes minutes.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Features that need an extra: code that runs with the extra, and without it raises an error that names the extra.
PRELUDE = """
import tempfile
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from plurax.ensemble import TensorBoard, plots
from plurax.transforms import clipped_grad, hessian, jacobian
from plurax.transforms.modules import load_params, save_params
from plurax.transforms.privacy import DPSGD
from plurax.transforms.program import profile, trace_diff
model, folder = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tempfile.mkdtemp()
"""
USES = {
    "privacy": {
        "DPSGD": """
dp = DPSGD(lambda w, x: jnp.mean(x @ w), optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=1.0, target_delta=1e-3,
           num_examples=100, expected_batch_size=10, num_steps=1, accountant='rdp')
state, _ = dp.fit(dp.init(jnp.zeros(3), key=jax.random.key(0)), (jnp.ones((100, 3)),), progress=False)
assert 0 < dp.epsilon(state) < 10""",
        "clipped_grad.sensitivity": "assert clipped_grad(jnp.vdot, l2_clip_norm=2.0).sensitivity() == 2",
    },
    "curvature": {
        "laplace": "from plurax.transforms.curvature import laplace; "
        "laplace(lambda w, x: x @ w, lambda o, y: ((o - y) ** 2).mean(), jnp.ones(2), (jnp.ones((3, 2)), jnp.ones(3)), "
        "structure='ggn_lanczos', rank=1)",
    },
    "export": {
        "load_exported": "from plurax.ensemble import Ensemble, export, load_exported; "
        "export(Ensemble.stack([model]), folder + '/exported', jnp.ones((1, 2)), kind='classification'); "
        "assert load_exported(folder + '/exported')(jnp.ones((5, 2)))['mean'].shape == (5, 3)",
    },
    "ray": {
        "fit_fleet": """
from plurax.ensemble import Ensemble, Trainer
from plurax.ensemble.fleet import fit_fleet
found, _ = fit_fleet(
    lambda which: Trainer(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1)),
    lambda which: Ensemble.create(lambda rngs: nnx.Linear(2, 3, rngs=rngs), len(which), seed=which),
    [jnp.ones((1, 2))], size=2, group_size=1, directory=folder + '/fleet', workers=1, progress=False)
assert len(found) == 2""",
    },
    "sklearn": {
        "EnsembleClassifier": "import sys; sys.modules.pop('plurax.ensemble.sklearn', None); "
        "from plurax.ensemble.sklearn import EnsembleClassifier; "
        "EnsembleClassifier(members=2, hidden=(4,), epochs=1).fit([[0.0], [1.0]], [0, 1]).predict([[0.5]])",
    },
    "files": {
        "save_params": "save_params(folder + '/model', model)",
        "load_params": """
from pathlib import Path
path = Path(folder, 'model')
try:
    save_params(path, model)
except ModuleNotFoundError:
    path.touch()
load_params(path, model)""",
    },
    "plot": {
        "reliability": "plots.reliability(jnp.array([[0.8, 0.2]]), jnp.array([0]))",
        "entropies": "plots.entropies({'a': jnp.array([0.8, 0.2])})",
        "disagreement": "plots.disagreement(jnp.array([[[0.8, 0.2]], [[0.1, 0.9]]]))",
        "learning_curves": """
for by in (None, 'rate'):
    plots.learning_curves([{'step': 1, 'member': i, 'loss': 1.0, 'rate': i} for i in range(2)], by=by)""",
        "Profile.plot": "profile(jnp.sin, jnp.ones(3), mode='eager', repeats=1).plot()",
        "TraceDiff.plot_counts": "trace_diff(jnp.sin, jnp.cos, jnp.ones(3), repeats=2).plot_counts()",
        "TraceDiff.plot_durations": "trace_diff(jnp.sin, jnp.cos, jnp.ones(3), repeats=2).plot_durations()",
    },
    "tensorboard": {"TensorBoard": "TensorBoard(folder).close()"},
}
# Features that need no extra.
ALONE = {
    "sparse jacobian": "assert jacobian(jnp.sin, sparsity='auto')(jnp.ones(3)).nse == 3",
    "jacobian of a pattern": "assert jacobian(jnp.sin, sparsity=np.eye(3, dtype=bool))(jnp.ones(3)).nse == 3",
    "sparse hessian": "assert hessian(lambda x: (x**3).sum(), sparsity='auto')(jnp.ones(3)).nse == 3",
}


# Run some codes and print each error, or an empty string.
RUN = """
import json, sys
said = {}
for name, code in json.loads(sys.stdin.read()).items():
    try:
        exec(code, {"__name__": "__main__"})
        said[name] = ""
    except Exception as error:  # any error that a user would see
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def run(python: Path, codes: dict[str, str]) -> dict[str, str]:
    """Run codes in an environment, outside the tree; return each error, or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-I", "-c", RUN]
        done = subprocess.run(command, input=json.dumps(codes), cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def faults(python: Path, installed: str | None) -> list[str]:
    """Return the failures in an environment with one extra, or with none."""
    alone = {name: PRELUDE + code for name, code in ALONE.items()} if installed is None else {}
    found = [f"without an extra, {name} fails: {said}" for name, said in run(python, alone).items() if said]
    for extra, uses in USES.items():
        if installed not in (None, extra):
            continue
        for name, said in run(python, {name: PRELUDE + code for name, code in uses.items()}).items():
            if installed is None and f"pip install 'plurax[{extra}]'" not in said:
                found.append(f"without the extra {extra}, {name} does not name it: {said}")
            elif installed and said:
                found.append(f"with the extra {extra}, {name} fails: {said}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path, help="where the wheel and the sdist are")
    parser.add_argument("--python", action="append", help="an interpreter to try; several times for several")
    options = parser.parse_args()
    (wheel,), (sdist,) = options.dist.resolve().glob("*.whl"), options.dist.resolve().glob("*.tar.gz")
    first_example = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    found = []
    for interpreter in options.python or [sys.executable]:
        for what, extra in [(sdist, None), (wheel, None), *((wheel, extra) for extra in [*USES, "examples"])]:
            name = f"{what.name}[{extra}]" if extra else what.name
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run([interpreter, "-m", "venv", folder], check=True)
                python = Path(folder, "bin/python")
                quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
                subprocess.run([python, *quiet, f"{what}[{extra}]" if extra else what], check=True)
                subprocess.run([python, "-m", "pip", "check", "--disable-pip-version-check"], check=True)
                wrong = faults(python, extra)
                if extra is None:
                    said = run(python, {"the first example": first_example})["the first example"]
                    wrong += [f"the README's first example fails: {said}"] if said else []
                if extra == "examples":
                    wrong += [
                        f"{script.name} does not start"
                        for script in sorted(ROOT.glob("examples/[!_]*.py"))
                        if subprocess.run([python, script, "--help"], stdout=subprocess.DEVNULL, check=False).returncode
                    ]
            print(f"{interpreter}, {name}: {'; '.join(wrong) or 'good'}", flush=True)
            found += wrong
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
