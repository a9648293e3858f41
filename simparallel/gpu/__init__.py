"""The GPU of a rank: its streams and its memory. Arrays and kernels are the array library's, see `backend`."""
