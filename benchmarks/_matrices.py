"""Patterns of sparse matrices, for counting and timing colors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import sparse as sp


def band(size: int, below: int = 1, above: int = 1) -> Any:
    offsets = range(-below, above + 1)
    return sp.diags_array([np.ones(size - abs(k)) for k in offsets], offsets=list(offsets))


def ring(size: int) -> Any:
    corners = sp.coo_array(([1, 1], ([0, size - 1], [size - 1, 0])), shape=(size, size))
    return band(size) + corners


def grid(*sides: int, line: Callable[[int], Any] = band) -> Any:
    """Return the pattern of the cells of a grid and their neighbors."""
    matrix = line(sides[0])
    for side in sides[1:]:
        matrix = sp.kron(matrix, sp.eye_array(side)) + sp.kron(sp.eye_array(matrix.shape[0]), line(side))
    return matrix


def arrow(size: int, width: int = 1) -> Any:
    """Return the pattern of full first rows, full first columns and a diagonal."""
    wide = sp.csr_array(np.ones((width, size)))
    return (
        sp.vstack([wide, sp.csr_array((size - width, size))])
        + sp.hstack([wide.T, sp.csr_array((size, size - width))])
        + sp.eye_array(size)
    )


def scattered(rows: int, cols: int, entries: int, seed: int, power: float = 0.0) -> Any:
    """Return entries at random places; with a power, few columns have most of them."""
    random = np.random.default_rng(seed)
    weights = np.arange(1.0, cols + 1) ** -power
    places = random.integers(0, rows, entries), random.choice(cols, entries, p=weights / weights.sum())
    return sp.coo_array((np.ones(entries), places), shape=(rows, cols))


def generated() -> dict[str, Any]:
    """Return twenty matrices whose colors are counted."""
    torus = grid(32, 32, line=ring)
    return {
        "band, 1 + 1": band(500),
        "band, 3 + 2": band(501, 3, 2),
        "band, 0 + 7": band(300, 0, 7),
        "blocks of 7": sp.kron(sp.eye_array(40), np.ones((7, 7))),
        "chain of blocks of 4": sp.kron(band(30), np.ones((4, 4))),
        "arrow": arrow(200),
        "arrow of width 5": arrow(201, 5),
        "grid, 30 x 17": grid(30, 17),
        "grid with corners, 30 x 17": sp.kron(band(30), band(17)),
        "grid, 9 x 8 x 7": grid(9, 8, 7),
        "ring, 500": ring(500),
        "torus, 20 x 21": grid(20, 21, line=ring),
        "two substances on a torus": sp.kron(np.ones((2, 2)), sp.eye_array(1024)) + sp.kron(sp.eye_array(2), torus),
        "scattered, 300 x 500": scattered(300, 500, 1500, 1),
        "scattered, 500 x 300": scattered(500, 300, 3000, 2),
        "scattered, 1000": scattered(1000, 1000, 5000, 3),
        "scattered, 200": scattered(200, 200, 4000, 4),
        "scattered, 5000": scattered(5000, 5000, 25_000, 5),
        "power law, 500": scattered(500, 500, 3000, 6, power=1),
        "power law, 2000": scattered(2000, 2000, 8000, 7, power=1),
    }


def large(entries: int) -> dict[str, Any]:
    """Return matrices with about so many entries."""
    return {
        "band": band(entries // 10, 4, 5),
        "grid": grid(int((entries / 5) ** 0.5), int((entries / 5) ** 0.5)),
        "scattered, ten in a row": scattered(entries // 10, entries // 10, entries, 1),
        "scattered, a hundred in a row": scattered(entries // 100, entries // 100, entries, 2),
        "arrow": arrow(entries // 3),
    }
