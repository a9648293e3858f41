"""`torch.backends.mps`."""


def is_available() -> bool:
    """Return False: there are no devices of this kind."""
    return False
