"""Scripts that run inside the peers' environments, which have NumPy but not simparallel.

`exchange` defines the measured work and `serve` talks to the driver; `mpi`, `gloo`, `gloo_ddp` and `gloo_pipeline` are
the peers, `vhdd` is Horovod's Adasum for `mpi`, and `torch_models` has the models that they train.
"""
