"""Scripts that run inside the peers' environments, which have NumPy but not simparallel.

`exchange` says what is measured and `serve` speaks with the driver; `mpi` and `gloo` are the peers.
"""
