"""The one seam between arrays in host memory and on a GPU: `host` and `cuda` implement the same kernels."""
