"""Colorings: entries recovered from compressed products, against the matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plurax.transforms._jacobian._sparse.coloring import coloring_of, symmetric_coloring_of
from plurax.transforms._jacobian._sparse.pattern import Pattern, full_pattern, pattern_at

MODES = (("forward",), ("reverse",), ("forward", "reverse"), ("reverse", "forward"))


def pattern_of(matrix: np.ndarray[tuple[int, int], Any]) -> Pattern:
    rows, cols = np.nonzero(matrix)
    return pattern_at(rows, cols, matrix.shape)


def entries_read(coloring: Any, pattern: Pattern, matrix: np.ndarray) -> np.ndarray:
    """Recover all entries from sums of columns, of rows, or of both."""
    pushed = np.stack([matrix[:, coloring.columns == k].sum(1) for k in range(coloring.counts[0])] or [np.zeros(0)])
    pulled = np.stack([matrix[coloring.rows == k].sum(0) for k in range(coloring.counts[1])] or [np.zeros(0)])
    by_row, by_column = (
        (pulled, pulled) if not coloring.counts[0] else (pushed, pulled if coloring.counts[1] else pushed)
    )
    return np.array(
        [
            by_row[product, row] if here else by_column[product, col]
            for here, product, row, col in zip(
                coloring.by_row, coloring.product, pattern.rows, pattern.cols, strict=True
            )
        ]
    )


@st.composite
def matrices(draw: Any, square: bool = False) -> np.ndarray:
    """Draw sparse matrices, some with full rows or columns."""
    m = draw(st.integers(0, 12))
    n = m if square else draw(st.integers(0, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = random.random((m, n)) < draw(st.sampled_from([0, 0.1, 0.3, 0.9]))
    if m and n:
        found[random.integers(0, m, draw(st.integers(0, 2)))] = True
        found[:, random.integers(0, n, draw(st.integers(0, 2)))] = True
    return np.where(found, random.standard_normal((m, n)), 0)


@given(matrices(), st.sampled_from(MODES))
def test_every_entry_is_recovered(matrix: np.ndarray, modes: tuple[str, ...]) -> None:
    pattern = pattern_of(matrix)
    coloring = coloring_of(pattern, modes)
    np.testing.assert_array_equal(entries_read(coloring, pattern, matrix), matrix[pattern.rows, pattern.cols])
    assert coloring.counts[0] == 0 or "forward" in modes
    assert coloring.counts[1] == 0 or "reverse" in modes


@given(matrices(square=True), st.sampled_from(("forward", "reverse")), st.booleans())
def test_every_entry_of_a_symmetric_matrix_is_recovered(matrix: np.ndarray, mode: str, half: bool) -> None:
    pattern = pattern_of(np.triu(matrix) if half else matrix + matrix.T)
    whole = np.triu(matrix) + np.triu(matrix).T if half else matrix + matrix.T
    coloring = symmetric_coloring_of(pattern, mode)
    np.testing.assert_array_equal(entries_read(coloring, pattern, whole), whole[pattern.rows, pattern.cols])
    assert coloring.counts[mode == "forward"] == 0


def arrow(size: int, width: int = 1) -> np.ndarray:
    matrix = np.eye(size, dtype=bool)
    matrix[:width] = matrix[:, :width] = True
    return matrix


@pytest.mark.parametrize(
    ("matrix", "modes", "counts"),
    [
        (np.eye(9), ("forward", "reverse"), (1, 0)),
        (np.eye(9), ("reverse",), (0, 1)),
        (np.tri(9, k=1) * np.tri(9, k=1).T, ("forward", "reverse"), (3, 0)),
        (np.ones((1, 9)), ("forward", "reverse"), (0, 1)),
        (np.ones((9, 1)), ("forward", "reverse"), (1, 0)),
        (np.ones((4, 9)), ("forward", "reverse"), (0, 4)),
        (arrow(50), ("forward", "reverse"), (2, 1)),
        (arrow(50), ("forward",), (50, 0)),
        (arrow(5000), ("forward", "reverse"), (2, 1)),
        (arrow(60, 3), ("forward", "reverse"), (4, 3)),
        (arrow(50)[:, 1:], ("forward", "reverse"), (1, 1)),
        (np.zeros((3, 4)), ("forward", "reverse"), (0, 0)),
        (np.zeros((0, 4)), ("reverse",), (0, 0)),
    ],
)
def test_the_number_of_products_for_known_patterns(
    matrix: np.ndarray, modes: tuple[str, ...], counts: tuple[int, int]
) -> None:
    assert coloring_of(pattern_of(matrix), modes).counts == counts


def test_a_symmetric_arrow_takes_two_products() -> None:
    assert symmetric_coloring_of(pattern_of(arrow(50)), "forward").counts == (2, 0)


def test_a_full_pattern_is_not_colored_pair_by_pair() -> None:
    assert coloring_of(full_pattern((2000, 3000)), ("forward",)).counts == (3000, 0)


@pytest.mark.parametrize(
    ("matrix", "count"),
    [
        (arrow(50) & ~np.eye(50, dtype=bool), 1),  # only the color of the hub is read
        (np.kron(np.array([[0, 1], [1, 0]]), np.ones((4, 4))), 4),  # either half of the rows
        (np.tri(9, k=1) * np.tri(9, k=1).T * (1 - np.eye(9)), 2),
        (np.zeros((4, 4)), 0),
    ],
)
def test_colors_from_which_nothing_is_read_are_left_out(matrix: np.ndarray, count: int) -> None:
    assert symmetric_coloring_of(pattern_of(matrix), "forward").counts == (count, 0)
