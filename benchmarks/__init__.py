"""Measurements against peers: always ratios, from one interleaved run."""
