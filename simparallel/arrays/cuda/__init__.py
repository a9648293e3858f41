"""The GPU of a rank: streams, memory and captures. Arrays and kernels belong to the array library, see `backend`."""
