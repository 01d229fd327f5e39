"""Plots of the predictions and the training of an ensemble. They need the extra `plot`.

Each function draws on the given axes, or on new ones, and returns them. To save the figure, call
`ax.figure.savefig("picture.png")`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..transforms._core.arguments import describe
from ._scoring.classification import ece
from ._scoring.validation import check_probabilities, check_scored

__all__ = ["disagreement", "entropies", "learning_curves", "reliability"]


def reliability(probabilities: ArrayLike, labels: ArrayLike, *, bins: int = 15, ax: Any = None) -> Any:
    """Plot the accuracy of predictions against their confidence; perfect calibration is the diagonal.

    Red bars show the gap between accuracy and confidence; grey bars at the bottom show the number of examples per bin.

    Args:
      probabilities: floating point (batch, classes), such as `Prediction.mean`.
      labels: integer classes (batch,).
      bins: the number of intervals of equal width.
      ax: matplotlib axes, or None for new ones.

    Returns:
      The axes.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      TypeError: as for `plurax.ensemble.metrics.ece`.
      ValueError: as for `plurax.ensemble.metrics.ece`; there are no examples, or a probability is NaN.

    Source:
      DeGroot and Fienberg 1983, "The Comparison and Evaluation of Forecasters".

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import plots
      >>> plots.reliability(jnp.array([[0.8, 0.2], [0.6, 0.4]]), jnp.array([0, 1])).get_title()
      'calibration error 0.400'
    """
    probabilities, labels = (np.asarray(x) for x in check_scored("reliability", probabilities, labels))
    if probabilities.ndim != 2:
        raise ValueError(f"reliability: probabilities must have shape (batch, classes), but got {probabilities.shape}.")
    error = float(ece(probabilities, labels, bins=bins))
    if not len(labels) or np.isnan(probabilities.astype(float)).any():
        raise ValueError("reliability: there are no examples, or some probabilities are NaN; leave those out.")
    probabilities = probabilities.astype(np.promote_types(probabilities.dtype, np.float32))
    confidence, right = probabilities.max(axis=-1), probabilities.argmax(axis=-1) == labels
    # The bins of `ece`, whose error is in the title. Their ends have the dtype of the confidence, as there; else an
    # example near an end might fall into another bin.
    bin_of = np.searchsorted((np.arange(1, bins) / bins).astype(confidence.dtype), confidence)
    counts = np.bincount(bin_of, minlength=bins)
    known = counts > 0
    sums = [np.bincount(bin_of, values, minlength=bins)[known] / counts[known] for values in (confidence, right)]
    ax = _axes(ax)
    width = 0.9 / bins
    ax.plot([0, 1], [0, 1], "--", color="0.6", linewidth=1, zorder=0)
    centres = (np.arange(bins) + 0.5) / bins
    ax.bar(centres[known], sums[1] - sums[0], width, sums[0], color="C3", alpha=0.3, label="gap")
    ax.plot(sums[0], sums[1], "o-", color="C0", markersize=4, label="accuracy")
    ax.bar(centres, 0.2 * counts / counts.max(), width, color="0.85", zorder=0, label="examples")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", title=f"calibration error {error:.3f}")
    ax.legend(fontsize=8, loc="upper left")
    return ax


def entropies(groups: Mapping[str, ArrayLike], *, bins: int = 30, ax: Any = None) -> Any:
    """Plot histograms of uncertainty for several groups, such as in- and out-of-distribution examples.

    Args:
      groups: the entropies or other scores of each group by name, real numbers (count,). Non-finite scores are not
        shown, but count in the size of the group, by which the bars are divided.
      bins: the number of intervals.
      ax: matplotlib axes, or None for new ones.

    Returns:
      The axes.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      TypeError: `groups` is not a dict.
      ValueError: there are no groups, or a group has another shape or is empty.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import plots
      >>> plots.entropies({"in": jnp.array([0.1, 0.2]), "out": jnp.array([0.9])}).get_xlabel()
      'entropy (nats)'
    """
    if not isinstance(groups, Mapping):
        raise TypeError(f"entropies: groups must be a dict from names to scores, but got {describe(groups)}.")
    values = {name: np.asarray(x, float) for name, x in groups.items()}
    if not values or any(x.ndim != 1 or not x.size for x in values.values()):
        shapes = {name: x.shape for name, x in values.items()}
        raise ValueError(f"entropies: each group must have shape (count,) and not be empty, but got {shapes}.")
    ax = _axes(ax)
    finite = np.concatenate([x[np.isfinite(x)] for x in values.values()])
    edges = np.histogram_bin_edges(finite, bins)
    # Fractions instead of counts, so that groups of different sizes can be compared.
    for i, (name, x) in enumerate(values.items()):
        kept = x[np.isfinite(x)]
        weights = np.full(len(kept), 1 / len(x))
        ax.hist(kept, edges, weights=weights, color=f"C{i}", alpha=0.25)
        ax.hist(kept, edges, weights=weights, color=f"C{i}", histtype="step", label=f"{name}, mean {kept.mean():.2f}")
    ax.set(xlabel="entropy (nats)", ylabel="share of the examples")
    ax.legend(fontsize=8)
    return ax


def disagreement(probabilities: ArrayLike, *, ax: Any = None) -> Any:
    """Plot a matrix of how often two members predict different classes, in percent of the examples.

    Args:
      probabilities: floating point (members, batch, classes), such as `Prediction.members`; logits give the same
        result.
      ax: matplotlib axes, or None for new ones.

    Returns:
      The axes.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      TypeError: `probabilities` are not floating point.
      ValueError: the shape is wrong, there are fewer than 2 classes, or a probability is NaN.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import plots
      >>> plots.disagreement(jnp.array([[[0.8, 0.2]], [[0.1, 0.9]]])).get_title()
      'members disagree on 100.0 % of the examples'
    """
    found = check_probabilities("disagreement", probabilities, "(members, batch, classes)", 3, bounded=False)
    if jnp.ndim(found) != 3:
        raise ValueError(f"disagreement: probabilities must be (members, batch, classes), but got {jnp.shape(found)}.")
    if np.isnan(np.asarray(found, np.float32)).any():
        raise ValueError("disagreement: some predictions are NaN; leave those members or examples out.")
    votes = np.asarray(found).argmax(axis=-1)
    shares = (votes[:, None] != votes[None]).mean(axis=-1)
    ax = _axes(ax)
    picture = ax.imshow(shares, cmap="viridis", vmin=0)
    size = len(votes)
    if size <= 12:
        for (i, j), share in np.ndenumerate(shares):
            # White text on dark colors, black text on light ones.
            color = "white" if share < 0.6 * max(shares.max(), 1e-9) else "black"
            ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=color)
    ticks = range(0, size, max(1, size // 10))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    # The diagonal is zero and does not count as pairs.
    pairs = shares.sum() / max(1, size * (size - 1))
    ax.set(xlabel="member", ylabel="member", title=f"members disagree on {100 * pairs:.1f} % of the examples")
    ax.figure.colorbar(picture, ax=ax, shrink=0.8)
    return ax


def learning_curves(
    history: Sequence[Mapping[str, Any]], *, metric: str = "loss", by: str | None = None, ax: Any = None
) -> Any:
    """Plot a metric against the step: the median over the members, with a band from the minimum to the maximum.

    Args:
      history: the rows that `Trainer.fit` returns.
      metric: the name of the metric.
      by: a column that groups the members, such as "learning_rate"; None puts all members into one band.
      ax: matplotlib axes, or None for new ones.

    Returns:
      The axes. A member that has stopped is included up to the step at which it stopped.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      ValueError: no row has the metric `metric`, or a row with it lacks the column `by`.

    Examples:
      >>> from plurax.ensemble import plots
      >>> history = [{"step": s, "member": i, "loss": 1 / s + i} for s in (1, 2) for i in (0, 1)]
      >>> plots.learning_curves(history).get_ylabel()
      'loss'
    """
    rows = [row for row in history if metric in row]
    if not rows:
        known = sorted({name for row in history for name in row} - {"step", "member"})
        raise ValueError(f"learning_curves: the history has no {metric!r}; it has {', '.join(known) or 'nothing'}.")
    if by is not None and any(by not in row for row in rows):
        raise ValueError(f"learning_curves: not all rows of the history have {by!r}; name a column that all have.")
    ax = _axes(ax)
    groups = list(dict.fromkeys(row[by] for row in rows)) if by is not None else [None]
    import matplotlib as mpl

    colors = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(groups))) if len(groups) > 1 else ["C0"]
    # Three digits if they distinguish the groups, else all digits.
    short = [f"{group:.3g}" if isinstance(group, float) else str(group) for group in groups]
    labels = short if len(set(short)) == len(groups) else list(map(str, groups))
    for group, color, label in zip(groups, colors, labels, strict=True):
        per_step: dict[int, list[float]] = {}
        for row in rows:
            if by is None or row[by] == group:
                per_step.setdefault(row["step"], []).append(row[metric])
        steps = sorted(per_step)
        # A non-finite value of one member must not hide the others.
        values = [[x for x in per_step[step] if np.isfinite(x)] or [np.nan] for step in steps]
        ax.fill_between(steps, list(map(min, values)), list(map(max, values)), color=color, alpha=0.2, linewidth=0)
        ax.plot(steps, list(map(np.median, values)), color=color, linewidth=1.4, label=None if by is None else label)
    ax.set(xlabel="step", ylabel=metric)
    if by is not None:
        ax.legend(fontsize=8, title=by.replace("_", " "), title_fontsize=8)
    return ax


def _axes(ax: Any) -> Any:
    """Return the given axes, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots needs matplotlib; install it with: pip install 'plurax[plot]'") from error
    # Not with pyplot, which would keep every figure in memory and open windows.
    return Figure(figsize=(5, 4), layout="constrained").subplots()
