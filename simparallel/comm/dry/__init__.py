"""Ranks without data: the medium of dry runs, and the folding of ranks that are alike."""
