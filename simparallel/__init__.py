"""Distributed deep-learning training on one laptop."""

__version__ = "0.1.0"
