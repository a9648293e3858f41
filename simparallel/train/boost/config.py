"""Parse and check `boost_level` and `boost_config_dict`: MindSpore's names and defaults.

    Model(…, boost_level="O2", boost_config_dict={"boost": {"mode": "manual", "adasum": True}})

Unlike MindSpore, a request is never dropped: a combination in which one switch would disable another is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simparallel.base.checks import check_choice, check_count, check_flags, check_integer, check_number
from simparallel.errors import InputError

LEVELS: dict[str, tuple[str, ...]] = {
    "O0": (), "O1": ("less_bn", "grad_freeze"), "O2": ("less_bn", "grad_freeze", "adasum"),
}  # fmt: skip
SWITCHES = ("less_bn", "grad_freeze", "adasum", "grad_accumulation", "dim_reduce")
MODES = ("auto", "manual", "enable_all", "disable_all")
DEFAULTS: dict[str, dict[str, Any]] = {
    # Devices of a node; None takes the nodes of the described cluster, or 8 devices each.
    "common": {"device_number": None},
    "less_bn": {"fn_flag": True, "gc_flag": True},
    "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7, "total_steps": 65536, "seed": 0},
    "grad_accumulation": {"grad_accumulation_step": 1},
    "dim_reduce": {
        "rho": 0.55, "gamma": 0.9, "alpha": 0.001, "sigma": 0.4, "n_components": 32, "pca_mat_path": None,
        "weight_load_dir": None,
    },
}  # fmt: skip
_ALONE = "dim_reduce makes the step itself, in a few directions, so {others} would have no effect; switch one off"


@dataclass(frozen=True)
class BoostConfig:
    """The selected switches and their settings.

    Attributes:
        on: names of `SWITCHES`.
        settings: section -> setting -> value, with the defaults filled in.
        by_level: the level or mode "enable_all" switched them on, rather than the switches of mode "manual".
    """

    on: frozenset[str]
    settings: Mapping[str, Mapping[str, Any]]
    by_level: bool = False

    def __contains__(self, switch: str) -> bool:
        return switch in self.on


def parse(level: str = "O0", config: Mapping[str, Any] | None = None) -> BoostConfig:
    """Check the level and the dictionary, and return the selected accelerations.

    Args:
        level: "O0" nothing, "O1" less_bn and grad_freeze, "O2" these and adasum. If the network does not allow less_bn
            (it has no residual block, for example), it is left out with a warning; in mode "manual" that is an error.
        config: sections "boost" ("mode" and the switches), "common", "less_bn", "grad_freeze",
            "grad_accumulation" and "dim_reduce", see `DEFAULTS`. Mode "auto" (the default) follows the level,
            "manual" the switches, "enable_all" enables all that are compatible (all but dim_reduce), and
            "disable_all" none.

    Raises:
        InputError: an unknown name, a setting out of range, incompatible switches, or switches
            that "O0" would ignore.
    """
    check_choice("Model", "boost_level", level, LEVELS)
    sections = dict(config or {})
    boost = dict(sections.pop("boost", {}))
    _known("boost_config_dict", sections, ("boost", *DEFAULTS))
    _known("boost", boost, ("mode", *SWITCHES))
    mode = boost.pop("mode", "auto")
    check_choice("boost", "mode", mode, MODES)
    check_flags("boost", boost, boost)
    asked = {switch for switch, value in boost.items() if value}
    on = {
        "auto": set(LEVELS[level]), "manual": asked, "enable_all": set(SWITCHES) - {"dim_reduce"}, "disable_all": set(),
    }[mode]  # fmt: skip
    if level == "O0" and on:
        raise InputError(
            f"boost_level='O0' switches everything off, but mode {mode!r} requests {', '.join(sorted(on))}; use "
            "boost_level='O1'."
        )
    if mode != "manual" and asked - on:
        raise InputError(
            f"boost: mode {mode!r} leaves out {', '.join(sorted(asked - on))}, which the switches request; use "
            "mode 'manual'."
        )
    # less_bn changes the network, not the step, so it is compatible with dim_reduce.
    others = sorted(on & {"grad_freeze", "adasum", "grad_accumulation"})
    if "dim_reduce" in on and others:
        raise InputError(f"boost: {_ALONE.format(others=', '.join(others))}.")
    settings = {name: {**defaults, **_section(sections, name, defaults)} for name, defaults in DEFAULTS.items()}
    _check(settings, on)
    return BoostConfig(frozenset(on), settings, mode != "manual")


def _known(who: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise InputError(f"{who}: unknown {', '.join(map(repr, unknown))}; choose from {', '.join(names)}.")


def _section(sections: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    section = sections.get(name, {})
    if not isinstance(section, Mapping):
        raise InputError(f"boost_config_dict[{name!r}]={section!r} must be a dict.")
    _known(name, section, tuple(defaults))
    return dict(section)


def _check(settings: Mapping[str, Mapping[str, Any]], on: set[str]) -> None:
    positive = (("common", "device_number"), ("grad_freeze", "param_groups"), ("grad_freeze", "total_steps"),
                ("grad_accumulation", "grad_accumulation_step"), ("dim_reduce", "n_components"))  # fmt: skip
    for section, name in positive:
        if settings[section][name] is not None or name != "device_number":
            check_count(section, name, settings[section][name])
    freeze, reduce = settings["grad_freeze"], settings["dim_reduce"]
    check_integer("grad_freeze", "freeze_type", freeze["freeze_type"], high=1)
    check_number("grad_freeze", "freeze_p", freeze["freeze_p"], below=1.0, above=0.0)
    for name in ("rho", "gamma", "alpha", "sigma"):
        check_number("dim_reduce", name, reduce[name], below=1.0, above=0.0)
    if "dim_reduce" in on and (reduce["pca_mat_path"] is None) == (reduce["weight_load_dir"] is None):
        raise InputError(
            "dim_reduce: give either pca_mat_path, a .npy file of (n_components, number of weights), or "
            "weight_load_dir, a folder of checkpoints to find the directions from."
        )
