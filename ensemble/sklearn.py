"""Ensembles as scikit-learn estimators: `EnsembleClassifier` and `EnsembleRegressor`. They need the extra `sklearn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ..transforms._core.arguments import check_choice, check_count, check_number
from ..transforms._core.prng import is_key
from ..transforms.modules import Base, tabm
from ._members.ensemble import Ensemble
from ._training._data.batches import Batches
from ._training.trainer import Trainer
from .calibration import conformal_radius

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ModuleNotFoundError as error:
    needed = "plurax.ensemble.sklearn needs scikit-learn; install it with pip install 'plurax[sklearn]'"
    raise ModuleNotFoundError(needed) from error

__all__ = ["EnsembleClassifier", "EnsembleRegressor"]

# Inputs are evaluated in parts of so many rows, of which the last is filled up: one compiled program for any number of
# rows, and a row has the same prediction whatever the others are.
_ROWS = 256


class _MLP(nnx.Module):
    """A multilayer perceptron; for regression, of a mean and a variance."""

    def __init__(self, sizes: tuple[int, ...], gaussian: bool, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])
        self.gaussian = gaussian

    def __call__(self, x: jax.Array) -> Any:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        x = self.layers[-1](x)
        return (x[..., 0], nnx.softplus(x[..., 1]) + 1e-6) if self.gaussian else x


def _standard(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and scale of each column, in float64; the scale is 1 where a column is constant but for rounding."""
    found = StandardScaler().fit(x)
    # Not the scale: it is 1 where a variance overflows, which scikit-learn takes for that of a constant.
    if not (np.isfinite(found.mean_).all() and np.isfinite(found.var_).all()):
        found = "a column has no finite mean or variance in float64"
        raise ValueError(f"{name}: {found}; divide it by its largest absolute value.")
    return found.mean_, found.scale_


def _classification_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


