"""Read the `config.json` of a Hugging Face model as a `TransformerShape`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from simparallel.base.files import parse_json, read_text
from simparallel.base.names import did_you_mean
from simparallel.errors import InputError
from simparallel.simulate.transformer import TransformerShape

MAX_BYTES = 1 << 20
# The longest sequence that is assumed for a model that allows longer ones.
_LONGEST = 4096
_COMMON = {
    "num_layers": "num_hidden_layers", "width": "hidden_size", "num_heads": "num_attention_heads",
    "vocabulary": "vocab_size", "num_kv_heads": "num_key_value_heads", "head_size": "head_dim",
    "mlp_width": "intermediate_size",
}  # fmt: skip
_LLAMA = {
    "is_gated": True, "has_layer_norm": False, "has_qkv_bias": False, "has_bias": False, "has_dropout": False,
    "num_positions": 0, "is_tied": False,
}  # fmt: skip
_EXPERTS = {
    "num_experts": "num_experts", "active_experts": "num_experts_per_tok", "expert_width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
}  # fmt: skip
_DEEPSEEK = {
    "num_layers": "num_hidden_layers", "width": "hidden_size", "num_heads": "num_attention_heads",
    "vocabulary": "vocab_size", "mlp_width": "intermediate_size", "query_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank", "rotary_size": "qk_rope_head_dim", "value_size": "v_head_dim",
    "num_experts": "n_routed_experts", "active_experts": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size", "num_dense": "first_k_dense_replace",
}  # fmt: skip
_GPT2 = {
    "num_layers": "n_layer", "width": "n_embd", "num_heads": "n_head", "vocabulary": "vocab_size",
    "mlp_width": "n_inner", "num_positions": "n_positions",
}  # fmt: skip
# model_type -> (name of a size -> its key, what all models of the type have).
_TYPES: Mapping[str, tuple[Mapping[str, str], Mapping[str, Any]]] = {
    "gpt2": (_GPT2, {}),
    "llama": (_COMMON, _LLAMA),
    "mistral": (_COMMON, _LLAMA),
    "qwen2": (_COMMON, _LLAMA | {"has_qkv_bias": True}),
    "qwen3": (_COMMON, _LLAMA | {"has_query_norm": True}),
    "mixtral": (
        _COMMON | {"num_experts": "num_local_experts", "active_experts": "num_experts_per_tok",
                   "expert_width": "intermediate_size"},
        _LLAMA,
    ),
    "qwen2_moe": (_COMMON | _EXPERTS, _LLAMA | {"has_qkv_bias": True}),
    "qwen3_moe": (_COMMON | _EXPERTS, _LLAMA | {"has_query_norm": True}),
    "deepseek_v2": (_DEEPSEEK, _LLAMA),
    "deepseek_v3": (_DEEPSEEK, _LLAMA),
}  # fmt: skip
# Features that would change the sizes, with the only value that is known here.
_ONLY = {"decoder_sparse_step": 1, "moe_layer_freq": 1, "mlp_only_layers": [], "add_cross_attention": False}


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """Return the configurations that come with the package, by name."""
    text = files("simparallel.simulate").joinpath("configs.json").read_text("utf-8")
    return json.loads(text)


def read_config(config: Mapping[str, Any] | str | os.PathLike[str], length: int | None = None) -> TransformerShape:
    """Return the sizes of a model.

    Args:
        config: a dict with the keys of a `config.json`, the path of such a file, or a name of `shipped`. The model type
            is one of gpt2, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, deepseek_v2, deepseek_v3.
        length: tokens of a sequence; None for the longest one that the model allows, at most 4,096.

    Raises:
        InputError: an unknown name or type, a file that cannot be read, a key that is missing or has a value that
            is not supported, or a `length` beyond a learned table of positions.
    """
    where = "config"
    if not isinstance(config, Mapping):
        where = os.fspath(config)
        if where in shipped():
            config = shipped()[where]
        elif where.endswith(".json") or os.path.basename(where) != where:
            config = _load(where)
        else:
            raise InputError(
                f"config {where!r} is neither a path that ends with .json nor one of {', '.join(shipped())}."
                + did_you_mean(where, shipped())
            )
    return _shape(dict(config), where, length)


def _load(path: str) -> dict[str, Any]:
    try:
        data = parse_json(read_text(path, MAX_BYTES), lambda data: data)
    except InputError as error:
        raise InputError(f"{path}: {error}.") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: it holds a {type(data).__name__}; a config.json holds an object.")
    return data


def _shape(config: dict[str, Any], where: str, length: int | None) -> TransformerShape:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InputError(f"{where}: model_type={kind!r} is not one of {', '.join(_TYPES)}.")
    for name, value in _ONLY.items():
        if config.get(name) not in (None, value):
            raise InputError(f"{where}: {name}={config[name]!r} is not supported, only {value!r}.")
    keys, settings = _TYPES[kind]
    sizes = dict(settings)
    for name, key in keys.items():
        if config.get(key) is not None:
            sizes[name] = config[key]
    missing = [keys[name] for name in ("num_layers", "width", "num_heads", "vocabulary") if name not in sizes]
    if missing:
        raise InputError(f"{where}: {', '.join(missing)} is missing; a config of {kind} has it.")
    if "tie_word_embeddings" in config:
        sizes["is_tied"] = bool(config["tie_word_embeddings"])
    if "attention_bias" in config and kind != "qwen2":
        sizes["has_qkv_bias"] = bool(config["attention_bias"])
    if kind == "gpt2":
        sizes["has_dropout"] = bool(config.get("resid_pdrop", 0.1))
        sizes.setdefault("num_positions", 1024)
    if sizes.get("kv_rank"):
        sizes["head_size"] = config.get("qk_nope_head_dim", 0) + sizes["rotary_size"]
        sizes["shared_width"] = (config.get("n_shared_experts") or 0) * sizes.get("expert_width", 0)
    allowed = sizes.get("num_positions") or config.get("max_position_embeddings", _LONGEST)
    if length is None:
        length = min(allowed, _LONGEST)
    elif sizes.get("num_positions") and length > allowed:
        raise InputError(f"{where}: length={length} is beyond the {allowed} learned positions of the model.")
    return TransformerShape(length=length, **sizes)
