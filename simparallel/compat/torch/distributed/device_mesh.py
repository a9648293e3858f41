"""`torch.distributed.device_mesh`: see `sp.Mesh`."""

from __future__ import annotations

from typing import Any

from simparallel import Mesh


def init_device_mesh(device_type: str, mesh_shape: Any, *, mesh_dim_names: Any = None, **more: Any) -> Mesh:
    """Return a mesh of all ranks; axes without names are dim_0, dim_1 and so on."""
    return Mesh(mesh_shape, mesh_dim_names or tuple(f"dim_{i}" for i in range(len(mesh_shape))))
