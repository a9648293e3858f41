"""Parameters, gradients and optimizer state in slices over the ranks: ZeRO and FSDP."""
