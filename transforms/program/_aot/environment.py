"""The environment that a compiled program depends on: settings of JAX, package versions, and the machine."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

# The packages whose versions are part of the identity.
_PACKAGES = ("plurax", "jax", "jaxlib", "flax", "optax", "numpy")
# Flags for dumps and for the number of simulated devices.
_FLAGS_WITHOUT_EFFECT = "--xla_(dump|force_host_platform_device_count)"
_DEVICE = "jax_default_device"  # devices are compared by their kind, not by this setting
# Settings that do not change the program. Any other setting is part of the identity, also one that a new version of JAX
# adds: the worst case is an unnecessary compilation.
_WITHOUT_EFFECT = re.compile(
    "cache|captured_constants|cuda_visible|cpu_devices|debug_leaked|distributed|dump|explain|guard|leaks|_log|mock|pgle|"
    "platform|pprint|preemption|proxy|recoverability|rocm_visible|share_binary|source_url|timeout|traceback|transfer|"
    "verbose"
)


def settings_of_jax() -> dict[str, Any]:
    """Return the settings of JAX that a program depends on."""
    return {name: value for name, value in sorted(jax.config.values.items()) if _has_effect(name)}


@functools.cache
def _has_effect(setting: str) -> bool:
    return not _WITHOUT_EFFECT.search(setting)


def default_device() -> Any:
    """Return the device of uncommitted arrays."""
    device = getattr(jax.config, _DEVICE)
    return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def current_mesh() -> Any:
    """Return the mesh of `jax.set_mesh`, or the abstract mesh of `jax.sharding.use_abstract_mesh`, or None."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    # `set_mesh` sets both meshes; `use_abstract_mesh` inside it leaves the concrete mesh unchanged.
    mesh = jax.sharding.get_mesh()
    return mesh if mesh.axis_names == abstract.axis_names else abstract


def identity_of_environment(device: Any, settings: dict[str, Any]) -> dict[str, str]:
    """Return, by name, every property that must be equal to run a program that was compiled for `device`."""
    found = {name: _version(name) for name in _PACKAGES}
    found["Python"] = ".".join(platform.python_version_tuple()[:2])
    found["backend"] = f"{device.platform} {device.client.platform_version}"
    found["device"] = device.device_kind
    flags = [flag for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") for flag in os.environ.get(name, "").split()]
    found["XLA_FLAGS"] = " ".join(flag for flag in flags if not re.match(_FLAGS_WITHOUT_EFFECT, flag))
    # On a CPU the program is machine code for this processor, and would crash on one that lacks an instruction.
    found["processor"] = _processor() if device.platform == "cpu" else ""
    return found | {name: str(value) for name, value in settings.items() if name != _DEVICE}


def _version(package: str) -> str:
    """Return the version of a package; that of an imported module is there, and others are read from files (0.7 ms)."""
    found = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


@functools.cache
def _processor() -> str:
    """Return the architecture of the processor and a hash of its features, such as AVX-512."""
    try:
        with open("/proc/cpuinfo") as file:
            features = next((line for line in file if re.match("flags|Features", line)), "")
    except OSError:  # not on Linux
        features = platform.processor()
    return f"{platform.machine()} {hashlib.sha256(' '.join(sorted(features.split())).encode()).hexdigest()[:12]}"
