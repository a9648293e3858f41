"""Runs without data and their times: dry runs, predictions, and the calibrations of this machine and its GPU."""
