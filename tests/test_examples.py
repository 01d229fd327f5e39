"""Every example and every benchmark runs, at a small size."""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from plurax.transforms.program import load_exported

from ._files import entries_of

ROOT = Path(__file__).parents[1]


def run(script: str, *options: str) -> str:
    """Run a script as a user would, in a separate process; return its output."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *options], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


OTHERS = {
    "examples/ensemble_digits.py",
    "examples/per_sample_gradients.py",
    "examples/dp_sgd_digits.py",
    "examples/dp_audit_digits.py",
    "examples/dp_lora.py",
    "examples/multi_host.py",
    "examples/serve.py",
    "examples/sharing_tables.py",
    "examples/agents.py",
    "examples/control_flow.py",
    "examples/gradient_statistics.py",
    "examples/influence_digits.py",
    "examples/laplace_digits.py",
    "examples/laplacian.py",
    "examples/maxwell.py",
    "examples/profile_resnet.py",
    "examples/stiff_brusselator.py",
    "examples/sweep_digits.py",
    "examples/uncertainty_digits.py",
    "benchmarks/render.py",
}  # these write files
SMALL = {
    "examples/vmap_tour.py": (),
    "examples/forward_mode.py": (),
    "examples/static_graph_tour.py": ("--steps", "3", "--entries", "3", "--rows", "3", "--side", "3", "--rounds", "1"),
    "examples/cells_tour.py": (),
    "examples/custom_rules.py": ("--slices", "2", "--batch", "1", "--planets", "3", "--size", "4", "--rounds", "1"),
    "examples/jacobians_hessians.py": (),
    "examples/channels_last.py": ("--images", "1", "--side", "8", "--layers", "2", "--rounds", "1"),
    "examples/tabm_csv.py": ("--members", "2", "--seeds", "1", "--epochs", "2", "--width", "8"),
    "examples/torch_ensembling.py": ("--members", "2", "--batches", "3"),
    "examples/from_torch.py": ("--file", str(ROOT / "examples/from_torch.safetensors")),
    "benchmarks/ensemble.py": ("--smoke",),
    "benchmarks/jacobian.py": ("--smoke",),
    "benchmarks/privacy.py": ("--smoke",),
    "benchmarks/dpsgd.py": ("--smoke",),
    "benchmarks/gradient_statistics.py": ("--smoke",),
    "benchmarks/curvature.py": ("--smoke",),
    "benchmarks/long_runs.py": ("--smoke",),
    "benchmarks/at_scale.py": ("--smoke",),
    "benchmarks/sharing.py": ("--smoke",),
    "benchmarks/sparse.py": ("--smoke",),
    "benchmarks/program.py": ("--smoke",),
    "benchmarks/compile.py": ("--smoke",),
    "benchmarks/convolutions.py": ("--smoke",),
    "benchmarks/versions.py": ("--smoke",),
}


@pytest.mark.slow
def test_the_gradients_of_each_sample(tmp_path):
    shown = run("examples/per_sample_gradients.py", "--batch", "2", "--steps", "20", "--out", str(tmp_path / "out"))
    assert "['dense1']['kernel']   outer product  inner products between positions: 1 per" in shown
    assert (tmp_path / "out" / "per_sample_gradients.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_what_gradients_tell(tmp_path):
    small = ("--steps", "40", "--batch", "16", "--each", "5", "--points", "30", "--seconds", "1")
    shown = run("examples/gradient_statistics.py", *small, "--out", str(tmp_path / "out"))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert all(float(row[2]) > 0 for row in rows[:4])  # a noise; the estimate of a signal may be negative
    one, two = (float(x) for x in re.findall(r"digits?: (-?[0-9.]+[0-9])", " ".join(shown.split())))
    assert one > two + 0.2
    assert [row[0] for row in rows[4:]] == ["Adam", "natural gradient"]
    assert all(float(row[2]) < 0.5 for row in rows[4:])  # 1 before the first step
    assert (tmp_path / "out" / "gradient_statistics.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_digits_are_learned_in_private(tmp_path):
    options = ("--seeds", "2", "--steps", "20", "--looks", "2", "--accountant", "rdp")
    shown = run("examples/dp_sgd_digits.py", *options, "--out", str(tmp_path))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│ ε = " in line]
    assert [row[0] for row in rows] == ["ε = 8", "ε = 2"]
    assert [float(row[2]) for row in rows] == [8.0, 2.0]
    assert all(float(row[3]) > float(row[2]) for row in rows)
    assert all(float(row[4].rstrip("%")) > 50 for row in rows)
    assert (tmp_path / "dp_sgd_digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_audit_finds_missing_noise(tmp_path):
    shown = run("examples/dp_audit_digits.py", "--runs", "500", "--steps", "2", "--out", str(tmp_path))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    assert [row[4] for row in rows if row[4]] == ["consistent", "consistent", "a mistake"]
    bounds = [[float(x) for x in row[1:4]] for row in rows if row[4]]
    assert all(0 < one < gaussian for one, gaussian, _ in bounds)
    assert all(9.99 < upper <= 10 for _, _, upper in bounds)
    assert (tmp_path / "dp_audit_digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_adapters_learn_in_private_and_the_base_stays():
    small = ("--steps", "20", "--public-steps", "60", "--epsilon", "20")
    shown = " ".join(run("examples/dp_lora.py", *small).split())
    assert "; 0 arrays changed, 0 were copied." in shown
    before, after = re.search(r"test accuracy │ ([0-9.]+)% │ ([0-9.]+)%", shown).groups()
    assert float(after) > float(before) + 5
    numbers, arrays, learned = re.search(r"Adapters: ([0-9,]+) numbers in (\d+) arrays; (\d+) changed", shown).groups()
    assert (numbers, arrays, learned) == ("8,776", "20", "20")


@pytest.mark.slow
def test_two_processes_train_and_one_loads(tmp_path):
    shown = run("examples/multi_host.py", "--members", "4", "--steps", "30", "--out", str(tmp_path))
    assert "process 1 of 2, 2 of 4 devices: trained and wrote members [2, 3]" in shown
    assert "member 3, loaded alone, gives the same logits" in shown


@pytest.mark.slow
def test_a_server_answers_as_the_file_predicts():
    """Real requests to the script's server, which is another process, for an ensemble that was exported here."""
    spec = importlib.util.spec_from_file_location("serve", ROOT / "examples/serve.py")
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    with tempfile.TemporaryDirectory() as folder:
        file, images, _ = serve.exported_digits(Path(folder))
        expected = load_exported(file)(images[:40])
        command = [sys.executable, str(ROOT / "examples/serve.py"), "--file", str(file), "--most", "8", "--wait", "20"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                port = int(process.stdout.readline().strip().rpartition(":")[2])
                with ThreadPoolExecutor(8) as clients:
                    answers = list(clients.map(lambda i: serve.ask(port, images[i : i + 1]), range(40)))
                for name in ("mean", "mutual_information"):
                    found = np.concatenate([answer[name] for answer in answers])
                    np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-6)
                several = serve.ask(port, images[:11])  # more rows than a batch has
                np.testing.assert_allclose(several["mean"], expected["mean"][:11], rtol=1e-5, atol=1e-6)
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/") as answer:
                    about = json.load(answer)
                assert about["rows"] == 51
                assert about["batches"] < 51
                for rows, said in ((images[:1, :5], "each row has 64 numbers"), (images[0], "each row has 64 numbers")):
                    with pytest.raises(urllib.error.HTTPError) as refused:
                        serve.ask(port, rows)
                    assert refused.value.code == 400
                    assert said in json.load(refused.value)["error"]
            finally:
                process.kill()


