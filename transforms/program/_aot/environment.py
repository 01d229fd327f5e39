"""What a compiled program depends on beside itself: settings, and the installation and machine that it is made for."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import jax

# Those whose version is compared.
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
_DEVICE = "jax_default_device"  # devices are told apart by what they are
# Settings that make no other program. (Of the rest some make none either; then it is compiled once more.)
_WITHOUT_EFFECT = re.compile(
    "cache|captured_constants|cuda_visible|cpu_devices|debug_leaked|distributed|dump|explain|guard|leaks|_log|mock|pgle|"
    "platform|pprint|preemption|proxy|recoverability|rocm_visible|share_binary|source_url|timeout|traceback|transfer|"
    "verbose"
)


def names_of_settings() -> list[str]:
    """The settings of JAX that a program depends on."""
    return sorted(name for name in jax.config.values if not _WITHOUT_EFFECT.search(name))


def settings_of_a_call() -> str:
    """Those that differ from call to call."""
    return " ".join(str(getattr(jax.config, name)) for name in _OF_A_CALL)


def settings_of_a_process(names: list[str]) -> dict[str, str]:
    """The others of these names."""
    values = jax.config.values
    return {name: str(values[name]) for name in names if name not in (*_OF_A_CALL, _DEVICE)}


def default_device() -> Any:
    """The device of what is committed to none."""
    device = getattr(jax.config, _DEVICE)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def current_mesh() -> Any:
    """The mesh of `jax.set_mesh`, or the abstract one of `jax.sharding.use_abstract_mesh`, or None."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.axis_names == abstract.axis_names else abstract


def installation(device: Any) -> dict[str, str]:
    """What has to be the same for a program that was compiled for `device` to run there, by what to call it."""
    found = {name: _version(name) for name in _PACKAGES}
    found["Python"] = ".".join(platform.python_version_tuple()[:2])
    found["backend"] = f"{device.platform} {device.client.platform_version}"
    found["device"] = device.device_kind
    found["XLA_FLAGS"] = " ".join(_flags())
    # On a CPU it is the processor's own code, and one without an instruction that it uses would crash.
    return found | ({"processor": _processor()} if device.platform == "cpu" else {})


@functools.cache
def _version(package: str) -> str:
    """As `importlib.metadata.version`, but nothing else of the metadata is parsed: that takes longer than loading."""
    try:
        files = distribution(package)
    except PackageNotFoundError:
        return "unknown"
    found = re.search(
        r"^Version: *(\S+)", files.read_text("METADATA") or files.read_text("PKG-INFO") or "", re.MULTILINE
    )
    return found[1] if found else "unknown"


def _flags() -> list[str]:
    flags = [flag for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") for flag in os.environ.get(name, "").split()]
    return [flag for flag in flags if not re.match("--xla_(dump|force_host_platform_device_count)", flag)]


@functools.cache
def _processor() -> str:
    """The kind of processor, with what it can do."""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if re.match("flags|Features", line)), "")
    except OSError:  # no Linux
        features = platform.processor()
    return f"{platform.machine()} {hashlib.sha256(' '.join(sorted(features.split())).encode()).hexdigest()[:12]}"
