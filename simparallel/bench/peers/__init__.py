"""Scripts that run inside the peers' environments, which have NumPy but not simparallel.

`exchange` says what is measured and `serve` speaks with the driver; `mpi`, `gloo` and `gloo_ddp` are the peers,
`torch_models` is what they train.
"""