@pytest.mark.slow
def test_waves_are_those_of_theory_and_show_what_is_hidden(tmp_path):
    small = ("--cells", "10", "20", "--sources", "5", "--antennas", "4", "--steps", "8", "--rounds", "1")
    shown = run("examples/maxwell.py", *small, "--out", str(tmp_path / "out"))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    speed, decay, apart = ({(row[0], row[1]): float(row[k].rstrip("%")) for row in rows[:4]} for k in (2, 3, 4))
    assert speed["vacuum", "20"] == pytest.approx(1, rel=0.005)
    assert speed["permittivity 4", "20"] == pytest.approx(0.5, rel=0.02)
    assert decay["vacuum", "20"] == pytest.approx(-0.5, abs=0.005)
    assert apart["vacuum", "10"] / apart["vacuum", "20"] == pytest.approx(4, rel=0.1)
    said = " ".join(shown.split())
    assert float(said.partition("Reflected by the layer: ")[2].split()[0]) < 5e-3
    assert float(said.partition("Signals of all methods differ by at most ")[2].split(". ")[0]) <= 1e-5
    assert float(said.partition("signals differ by ")[2].split()[0]) < 1e-10
    assert float(said.partition("from central differences by at most ")[2].split(". ")[0]) < 1e-6
    kept, segments = (
        float(next(row for row in rows if row[0] == name)[3]) for name in ("all steps stored", "10 segments")
    )
    assert segments < kept / 2
    assert float(said.partition("steps the misfit is ")[2].split()[0]) < 0.5
    assert (tmp_path / "out" / "maxwell.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("agents", ("--agents", "3", "--iterations", "3"), "3 agents in parallel"),
        (
            "control_flow",
            ("--slices", "3", "--width", "3", "--side", "9", "--limit", "9", "--chunk-size", "5", "--rounds", "1"),
            "3. A while_loop: 81 slices with 1 to 9 iterations",
        ),
        (
            "laplacian",
            ("--particles", "1", "2", "--samples", "9", "--rounds", "1"),
            "energy 3.0 at every point, largest error",
        ),
        (
            "stiff_brusselator",
            ("--cells", "4", "9", "--until", "0.5", "--rounds", "1"),
            "18 unknowns, 324 entries: 6 products in forward and 0 in reverse mode give all",
        ),
        (
            "profile_resnet",
            ("--images", "1", "--side", "32", "--width", "4", "--repeats", "1"),
            "20 batch norms folded, 0 kept",
        ),
        ("sweep_digits", ("--rates", "3", "--seeds", "2", "--steps", "40"), "Ensemble of the best 5 networks: NLL"),
        ("uncertainty_digits", ("--members", "3", "--steps", "60"), "Temperature of the ensemble"),
        (
            "influence_digits",
            ("--models", "2", "--subsets", "3", "--repeats", "1", "--steps", "20"),
            "Retrained 3 networks on 3 halves of 500 digits, and 2 on all.",
        ),
        ("laplace_digits", ("--members", "2", "--steps", "30"), "2 networks and their posteriors"),
        (
            "sharing_tables",
            ("--members", "2", "--steps", "25", "--seeds", "1", "--only", "wine", "diabetes"),
            "diabetes: 2 members, means of 1 splits",
        ),
    ],
)
def test_pictures_of(script, options, said, tmp_path):
    assert said in run(f"examples/{script}.py", *options, "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / f"{script}.png").read_bytes().startswith(b"\x89PNG")


def test_every_script_is_run():
    scripts = [*ROOT.glob("examples/[!_]*.py"), *ROOT.glob("benchmarks/[!_]*.py")]
    # Compilers for accelerators are not installed here: `make accelerators` runs it, and test_benchmarks.py its losses.
    elsewhere = {"benchmarks/accelerators.py"}
    assert {path.relative_to(ROOT).as_posix() for path in scripts} == {*SMALL, *OTHERS} | elsewhere


def test_each_example_is_shown_once_with_its_output_in_short_lines():
    pages = [(ROOT / page).read_text() for page in ("README.md", "examples/README.md")]
    between = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", flags=re.DOTALL)
    blocks = [block for page in pages for block in between.findall(page)]
    assert sorted(name for name, _ in blocks) == sorted(path.stem for path in ROOT.glob("examples/[!_]*.py"))
    for name, block in blocks:
        assert f"\n## `{name}.py`: " in pages[1]
        assert block.startswith(f"```text\n$ python examples/{name}.py  # ")
        assert max(map(len, block.splitlines())) <= 100, name
        assert "…" not in block, f"{name}: a table truncates its text"


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in SMALL if "tour" not in script and "from_torch" not in script])
def test_it_runs(script):
    assert run(script, *SMALL[script])


