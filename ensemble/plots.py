"""Plots of an ensemble's predictions and of its training; they need the extra `plot`.

Each function draws on the given axes, or on new ones, and returns them: `ax.figure.savefig("picture.png")`.
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
    """Draw the accuracy of predictions against their confidence; the diagonal is perfect.

    Bars span confidence and accuracy; those at the bottom show the number of examples in each bin.

    Args:
      probabilities: floating (batch, classes), such as `Prediction.mean`.
      labels: classes as integers (batch,).
      bins: number of intervals of equal width.
      ax: matplotlib axes, or None for new ones.

    Returns:
      The axes.

    Raises:
      ModuleNotFoundError: matplotlib is missing.
      TypeError, ValueError: as for `plurax.ensemble.metrics.ece`.

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
        raise ValueError("reliability: there are no examples, or some have no probabilities (NaN); leave those out.")
    probabilities = probabilities.astype(np.promote_types(probabilities.dtype, np.float32))
    confidence, right = probabilities.max(axis=-1), probabilities.argmax(axis=-1) == labels
    # The bins of `ece`, whose error is in the title: with ends of the same dtype, or an example may fall into another.
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
    """Draw histograms of doubt, such as of examples in and out of the distribution, on one scale.

    Args:
      groups: for each name the entropies, or other scores, of examples: real (count,). One that is not finite is in
        no interval, but counts among the examples of which the others are a share.
      bins: number of intervals.
      ax: matplotlib axes, or None for new ones.

    Returns:
      The axes.

    Raises:
      ModuleNotFoundError: matplotlib is missing.
      TypeError: not a dict.
      ValueError: a group has another shape, or there are none.

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
    # Shares and not counts, so that groups of different sizes can be compared.
    for i, (name, x) in enumerate(values.items()):
        kept = x[np.isfinite(x)]
        weights = np.full(len(kept), 1 / len(x))
        ax.hist(kept, edges, weights=weights, color=f"C{i}", alpha=0.25)
        ax.hist(kept, edges, weights=weights, color=f"C{i}", histtype="step", label=f"{name}, mean {kept.mean():.2f}")
    ax.set(xlabel="entropy (nats)", ylabel="share of the examples")
    ax.legend(fontsize=8)
    return ax


def disagreement(probabilities: ArrayLike, *, ax: Any = None) -> Any:
    """Draw how often each two members predict different classes, as a matrix.

    Args:
      probabilities: floating (members, batch, classes), such as `Prediction.members`; logits give the same.
      ax: matplotlib axes, or None for new ones.

    Returns:
      The axes.

    Raises:
      ModuleNotFoundError: matplotlib is missing.
      TypeError, ValueError: not probabilities of that shape.

    Examples:
      >>> import jax.numpy as jnp
      >>> from plurax.ensemble import plots
      >>> plots.disagreement(jnp.array([[[0.8, 0.2]], [[0.1, 0.9]]])).get_title()
      'they disagree on 100.0 % of the examples'
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
            # White on the dark end of the colour map, black on the light one.
            colour = "white" if share < 0.6 * max(shares.max(), 1e-9) else "black"
            ax.text(j, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color=colour)
    ticks = range(0, size, max(1, size // 10))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    # Of size**2 entries those on the diagonal are zero, and are no pairs.
    pairs = shares.sum() / max(1, size * (size - 1))
    ax.set(xlabel="member", ylabel="member", title=f"they disagree on {100 * pairs:.1f} % of the examples")
    ax.figure.colorbar(picture, ax=ax, shrink=0.8)
    return ax


def learning_curves(
    history: Sequence[Mapping[str, Any]], *, metric: str = "loss", by: str | None = None, ax: Any = None
) -> Any:
    """Draw a metric against the steps: the median over the members, with a band from the lowest to the highest.

    Args:
      history: the rows that `Trainer.fit` returns.
      metric: the name of the metric.
      by: a column that groups the members, such as "learning_rate"; None puts all in one band.
      ax: matplotlib axes, or None for new ones.

    Returns:
      The axes. Members that have stopped are in the bands up to the step of that.

    Raises:
      ModuleNotFoundError: matplotlib is missing.
      ValueError: no row has that metric, or a row lacks the column.

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

    colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(groups))) if len(groups) > 1 else ["C0"]
    # Three digits where they tell the groups apart, else all.
    short = [f"{group:.3g}" if isinstance(group, float) else str(group) for group in groups]
    labels = short if len(set(short)) == len(groups) else list(map(str, groups))
    for group, colour, label in zip(groups, colours, labels, strict=True):
        per_step: dict[int, list[float]] = {}
        for row in rows:
            if by is None or row[by] == group:
                per_step.setdefault(row["step"], []).append(row[metric])
        steps = sorted(per_step)
        # One member that is not finite must not hide the others.
        values = [[x for x in per_step[step] if np.isfinite(x)] or [np.nan] for step in steps]
        ax.fill_between(steps, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.2, linewidth=0)
        ax.plot(steps, list(map(np.median, values)), color=colour, linewidth=1.4, label=None if by is None else label)
    ax.set(xlabel="step", ylabel=metric)
    if by is not None:
        ax.legend(fontsize=8, title=by.replace("_", " "), title_fontsize=8)
    return ax


def _axes(ax: Any) -> Any:
    """Return the axes that are given, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots needs matplotlib; install it with: pip install 'plurax[plot]'") from error
    # Not by pyplot, which would keep every figure in memory and open windows.
    return Figure(figsize=(5, 4), layout="constrained").subplots()