def _regression_loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the negative log-likelihood of means and variances, or the squared error of values."""
    out = model(x)
    if not isinstance(out, (tuple, list)):
        return jnp.square(out.reshape(y.shape) - y).mean()
    mean, variance = out
    return (jnp.log(variance) + jnp.square(mean - y) / variance).mean() / 2


# The rates are in the state, and one trainer serves all of them: a search or a cross-validation compiles once.
_RATES = ("learning_rate", "weight_decay")
_ADAMW = optax.inject_hyperparams(optax.adamw, static_args=("b1", "b2", "eps", "eps_root"))


@cache
def _trainer(loss: Callable[..., Any]) -> Trainer:
    return Trainer(loss, _ADAMW(**dict.fromkeys(_RATES, 0.0)))


def _with_rates(state: Any, rates: dict[str, float]) -> Any:
    """Return a training state whose optimizers have these hyperparameters."""

    def rate(path: tuple[Any, ...], leaf: Any) -> Any:
        of_optimizer = len(path) > 1 and getattr(path[-2], "name", None) == "hyperparams"
        return jnp.full_like(leaf, rates[path[-1].key]) if of_optimizer else leaf

    return jax.tree.map_with_path(rate, state)


class _Estimator(BaseEstimator):
    """What both estimators have in common."""

    _loss: Callable[..., Any]
    _kind: Any

    def __init__(
        self,
        model: Any = "mlp",
        members: int = 8,
        hidden: tuple[int, ...] = (128, 128),
        *,
        epochs: int = 100,
        batch_size: int = 32,
        learning_rate: float = 2e-3,
        weight_decay: float = 1e-4,
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        self.model = model
        self.members = members
        self.hidden = hidden
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.random_state = random_state
        self.progress = progress

    def _fit(self, x: np.ndarray, y: np.ndarray, outputs: int) -> None:
        """Create and train the members on checked data."""
        name = type(self).__name__
        for what in ("members", "epochs", "batch_size"):
            check_count(name, what, getattr(self, what))
        rate = check_number(name, "learning_rate", self.learning_rate, lambda x: x > 0, "positive")
        decay = check_number(name, "weight_decay", self.weight_decay, lambda x: x >= 0, "not negative")
        self.center_, self.scale_ = _standard(name, x)
        self.outputs_ = outputs
        self.seed_ = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        ensemble = self._created()
        batches = Batches((self._scaled(x), y), min(self.batch_size, len(x)), key=jax.random.key(self.seed_))
        trainer = _trainer(type(self)._loss)
        start = _with_rates(trainer.init(ensemble), dict(zip(_RATES, (rate, decay), strict=True)))
        state, self.history_ = trainer.fit(
            start, batches, epochs=self.epochs, progress=self.progress, history_every=batches.per_epoch
        )
        self.ensemble_ = state.ensemble
        self.n_iter_ = self.epochs

    def _created(self) -> Ensemble[Any]:
        """Return the ensemble before training, told what its outputs mean."""
        return self._create().with_kind(self._kind)

    def _create(self) -> Ensemble[Any]:
        name, count, gaussian = type(self).__name__, self.n_features_in_, self._kind == "regression"
        if callable(self.model):
            make = self.model
            return Ensemble.create(lambda rngs: make(count, self.outputs_, rngs), self.members, seed=self.seed_)
        check_choice(name, "model", self.model, ("mlp", "tabm"))
        sizes = count, *self.hidden, 2 if gaussian else self.outputs_
        if self.model == "mlp":
            return Ensemble.create(lambda rngs: _MLP(sizes, gaussian, rngs), self.members, seed=self.seed_)
        if not self.hidden:
            raise ValueError(f"{name}: model='tabm' needs a hidden layer, but hidden is empty; use model='mlp'.")
        last = f"layers.{len(self.hidden)}"

        def member(rngs: nnx.Rngs) -> Any:
            return tabm(_MLP(sizes, gaussian, rngs), first="layers.0", head=last, rngs=rngs)

        return Ensemble.create(member, self.members, seed=self.seed_, shared=Base)

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        return ((x - self.center_) / self.scale_).astype(np.float32)

    def _predicted(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the variance of the ensemble's prediction, in float64."""
        check_is_fitted(self)
        x = self._scaled(validate_data(self, x, reset=False))
        count = len(x)
        x = np.concatenate([x, np.repeat(x[-1:], -count % _ROWS, axis=0)])
        parts = [self.ensemble_.predict(x[i : i + _ROWS]) for i in range(0, len(x), _ROWS)]
        mean, variance = (
            np.concatenate([np.asarray(getattr(part, name), np.float64) for part in parts])[:count]
            for name in ("mean", "variance")
        )
        return mean, variance

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for `pickle`, with plain arrays instead of the ensemble."""
        state = dict(super().__getstate__())
        if "ensemble_" in state:
            state["ensemble_"] = [np.asarray(x) for x in jax.tree.leaves(_without_keys(state["ensemble_"]))]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "ensemble_" in state:
            like = self._created()
            treedef = jax.tree.structure(_without_keys(like))
            found = jax.tree.unflatten(treedef, [jnp.asarray(x) for x in state["ensemble_"]])
            keys = jax.random.wrap_key_data
            self.ensemble_ = jax.tree.map(lambda x, new: keys(new) if is_key(x) else new, like, found)


def _without_keys(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


class EnsembleClassifier(ClassifierMixin, _Estimator):
    """An ensemble of networks as a scikit-learn classifier.

    Args:
      model: "mlp": independent networks; "tabm": members that share all kernels but the last (`modules.tabm`), at about
        the memory of one; or a function `make(features, classes, rngs)` that returns an NNX module of logits.
      members: the number of members.
      hidden: the sizes of the hidden layers.
      epochs: the number of passes over the data.
      batch_size: the number of examples in a batch; at most all of them.
      learning_rate: of `optax.adamw`.
      weight_decay: of `optax.adamw`.
      random_state: an int for equal results at each call, a NumPy `RandomState`, or None.
      progress: whether `fit` shows a bar.

    Attributes:
      ensemble_: the trained `Ensemble`, whose inputs are the features minus `center_`, divided by `scale_`.
      classes_: the labels.
      history_: the losses of each member, as `Trainer.fit` returns them, once an epoch.
      n_features_in_, feature_names_in_: as in scikit-learn.

    Raises:
      ModuleNotFoundError: scikit-learn is not installed.
      TypeError, ValueError: when fitted, for an argument that is out of range, and as in scikit-learn.

    Cost:
      All members train as one program. Estimators of equal shapes share it, so a search compiles once.

    Source:
      `sklearn.neural_network.MLPClassifier`, which has one member.

    Examples:
      >>> from plurax.ensemble.sklearn import EnsembleClassifier
      >>> from sklearn.datasets import load_wine
      >>> x, y = load_wine(return_X_y=True)
      >>> model = EnsembleClassifier(members=2, hidden=(16,), learning_rate=0.01, random_state=0).fit(x[::2], y[::2])
      >>> model.score(x[1::2], y[1::2]) > 0.9, model.predict_proba(x[:1]).shape
      (True, (1, 3))
    """

    _loss = staticmethod(_classification_loss)
    _kind = "classification"

    def fit(self, X: Any, y: Any) -> EnsembleClassifier:
        """Train on features (examples, features) and labels (examples,); return the estimator."""
        x, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        self._fit(x, labels.astype(np.int32), max(2, len(self.classes_)))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the mean probability of each class, (examples, classes)."""
        mean, _ = self._predicted(X)
        p = mean[:, : len(self.classes_)]  # a single label has a second probability
        return p / p.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable labels, (examples,)."""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]


class EnsembleRegressor(RegressorMixin, _Estimator):
    """An ensemble of networks as a scikit-learn regressor, with prediction intervals.

    Args:
      model: as for `EnsembleClassifier`; a function `make(features, 1, rngs)` returns a module of values, or of pairs
        of means and variances. "mlp" and "tabm" predict means and variances.
      members: as for `EnsembleClassifier`.
      hidden: as for `EnsembleClassifier`.
      epochs: as for `EnsembleClassifier`.
      batch_size: as for `EnsembleClassifier`.
      learning_rate: as for `EnsembleClassifier`.
      weight_decay: as for `EnsembleClassifier`.
      held_out: the fraction of the examples that are kept from training to calibrate `predict_interval`; 0 for none.
      random_state: as for `EnsembleClassifier`.
      progress: as for `EnsembleClassifier`.

    Attributes:
      ensemble_: the trained `Ensemble`, whose inputs and outputs are standardized.
      history_: as for `EnsembleClassifier`.
      n_features_in_, feature_names_in_: as in scikit-learn.

    Raises:
      ModuleNotFoundError, TypeError, ValueError: as for `EnsembleClassifier`.

    Cost:
      As for `EnsembleClassifier`.

    Source:
      `sklearn.neural_network.MLPRegressor`, which has one member and no intervals.

    Examples:
      >>> from plurax.ensemble.sklearn import EnsembleRegressor
      >>> from sklearn.datasets import load_diabetes
      >>> x, y = load_diabetes(return_X_y=True)
      >>> model = EnsembleRegressor(members=2, hidden=(16,), epochs=20, held_out=0.3, random_state=0).fit(x, y)
      >>> low, high = model.predict_interval(x, error=0.1).T
      >>> bool((low < model.predict(x)).all() and (model.predict(x) < high).all())
      True
    """

    _loss = staticmethod(_regression_loss)
    _kind = "regression"

    # Written out, since scikit-learn reads the parameters of an estimator from this signature.
    def __init__(
        self,
        model: Any = "mlp",
        members: int = 8,
        hidden: tuple[int, ...] = (128, 128),
        *,
        epochs: int = 100,
        batch_size: int = 32,
        learning_rate: float = 2e-3,
        weight_decay: float = 1e-4,
        held_out: float = 0.0,
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        super().__init__(
            model,
            members,
            hidden,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            random_state=random_state,
            progress=progress,
        )
        self.held_out = held_out

    def fit(self, X: Any, y: Any) -> EnsembleRegressor:
        """Train on features (examples, features) and values (examples,); return the estimator."""
        x, y = validate_data(self, X, y, y_numeric=True)
        y = column_or_1d(y, warn=True).astype(np.float64)
        fraction = check_number(
            "EnsembleRegressor", "held_out", self.held_out, lambda x: 0 <= x < 1, "from 0 to below 1"
        )
        kept = None
        if fraction:
            x, x_kept, y, y_kept = train_test_split(x, y, test_size=fraction, random_state=self.random_state)
            kept = x_kept, y_kept
        (self.y_center_,), (self.y_scale_,) = _standard("EnsembleRegressor", y[:, None])
        self._fit(x, ((y - self.y_center_) / self.y_scale_).astype(np.float32), 1)
        self.held_out_ = None
        if kept is not None:
            mean, scale = self._distribution(kept[0])
            self.held_out_ = mean, scale, kept[1]
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the mean values, (examples,)."""
        return self._distribution(X)[0]

    def predict_interval(self, X: Any, error: float = 0.1) -> np.ndarray:
        """Return the ends of intervals that contain the value with probability 1 - `error`.

        Args:
          X: the features, (examples, features).
          error: the probability of a miss.

        Returns:
          Lower and upper ends, (examples, 2). With `held_out` they are conformal: the probability holds for any
          distribution of exchangeable examples. Without, they are those of a normal distribution with the mean and the
          variance of the ensemble.

        Raises:
          ValueError: `error` is not between 0 and 1.
        """
        error = check_number("predict_interval", "error", error, lambda x: 0 < x < 1, "between 0 and 1")
        mean, scale = self._distribution(X)
        if self.held_out_ is None:
            reach = float(jax.scipy.special.ndtri(1 - error / 2))
        else:
            center, width, y = self.held_out_
            reach = float(conformal_radius(center, y, error=error, scales=width))
        return np.stack([mean - reach * scale, mean + reach * scale], axis=1)

    def _distribution(self, x: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the standard deviation of the value."""
        mean, variance = self._predicted(x)
        mean, variance = mean.reshape(len(mean)), variance.reshape(len(mean))
        tiny = np.finfo(np.float32).tiny  # members of a function that returns values may agree
        return self.y_center_ + self.y_scale_ * mean, self.y_scale_ * np.sqrt(np.maximum(variance, tiny))
