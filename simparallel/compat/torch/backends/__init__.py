"""`torch.backends`: settings of libraries that are not used here; a program that sets one gets a note."""

from simparallel.compat.torch.backends import cuda, cudnn, mps
