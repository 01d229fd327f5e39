"""The surroundings that a compiled program depends on: settings of JAX, the installation, and the machine."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import jax

# The packages whose versions are compared.
_PACKAGES = ("plurax", "jax", "jaxlib", "flax", "optax", "numpy")
# Settings of JAX that differ from call to call, by its context managers: there is a program for each value.
_OF_A_CALL = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)
_DEVICE = "jax_default_device"  # devices are compared by their kind, not by this setting
# Settings that do not change the program. Some of the others do not either, and then it is compiled once more: that is
# the safe direction, so a setting that a new version of JAX adds counts until it is named here.
_WITHOUT_EFFECT = re.compile(
    "cache|captured_constants|cuda_visible|cpu_devices|debug_leaked|distributed|dump|explain|guard|leaks|_log|mock|pgle|"
    "platform|pprint|preemption|proxy|recoverability|rocm_visible|share_binary|source_url|timeout|traceback|transfer|"
    "verbose"
)


def names_of_settings() -> list[str]:
    """Return the settings of JAX that a program depends on."""
    return sorted(name for name in jax.config.values if not _WITHOUT_EFFECT.search(name))


def settings_of_a_call() -> str:
    """Return the values of those settings that differ from call to call, which are part of a file's name."""
    return " ".join(str(getattr(jax.config, name)) for name in _OF_A_CALL)


def settings_of_a_process(names: list[str]) -> dict[str, str]:
    """Return the values of the others, which a file is compared with and replaced for."""
    values = jax.config.values
    return {name: str(values[name]) for name in names if name not in (*_OF_A_CALL, _DEVICE)}


def default_device() -> Any:
    """Return the device of arrays that are committed to none."""
    device = getattr(jax.config, _DEVICE)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def current_mesh() -> Any:
    """Return the mesh of `jax.set_mesh`, or the abstract one of `jax.sharding.use_abstract_mesh`, or None."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    # `set_mesh` sets both; `use_abstract_mesh` inside of it leaves the concrete one as it was.
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.axis_names == abstract.axis_names else abstract


def installation(device: Any) -> dict[str, str]:
    """Return by name all that must be equal where a program that was compiled for `device` is run."""
    found = {name: _version(name) for name in _PACKAGES}
    found["Python"] = ".".join(platform.python_version_tuple()[:2])
    found["backend"] = f"{device.platform} {device.client.platform_version}"
    found["device"] = device.device_kind
    found["XLA_FLAGS"] = " ".join(_flags())
    # On a CPU it is machine code for this processor, and would crash on one that lacks an instruction it uses.
    return found | ({"processor": _processor()} if device.platform == "cpu" else {})


@functools.cache
def _version(package: str) -> str:
    """Return the version of a package.

    As `importlib.metadata.version`, but the rest of the metadata is not parsed, which takes longer than loading a file.
    """
    try:
        files = distribution(package)
    except PackageNotFoundError:
        return "unknown"
    found = re.search(
        r"^Version: *(\S+)", files.read_text("METADATA") or files.read_text("PKG-INFO") or "", re.MULTILINE
    )
    return found[1] if found else "unknown"


def _flags() -> list[str]:
    """Return XLA's flags, but for two that do not change a program: where to dump, and how many devices to simulate."""
    flags = [flag for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") for flag in os.environ.get(name, "").split()]
    return [flag for flag in flags if not re.match("--xla_(dump|force_host_platform_device_count)", flag)]


@functools.cache
def _processor() -> str:
    """Return the architecture of the processor and a hash of its features, such as AVX-512."""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if re.match("flags|Features", line)), "")
    except OSError:  # no Linux
        features = platform.processor()
    return f"{platform.machine()} {hashlib.sha256(' '.join(sorted(features.split())).encode()).hexdigest()[:12]}"
