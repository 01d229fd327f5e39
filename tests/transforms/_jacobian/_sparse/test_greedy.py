"""Greedy colorings, against their definitions and known numbers of colors."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plurax.transforms._jacobian._sparse import greedy
from plurax.transforms._jacobian._sparse.greedy import column_colors, star_colors

pytestmark = pytest.mark.smoke


@st.composite
def matrices(draw: Any, square: bool = False) -> np.ndarray:
    m = draw(st.integers(0, 14))
    n = m if square else draw(st.integers(0, 14))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return random.random((m, n)) < draw(st.sampled_from([0, 0.1, 0.2, 0.4, 0.9]))


def colors_of(matrix: np.ndarray, rounds: int = 0) -> np.ndarray:
    rows, cols = np.nonzero(matrix)
    return column_colors(rows, cols, (matrix.shape[0], matrix.shape[1]), rounds)


def star_of(matrix: np.ndarray) -> np.ndarray:
    rows, cols = np.nonzero(matrix | matrix.T)
    return star_colors(rows, cols, len(matrix))


def check_columns(matrix: np.ndarray, colors: np.ndarray) -> None:
    """Fail unless no row has two entries of one color, and all colors are used."""
    np.testing.assert_array_equal(colors >= 0, matrix.any(0))
    for row in matrix:
        assert len(set(colors[row])) == row.sum()
    assert set(range(colors.max(initial=-1) + 1)) <= set(colors)


def check_star(matrix: np.ndarray, colors: np.ndarray) -> None:
    """Fail unless neighbors differ, and no path of four vertices has two colors."""
    edges = matrix | matrix.T
    np.fill_diagonal(edges, False)
    assert not (edges & (colors[:, None] == colors)).any()
    for x, w, v, y in itertools.permutations(range(len(matrix)), 4):
        if edges[x, w] and edges[w, v] and edges[v, y]:
            assert len({colors[x], colors[w], colors[v], colors[y]}) > 2, (x, w, v, y)


@given(matrices(), st.integers(0, 4))
def test_no_row_has_two_columns_of_one_color(matrix: np.ndarray, rounds: int) -> None:
    check_columns(matrix, colors_of(matrix, rounds))


@given(matrices(square=True))
def test_no_path_of_four_vertices_has_two_colors(matrix: np.ndarray) -> None:
    check_star(matrix, star_of(matrix))


def test_wrong_colors_are_detected() -> None:
    chain = np.eye(4, k=1, dtype=bool)
    with pytest.raises(AssertionError):
        check_columns(np.ones((1, 3), bool), np.array([0, 1, 0]))
    with pytest.raises(AssertionError):
        check_columns(np.eye(2, dtype=bool), np.array([0, 2]))
    with pytest.raises(AssertionError):
        check_star(chain, np.array([0, 0, 1, 2]))
    with pytest.raises(AssertionError):
        check_star(chain, np.array([0, 1, 0, 1]))
    check_star(chain, np.array([0, 1, 0, 2]))


@given(matrices())
def test_more_iterations_take_no_more_colors(matrix: np.ndarray) -> None:
    counts = [colors_of(matrix, rounds).max(initial=-1) for rounds in range(5)]
    assert counts == sorted(counts, reverse=True)


def test_iterations_find_fewer_colors() -> None:
    matrix = np.random.default_rng(1).random((200, 203)) < 0.1
    check_columns(matrix, colors_of(matrix, 4))
    assert colors_of(matrix, 4).max() < colors_of(matrix).max()


@pytest.mark.parametrize("size", [1500, 3000])
def test_sets_of_any_length_give_the_same_colors(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.eye(size + 3, dtype=bool) | np.eye(size + 3, k=1, dtype=bool)
    matrix[0, :size] = matrix[1, 2:] = True
    colors = colors_of(matrix)
    check_columns(matrix, colors)
    assert colors.max() > 1024
    monkeypatch.setattr(greedy, "_BITS", 0)  # 1,024 colors at a time
    np.testing.assert_array_equal(colors_of(matrix), colors)


def band(size: int, width: int) -> np.ndarray:
    return np.tri(size, k=width, dtype=bool) & np.tri(size, k=width, dtype=bool).T


def grid(*sides: int) -> np.ndarray:
    cells = np.indices(sides).reshape(len(sides), -1)
    return np.abs(cells[:, :, None] - cells[:, None]).sum(0) <= 1


def arrow(size: int, width: int) -> np.ndarray:
    matrix = np.eye(size, dtype=bool)
    matrix[:width] = matrix[:, :width] = True
    return matrix


@pytest.mark.parametrize(
    ("matrix", "columns", "symmetric"),
    [
        (band(60, 0), 1, 1),
        (band(60, 1), 3, 3),
        (band(61, 3), 7, 7),
        (np.kron(np.eye(9, dtype=bool), np.ones((5, 5), bool)), 5, 5),
        (np.kron(band(9, 1), np.ones((4, 4), bool)), 12, 12),
        (arrow(40, 1), 40, 2),
        (arrow(40, 4), 40, 5),
        (grid(12, 17), 7, 6),
        (grid(5, 6, 7), 10, 10),
        (np.kron(band(9, 1), band(11, 1)), 9, 11),
        (np.zeros((3, 3), bool), 0, 1),
        (np.zeros((0, 0), bool), 0, 0),
    ],
)
def test_structured_matrices_take_so_many_colors(matrix: np.ndarray, columns: int, symmetric: int) -> None:
    assert colors_of(matrix, 4).max(initial=-1) + 1 <= columns
    assert star_of(matrix).max(initial=-1) + 1 <= symmetric


def test_a_dense_row_among_many_sparse_ones_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound, each row has a set of up to 10,000 colors: 25 MB."""
    size = 20_000
    monkeypatch.setattr(greedy, "_BITS", 0)
    one = np.arange(size)
    rows, cols = np.concatenate([one, one[1:], 0 * one[::2]]), np.concatenate([one, one[:-1], one[::2]])
    rows, cols = np.divmod(np.unique(rows * size + cols), size)
    tracemalloc.start()
    colors = column_colors(rows, cols, (size, size))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12e6
    assert colors.max() + 1 == size // 2
    rows, cols = np.divmod(np.unique(np.concatenate([rows * size + cols, cols * size + rows])), size)
    assert star_colors(rows, cols, size).max() + 1 == 4
