"""Jacobians and Hessians: dense by rows or columns, sparse by compressed products."""
