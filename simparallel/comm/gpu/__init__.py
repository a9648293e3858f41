"""Collectives of arrays on GPUs: over NCCL, or through GPU memory that the ranks share."""
