"""Convolutions rewritten for CPUs: as matrix products, and with quick derivatives inside scans."""