def test_a_failing_script_is_detected(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit('no')")
    with pytest.raises(AssertionError, match="no"):
        run(str(tmp_path / "broken.py"))


@pytest.mark.slow
def test_the_tour_shows_refusals():
    shown = " ".join(run("examples/vmap_tour.py").split())
    assert "axis 0 of argument `x` has size 3, but axis 0 of argument `w` has size 2" in shown
    assert "[[ 6.  9. 12.]" not in shown
    assert "nothing is mapped: every entry of in_axes is None" in shown


NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not a test dependency")


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, pytest.param(True, marks=NEEDS_TORCH)])
def test_a_network_of_pytorch_is_the_same_here(live):
    options = () if live else SMALL["examples/from_torch.py"]
    shown = " ".join(run("examples/from_torch.py", *options).split())
    assert ("in this process" if live else "earlier: from_torch.safetensors") in shown
    assert "ValueError: load_params: the file does not fit the Net: it lacks `attention.key.kernel`" in shown
    assert "With rules: 18 parameter arrays with 707 numbers" in shown
    apart = float(shown.partition("PyTorch's by at most ")[2].split()[0].rstrip("."))
    assert apart <= 1e-5


@pytest.mark.slow
def test_the_tour_of_static_graphs_compares_both_libraries():
    shown = run("examples/static_graph_tour.py", *SMALL["examples/static_graph_tour.py"])
    assert shown.count("MindSpore: ") == shown.count("JAX: ") == 8
    assert "Ordered callbacks of three calls: before, after, before, after, before, after." in shown


@pytest.mark.slow
def test_the_tour_of_cells_shows_what_must_not_be_compiled():
    shown = run("examples/cells_tour.py")
    assert shown.count("UnexpectedTracerError") == 2
    assert "random.random() runs only while tracing: two calls give the same number." in shown


@pytest.mark.slow
def test_the_demo(tmp_path):
    shown = run(
        "examples/ensemble_digits.py",
        "--members",
        "4",
        "--steps",
        "30",
        "--strategy",
        "vmap",
        "--out",
        str(tmp_path / "out"),
    )
    assert shown.count("member ") >= 4
    assert "members' mean" in shown
    assert "360 of 360 predictions equal those of ensemble" in shown
    assert "bitwise equal" in " ".join(shown.split())
    assert (tmp_path / "out" / "ensemble_digits.png").read_bytes().startswith(b"\x89PNG")
    manifest = entries_of(tmp_path / "out" / "ensemble_digits" / "plurax.json")
    assert (manifest["size"], manifest["about"]["step"]) == (4, 30)
