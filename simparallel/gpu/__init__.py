"""The GPU of a rank: streams, memory and captures. Arrays and kernels are the array library's, see `backend`."""
