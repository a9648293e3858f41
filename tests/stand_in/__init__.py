"""The stand-in for CuPy that the tests use where there is no GPU: `strict`. Nothing here is installed."""
