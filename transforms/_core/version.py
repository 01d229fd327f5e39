"""The version of the library, which `pyproject.toml` has too; a test compares them."""

# Written here and not asked of the installed package: reading its metadata takes longer than importing this.
__version__ = "0.1.0"
