"""Sparse Jacobians: patterns detected in programs, columns colored, and a few products that give all entries."""
