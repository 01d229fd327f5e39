import contextlib
import linecache
import sysconfig
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import pytest

from plurax.transforms._core import source_lines


@pytest.mark.smoke
def test_lines_of_libraries_are_not_the_users():
    standard, installed = f"{contextlib.__file__}:85", f"{flax.__file__}:12"
    assert source_lines.users_line([installed, standard, "mine.py:3", "caller.py:9"]) == "mine.py:3"
    assert source_lines.users_line([standard, installed]) == standard
    assert source_lines.users_line([f"{jax.__file__}:1"]) == ""


@pytest.mark.smoke
def test_a_function_under_a_decorator_of_the_standard_library_is_the_users():
    @contextlib.contextmanager
    def nothing():
        yield

    @nothing()
    def decorated(x):
        return jnp.sin(x)

    (eqn,) = jax.make_jaxpr(decorated)(1.0).eqns
    file, line = source_lines.source_of(eqn).rsplit(":", 1)
    assert Path(file) == Path(__file__)
    assert "jnp.sin" in linecache.getline(file, int(line))


def test_site_packages_within_the_standard_library_are_installed():
    assert source_lines.is_installed(sysconfig.get_path("stdlib") + "/json/decoder.py")
    assert not source_lines.is_installed(sysconfig.get_path("stdlib") + "_of_mine/model.py")
