"""`torch.backends.cuda`."""

from __future__ import annotations

from types import ModuleType

from simparallel.compat.front import Settings, unused

matmul: ModuleType = Settings("torch.backends.cuda.matmul")
vars(matmul).update(allow_tf32=False)


def enable_flash_sdp(enabled: bool) -> None:
    """Choose the kernel of attention: noted only, because there is one."""
    unused("torch.backends.cuda", scaled_dot_product_attention=enabled)


enable_mem_efficient_sdp = enable_math_sdp = enable_flash_sdp
