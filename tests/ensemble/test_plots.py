"""Plots show the given values, and runs are written for TensorBoard."""

import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from plurax.ensemble import Ensemble, TensorBoard, Trainer, metrics, plots

GENERATOR = np.random.default_rng(0)
P = GENERATOR.dirichlet(np.ones(3), size=(4, 50)).astype(np.float32)
LABELS = GENERATOR.integers(0, 3, 50)
HISTORY = [
    {"step": step, "member": i, "rate": rate, "loss": 1.0 / step + i}
    for step in (1, 2, 3)
    for i, rate in enumerate([0.1, 0.1, 0.2])
    if not (step == 3 and i == 1)
]


def test_reliability_is_the_accuracy_of_each_bin():
    ax = plots.reliability(P[0], LABELS, bins=5)
    assert ax.get_title() == f"calibration error {float(metrics.ece(P[0], LABELS, bins=5)):.3f}"
    confidence, right = P[0].max(axis=-1), P[0].argmax(axis=-1) == LABELS
    (line,) = [line for line in ax.lines if line.get_label() == "accuracy"]
    inside = [(confidence > low) & (confidence <= low + 0.2) for low in np.arange(5) / 5]
    expected = [(confidence[b].mean(), right[b].mean()) for b in inside if b.any()]
    np.testing.assert_allclose(line.get_xydata(), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"probabilities must have shape \(batch, classes\), but got \(4, 50, 3\)"):
        plots.reliability(P, LABELS)
    for p, labels in ((P[0, :0], LABELS[:0]), (P[0] * np.nan, LABELS)):
        with pytest.raises(ValueError, match="there are no examples, or some probabilities are NaN"):
            plots.reliability(p, labels)


def test_entropies_are_shares():
    ax = plots.entropies({"in": GENERATOR.uniform(0, 1, 90), "out": jnp.array([2.0, jnp.nan, 3.0])}, bins=10)
    heights = {}
    for container in ax.containers:
        if container.get_label() in ("in, mean 0.49", "out, mean 2.50") or container.patches:
            heights[container.get_label()] = sum(bar.get_height() for bar in container.patches)
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts[1] == "out, mean 2.50"
    assert max(heights.values()) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"each group must have shape \(count,\) and not be empty"):
        plots.entropies({"a": np.ones((2, 2))})
    with pytest.raises(TypeError, match="groups must be a dict from names to scores, but got"):
        plots.entropies(np.ones(3))


def test_disagreement_is_that_of_pairs():
    ax = plots.disagreement(P)
    shares = ax.images[0].get_array()
    votes = P.argmax(axis=-1)
    assert shares[1, 3] == pytest.approx((votes[1] != votes[3]).mean())
    assert f"{100 * float(metrics.disagreement(P).mean()):.1f} %" in ax.get_title()
    with pytest.raises(ValueError, match="probabilities must have shape"):
        plots.disagreement(P[0])
    with pytest.raises(ValueError, match="some predictions are NaN"):
        plots.disagreement(P * np.nan)


def test_learning_curves_have_bands():
    ax = plots.learning_curves(HISTORY)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [2.0, 1.5, 1 / 3 + 1])
    ax = plots.learning_curves(HISTORY, by="rate", ax=ax)
    assert [line.get_label() for line in ax.lines[1:]] == ["0.1", "0.2"]
    np.testing.assert_allclose(ax.lines[1].get_ydata(), [1.5, 1.0, 1 / 3])
    with pytest.raises(ValueError, match="the history has no 'accuracy'; it has loss, rate"):
        plots.learning_curves(HISTORY, metric="accuracy")
    with pytest.raises(ValueError, match="not all rows of the history have 'seed'"):
        plots.learning_curves(HISTORY, by="seed")


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([1024, 1020], ["1024", "1020"]),
        ([0.00037275937, 1.0], ["0.000373", "1"]),
        ([0.12345, 0.12346], ["0.12345", "0.12346"]),
        (["adam", "sgd"], ["adam", "sgd"]),
    ],
)
def test_groups_have_short_labels_that_differ(values, labels):
    history = [{"step": 1, "member": i, "loss": 1.0, "of": value} for i, value in enumerate(values)]
    assert [line.get_label() for line in plots.learning_curves(history, by="of").lines] == labels


@pytest.mark.parametrize(
    ("module", "use", "extra"),
    [
        ("matplotlib.figure", lambda _: plots.learning_curves(HISTORY), "plot"),
        ("tensorboardX", TensorBoard, "tensorboard"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch, tmp_path, module, use, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"install it with: pip install 'plurax\[{extra}\]'"):
        use(tmp_path)


def test_tensorboard_gets_each_member_s_scalars(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    def loss(model, x):
        return jnp.mean(model(x) ** 2), {"count": 3}

    trainer = Trainer(loss, optax.sgd(0.1), in_axes=0)
    batches = [np.ones((2, 4, 3), np.float32) for _ in range(4)]
    batches[1][1, 0] = np.nan
    with TensorBoard(tmp_path / "board") as board, pytest.warns(UserWarning, match="member 1 stopped at step 2"):
        _, history = trainer.fit(
            trainer.init(Ensemble.create(lambda rngs: nnx.Linear(3, 1, rngs=rngs), 2, seed=0)),
            batches,
            progress=False,
            callbacks=[board],
        )
    found = []
    for i in range(2):
        (file,) = (tmp_path / "board" / f"member_0{i}").iterdir()
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found += [(event.step, i, v.tag, v.simple_value) for v in event.summary.value]
    expected = [
        (row["step"], row["member"], name, np.float32(row[name]))
        for row in history
        for name in ("loss", "count")
        if np.isfinite(row[name])
    ]
    assert sorted(found) == sorted(expected)
    assert {(step, i) for step, i, *_ in found} == {(1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1)}
