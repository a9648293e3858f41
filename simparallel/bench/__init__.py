"""Measurements beside peers: always as ratios, taken in one interleaved run."""
