"""Compiled programs kept in files for other processes."""
