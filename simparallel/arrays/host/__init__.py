"""Kernels of arrays in host memory: tiled products, convolutions, accurate sums."""
