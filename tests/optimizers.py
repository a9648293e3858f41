"""All optimizers of `sp.optim`, with settings that choose other arithmetic than the defaults."""

from __future__ import annotations

from typing import Any

from simparallel import optim

# Settings beside the defaults, which every optimizer is tested with.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{"weight_decay": 0.1}],
    "Adagrad": [{"weight_decay": 0.1, "lr_decay": 0.1}],
    "Adam": [{"weight_decay": 0.1}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}],
    "AdamW": [{"weight_decay": 0.0}, {"amsgrad": True, "weight_decay": 0.1}],
    "Adamax": [{"weight_decay": 0.1, "maximize": True}],
    "LAMB": [{"weight_decay": 0.1}],
    "LARS": [{"weight_decay": 0.1, "momentum": 0.9}],
    "Momentum": [{"use_nesterov": True, "weight_decay": 0.1, "loss_scale": 4.0}],
    "Muon": [{"nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 2}],
    "NAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RMSprop": [{"centered": True, "momentum": 0.5}, {"centered": True}, {"momentum": 0.5}, {"weight_decay": 0.1}],
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"weight_decay": 0.1},
        {"maximize": True},
    ],
}
# Arguments without a default.
NEEDED = {"Momentum": {"learning_rate": 0.1, "momentum": 0.9}}


def optimizer_names() -> list[str]:
    """Return all classes of optimizers in `sp.optim`, so that a new one is tested."""
    kinds = {name: getattr(optim, name) for name in optim.__all__}
    return [
        name
        for name, kind in sorted(kinds.items())
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
    ]


def suited(name: str, params: list[Any]) -> list[Any]:
    """Return the parameters that an optimizer takes."""
    return [p for p in params if p.ndim == 2] if name == "Muon" else params


def every_optimizer() -> list[tuple[str, dict[str, Any]]]:
    """Return each optimizer with its defaults, and with each of its settings."""
    return [(name, settings) for name in optimizer_names() for settings in ({}, *SETTINGS.get(name, []))]


def make(name: str, params: Any, settings: dict[str, Any]) -> optim.Optimizer:
    return getattr(optim, name)(params, **NEEDED.get(name, {}), **settings)
