"""The version of the library, which `pyproject.toml` has too; a test compares them."""

__version__ = "0.1.0"
