"""Boost: each switch works, alone and together; impossible combinations are refused."""

from __future__ import annotations

import sys
import warnings
from itertools import combinations
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.base.attributes import setting
from simparallel.errors import DataError, InputError
from simparallel.optim import FixedLossScaleManager
from simparallel.parallel import DistributedDataParallel
from simparallel.train.boost.boost import Boost, BoostedStep
from simparallel.train.boost.config import SWITCHES, parse
from simparallel.train.boost.dim_reduce import DimReduce, principal_directions
from simparallel.train.boost.freeze import freeze_sequence, frozen_layers
from simparallel.train.boost.less_bn import NormalizedLinear, centre, centred, normalize_head, remove_norms
from simparallel.train.step import TrainStep

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # devices need not import Hypothesis

LR = 0.1


def manual(**switches: bool) -> dict[str, Any]:
    return {"mode": "manual", **switches}


def mlp(seed: int = 0, dtype: Any = np.float64) -> sp.nn.Module:
    sp.manual_seed(seed)
    model = sp.nn.Sequential(sp.nn.Linear(6, 8), sp.nn.Tanh(), sp.nn.Linear(8, 4), sp.nn.Tanh(), sp.nn.Linear(4, 3))
    for param in model.parameters():
        param.data = param.data.astype(dtype)
    return model


def batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return rng.normal(size=(5, 6)), rng.integers(0, 3, 5)


def gradients(model: Any, rank: int, step: int) -> list[np.ndarray]:
    model.zero_grad()
    x, labels = batch(rank, step)
    sp.functions.cross_entropy(model(sp.Tensor(x)), labels).backward()
    return [param.grad.numpy().copy() for param in model.parameters()]


def weights(model: Any) -> list[np.ndarray]:
    return [param.numpy().copy() for param in model.parameters()]


def assert_close(results: Any, expected: Any, tolerance: float = 1e-12) -> None:
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)


# --- parsing of levels and switches --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "config", "on"),
    [
        ("O0", None, ""), ("O1", None, "less_bn grad_freeze"), ("O2", {}, "less_bn grad_freeze adasum"),
        ("O2", {"boost": manual(adasum=True, less_bn=False)}, "adasum"), ("O1", {"boost": {"mode": "disable_all"}}, ""),
        ("O1", {"boost": {"mode": "enable_all"}}, "less_bn grad_freeze adasum grad_accumulation"),
        ("O0", {"boost": {"mode": "disable_all"}}, ""),
    ],
)  # fmt: skip
def test_levels_and_modes(level, config, on):
    assert parse(level, config).on == set(on.split())


@pytest.mark.parametrize(
    ("level", "config"),
    [
        ("O3", None),
        ("O1", {"boost": {"mode": "best"}}),
        ("O1", {"boost": manual(adasun=True)}),
        ("O1", {"bost": {}}),
        ("O1", {"boost": manual(adasum=1)}),
        ("O1", {"grad_freeze": {"freeze_q": 1}}),
        ("O1", {"grad_freeze": {"freeze_p": 1.0}}),
        ("O1", {"grad_freeze": {"freeze_type": 2}}),
        ("O1", {"grad_freeze": 3}),
        ("O1", {"grad_accumulation": {"grad_accumulation_step": 0}}),
        ("O1", {"dim_reduce": {"rho": 1.5}}),
        ("O0", {"boost": manual(adasum=True)}),
        ("O1", {"boost": {"mode": "auto", "adasum": True}}),
        ("O1", {"boost": manual(dim_reduce=True)}),
    ],
)
def test_refused(level, config):
    with refused(InputError):
        parse(level, config)


@pytest.mark.parametrize("pair", list(combinations(SWITCHES, 2)))
def test_no_switch_turns_another_one_off(pair):
    config = {"boost": manual(**dict.fromkeys(pair, True)), "dim_reduce": {"pca_mat_path": "p.npy"}}
    if "dim_reduce" in pair and "less_bn" not in pair:
        with refused(InputError):
            parse("O1", config)
    else:
        assert parse("O1", config).on == set(pair)


# --- less_bn -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "norms", "removed"), [(sp.models.resnet50, 53, 32), (sp.models.resnet18, 20, 8)])
def test_less_bn_keeps_the_norm_before_each_addition(make, norms, removed):
    model = make(10, "cifar")
    before = [name for name, module in model.named_modules() if isinstance(module, sp.nn.BatchNorm2d)]
    taken = remove_norms(model)
    after = [name for name, module in model.named_modules() if isinstance(module, sp.nn.BatchNorm2d)]
    assert (len(before), len(taken)) == (norms, removed)
    assert sorted(taken + after) == sorted(before)
    assert "bn1" in after
    last = "bn3" if removed == 32 else "bn2"
    assert all(name.endswith((last, "downsample.1")) or name == "bn1" for name in after)


def test_normalized_head_gives_scaled_cosines():
    """The head returns scaled cosines, and its scale is trained."""
    model = mlp()
    optimizer = sp.optim.Momentum(
        [{"params": list(model.parameters())}, {"order_params": list(model.parameters())}], LR, 0.9
    )
    weight = model[4].weight
    assert normalize_head(model, optimizer) == "4"
    head = model[4]
    assert isinstance(head, NormalizedLinear)
    assert head.weight is weight
    assert optimizer.parameters[-1] is head.multiplier
    x = np.random.default_rng(0).normal(size=(5, 4))
    rows = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, weight.numpy())]
    np.testing.assert_allclose(head(sp.Tensor(x)).numpy(), rows[0] @ rows[1].T, rtol=1e-9)
    before = head.multiplier.item()
    gradients(model, 0, 0)
    optimizer.step()
    assert head.multiplier.item() != before


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_normalized_head_of_zeros_is_zero(dtype):
    head = NormalizedLinear(mlp(dtype=dtype)[4])
    x = sp.Tensor(np.zeros((2, 4), dtype), requires_grad=True)
    y = head(x)
    y.sum().backward()
    assert not y.numpy().any()
    assert np.isfinite(x.grad.numpy()).all()


def test_normalized_head_in_mixed_precision():
    """Squares of 300 overflow float16."""
    model = sp.nn.Sequential(sp.nn.Identity(), NormalizedLinear(mlp(dtype=np.float32)[4]))
    x = np.full((1, 4), 300.0, np.float32)
    alone = model(sp.Tensor(x)).numpy()
    np.testing.assert_allclose(sp.nn.auto_mixed_precision(model, "O2")(sp.Tensor(x)).numpy(), alone, rtol=2e-3)


def test_centred_gradients():
    grad = np.random.default_rng(0).normal(size=(3, 2, 5, 5)) + 1
    expected = grad - grad.mean(axis=(1, 2, 3), keepdims=True)
    centre(grad)
    np.testing.assert_allclose(grad, expected)
    net = sp.nn.Sequential(
        sp.nn.Conv2d(4, 4, 3), sp.nn.Conv2d(4, 4, 3, groups=2), sp.nn.BatchNorm2d(4), sp.nn.Linear(2, 2)
    )
    assert [id(p) for p in centred(net)] == [id(net[0].weight), id(net[3].weight)]


def test_less_bn_refuses_other_networks():
    model = mlp()
    optimizer = sp.optim.SGD(model.parameters(), lr=LR)
    for network, chosen in ((model, optimizer), (model, None), (DistributedDataParallel(model), optimizer)):
        with refused(InputError):
            Boost("O1", {"boost": manual(less_bn=True)}).change(network, chosen)


class Block(sp.nn.Module):
    """The smallest block with a removable norm."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = sp.nn.Conv2d(1, 1, 1), sp.nn.BatchNorm2d(1)
        self.conv2, self.bn2 = sp.nn.Conv2d(1, 1, 1), sp.nn.BatchNorm2d(1)

    def forward(self, x):
        return x + self.bn2(self.conv2(self.bn1(self.conv1(x))))


def test_level_skips_inapplicable_switches():
    for network in (mlp(), sp.nn.Sequential(Block())):
        before = repr(network)
        boost, optimizer = Boost("O1"), sp.optim.SGD(network.parameters(), lr=LR)
        with pytest.warns(UserWarning, match="less_bn is left out: the network has no"):
            boost.change(network, optimizer)
        assert boost.config.on == {"grad_freeze"}
        assert repr(network) == before


def test_second_model_of_a_changed_network():
    network = sp.nn.Sequential(Block(), sp.nn.Flatten(), sp.nn.Linear(4, 2))
    first = Boost("O2")
    first.change(network, sp.optim.SGD(network.parameters(), lr=LR))
    changed = repr(network)
    later = sp.optim.SGD(network.parameters(), lr=LR), sp.optim.SGD([network[0].conv1.weight], lr=LR)
    for optimizer in later:
        again = Boost("O2", {"boost": manual(less_bn=True)})
        again.change(network, optimizer)
        assert (first.removed_norms, again.removed_norms) == (["0.bn1"], [])
        assert [p.name for p in optimizer.parameters].count("2.multiplier") == 1
    assert repr(network) == changed


def test_switches_without_effect_warn():
    config = {"boost": manual(grad_accumulation=True)}
    network = mlp()
    with pytest.warns(UserWarning, match="gradients of 1 step"):
        Boost("O1", config).change(network, sp.optim.SGD(network.parameters(), lr=LR))


# --- grad_freeze ---------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.sampled_from((0, 1)), st.floats(0.2, 0.9), st.integers(0, 99))
def test_freeze_sequences(groups, freeze_type, share, seed):
    sequence = freeze_sequence(groups, freeze_type, share, 2000, seed)
    assert len(sequence) == 2000
    assert set(sequence) <= set(range(groups))
    assert sequence == freeze_sequence(groups, freeze_type, share, 2000, seed)
    if groups > 1 and freeze_type == 1:
        assert abs(sequence.count(0) / 2000 - share) < 0.01


def test_freeze_sequences_as_published():
    assert freeze_sequence(4, 0, 0.5, 9) == [0, 0, 0, 1, 2, 3, 0, 0, 0]
    sequence = freeze_sequence(10, 1, 0.7, 60000)
    frozen_steps = [j for j in sequence if j]
    assert 0.298 < len(frozen_steps) / 60000 < 0.302
    shares = [frozen_steps.count(j) / len(frozen_steps) for j in range(1, 10)]
    np.testing.assert_allclose(shares, [(10 - j) / 45 for j in range(1, 10)], atol=0.01)


def test_frozen_parameters_collect_nothing():
    model = mlp()
    params = list(model.parameters())
    with setting(*frozen_layers(params, 3)[1], requires_grad=False):
        model.zero_grad()
        x, labels = batch(0, 0)
        sp.functions.cross_entropy(model(sp.Tensor(x)), labels).backward()
    assert [p.grad is None for p in params] == [True, True, False, False, False, False]
    assert all(p.requires_grad for p in params)


# --- steps ---------------------------------------------------------------------------------------------


def boosted(config: dict[str, Any], steps: int, optimizer: str, manager: Any = None) -> Any:
    """Train with the mean over the ranks; return the weights after each step."""
    sp.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    model = mlp()
    scale = {"loss_scale": 1024.0} if manager == "fixed" else {}
    made = {
        "sgd": lambda: sp.optim.SGD(model.parameters(), lr=LR),
        "momentum": lambda: sp.optim.Momentum(model.parameters(), LR, 0.9, **scale),
    }[optimizer]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = Boost("O1", config).make_step(
            model,
            sp.functions.cross_entropy,
            made,
            FixedLossScaleManager(1024, drop_overflow_update=False) if manager == "fixed" else None,
            sp.get_world_size() > 1,
        )
    seen = []
    for number in range(steps):
        step(batch(sp.get_rank(), number))
        seen.append(weights(model))
    sp.reset_auto_parallel_context()
    return seen


def averaged(model: Any, ranks: Any, step: int) -> list[np.ndarray]:
    return [sum(g) / len(g) for g in zip(*(gradients(model, rank, step) for rank in ranks), strict=True)]


@pytest.mark.parametrize("count", [1, 2])
def test_accumulation_equals_the_larger_batch(inline, count):
    config = {"boost": manual(grad_accumulation=True), "grad_accumulation": {"grad_accumulation_step": 3}}
    model = mlp()
    optimizer = sp.optim.Momentum(model.parameters(), LR, 0.9)
    for first in (0, 3):
        parts = [averaged(model, range(count), first + i) for i in range(3)]
        optimizer([sum(g) / 3 for g in zip(*parts, strict=True)])
    for seen in inline.run(count, boosted, config, 6, "momentum"):
        assert_close(seen[-1], weights(model))
        assert_close(seen[1], weights(mlp()))  # no change before the third


@pytest.mark.parametrize("device_number", [1, 2])
@pytest.mark.parametrize("manager", [None, "fixed"])
def test_adasum_of_deltas_across_nodes(inline, device_number, manager):
    config = {"boost": manual(adasum=True), "common": {"device_number": device_number}}
    nodes = [range(start, start + device_number) for start in range(0, 4, device_number)]
    models = [mlp() for _ in nodes]
    optimizers = [sp.optim.Momentum(model.parameters(), LR, 0.9) for model in models]
    for step in range(3):
        start = weights(models[0])
        for node, model, optimizer in zip(nodes, models, optimizers, strict=True):
            optimizer(averaged(model, node, step))
        deltas = [[w - s for w, s in zip(weights(model), start, strict=True)] for model in models]
        for model in models:
            for param, s, d in zip(model.parameters(), start, sp.adasum(deltas), strict=True):
                param.data[...] = s + d
    for seen in inline.run(4, boosted, config, 3, "momentum", manager):
        assert_close(seen[-1], weights(models[0]))


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = mlp()
        config = {"boost": manual(adasum=True)}
        Boost("O2", config).make_step(model, None, sp.optim.SGD(model.parameters(), lr=LR), None, True)
    return [str(warning.message) for warning in caught]


def test_one_node_of_eight_warns(inline):
    told = [text for texts in inline.run(2, warned) for text in texts]
    assert len(told) == 1
    assert "plain MEAN" in told[0]


def alone_with_adasum(count: int, is_parallel: bool) -> str:
    model = mlp()
    config = {"boost": manual(adasum=True), "common": {"device_number": count}}
    try:
        Boost("O2", config).make_step(model, None, sp.optim.SGD(model.parameters(), lr=LR), None, is_parallel)
    except InputError as error:
        return str(error)
    return ""


def test_adasum_outside_its_mode_is_refused(inline):
    assert "data-parallel mode" in inline.run(2, alone_with_adasum, 1, False)[0]
    assert "3 ranks are not divisible" in inline.run(3, alone_with_adasum, 2, True)[0]


def reference_freeze(count: int, steps: int, every: int) -> list[np.ndarray]:
    """Compute the reference: every j has its own momentum."""
    model = mlp()
    params = list(model.parameters())
    velocity: dict[int, list[np.ndarray]] = {}
    for step in range(steps):
        j = freeze_sequence(3, 0, 0.5, 50)[step]
        parts = [averaged(model, range(count), step * every + i) for i in range(every)]
        grads = [sum(g) / every for g in zip(*parts, strict=True)]
        moments = velocity.setdefault(j, [np.zeros(p.shape) for p in params])
        for i in range(len(params) * j // 3, len(params)):
            moments[i] = 0.9 * moments[i] + grads[i]
            params[i].data -= LR * moments[i]
    return weights(model)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("every", [1, 2])
def test_freezing_trains_suffixes_with_own_momenta(inline, count, every):
    config = {
        "boost": manual(grad_freeze=True, grad_accumulation=every > 1),
        "grad_freeze": {"param_groups": 3, "freeze_type": 0, "freeze_p": 0.5, "total_steps": 50},
        "grad_accumulation": {"grad_accumulation_step": every},
    }
    for seen in inline.run(count, boosted, config, 7 * every, "momentum"):
        assert_close(seen[-1], reference_freeze(count, 7, every))


def test_freezing_and_adasum_together(inline):
    config = {
        "boost": manual(grad_freeze=True, adasum=True), "common": {"device_number": 1},
        "grad_freeze": {"param_groups": 3, "freeze_type": 0, "freeze_p": 0.5, "total_steps": 50},
    }  # fmt: skip
    results = inline.run(2, boosted, config, 5, "sgd")
    model = mlp()
    params = list(model.parameters())
    for step, j in enumerate(freeze_sequence(3, 0, 0.5, 5)):
        total = sp.adasum([gradients(model, rank, step) for rank in range(2)])
        for i in range(len(params) * j // 3, len(params)):
            params[i].data -= LR * total[i]
    for seen in results:
        assert_close(seen[-1], weights(model))


def test_nothing_is_boosted_by_default():
    model = mlp()
    step = Boost().make_step(model, None, sp.optim.SGD(model.parameters(), lr=LR), None, False)
    assert type(step) is TrainStep


# --- dim_reduce ----------------------------------------------------------------------------------------


def test_principal_directions_span_the_weights():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(30, 3)))[0].T
    p = principal_directions(list(rng.normal(size=(10, 3)) @ basis + 7.0), 3)
    np.testing.assert_allclose(p @ p.T, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(p @ basis.T @ basis, p, atol=1e-12)
    with refused(InputError):
        principal_directions([np.ones(3)] * 3, 3)


def test_dim_reduce_minimises_a_quadratic():
    """Quasi-Newton steps (BFGS) in the given directions find a quadratic's minimum."""
    rng = np.random.default_rng(1)
    q = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    hessian, target = q @ np.diag([1.0, 2.0, 4.0, 1.0, 1.0, 1.0]) @ q.T, rng.normal(size=6)
    w = sp.Tensor(np.zeros(6), requires_grad=True)
    directions = q.T[:3]

    def loss() -> float:
        e = w.numpy() - target
        return float(0.5 * e @ hessian @ e)

    reduce = DimReduce([w], directions, rho=0.55, gamma=0.9, alpha=0.001, sigma=0.4)
    tried = [reduce.step([hessian @ (w.numpy() - target)], loss(), loss) for _ in range(40)]
    np.testing.assert_allclose(directions @ w.numpy(), directions @ target, atol=1e-4)
    assert set(tried) <= {0, 1, 2}
    np.testing.assert_allclose(reduce.inverse_hessian @ np.diag([1.0, 2.0, 4.0]), np.eye(3), atol=0.2)
    apart = np.linalg.norm(q.T[3:] @ (w.numpy() - target))
    assert apart < np.linalg.norm(q.T[3:] @ target)  # slowly, by the residual momentum


@pytest.mark.parametrize("count", [1, 2])
def test_dim_reduce_from_checkpoints_or_a_file(inline, tmp_path, count):
    model = mlp()
    optimizer = sp.optim.SGD(model.parameters(), lr=0.5)
    flat = []
    for step in range(6):
        sp.save_checkpoint(model, tmp_path / f"{step}.safetensors")
        flat.append(np.concatenate([w.ravel() for w in weights(model)]))
        optimizer(averaged(model, range(count), step))
    np.save(tmp_path / "p.npy", principal_directions(flat, 4))
    results = []
    for source in ({"weight_load_dir": str(tmp_path)}, {"pca_mat_path": str(tmp_path / "p.npy")}):
        config = {"boost": manual(dim_reduce=True), "dim_reduce": {"n_components": 4, "alpha": 0.1, **source}}
        results.append(inline.run(count, boosted, config, 5, "sgd"))
    for one, other in zip(*results, strict=True):
        assert_close(one[-1], other[-1], 1e-9)
    assert len({b"".join(w.tobytes() for w in seen[-1]) for seen in results[0]}) == 1
    start, end = mlp(), mlp()
    for param, w in zip(end.parameters(), results[0][0][-1], strict=True):
        param.data[...] = w

    def mean_loss(model: Any) -> float:
        losses = [
            sp.functions.cross_entropy(model(sp.Tensor(x)), labels).item()
            for x, labels in (batch(rank, step) for rank in range(count) for step in range(5))
        ]
        return sum(losses) / len(losses)

    assert mean_loss(end) < mean_loss(start)


def test_directions_after_less_bn(tmp_path):
    """The optimizer still has parameters of removed norms; no checkpoint has them."""
    block, settings = sp.models.resnet.BasicBlock, {"n_components": 2, "weight_load_dir": str(tmp_path)}
    boost = Boost("O1", {"boost": manual(less_bn=True, dim_reduce=True), "dim_reduce": settings})
    network = sp.models.resnet.ResNet(block, (1,), 3, "cifar", in_channels=1)
    optimizer = sp.optim.SGD(network.parameters(), lr=LR)
    boost.change(network, optimizer)
    for number in range(4):
        sp.save_checkpoint(network, tmp_path / f"{number}.safetensors")
        for param in network.parameters():
            param.data += np.random.default_rng(number).normal(size=param.shape).astype(np.float32) / 100
    before = weights(network)
    step = boost.make_step(network, sp.functions.cross_entropy, optimizer, None, False)
    step((np.random.default_rng(9).normal(size=(4, 1, 4, 4)).astype(np.float32), np.arange(4) % 3))
    assert any((now != was).any() for now, was in zip(weights(network), before, strict=True))


def test_bad_directions_are_refused(tmp_path):
    model = mlp()
    optimizer = sp.optim.SGD(model.parameters(), lr=LR)
    np.save(tmp_path / "p.npy", np.ones((2, 5)))
    (tmp_path / "text.npy").write_text("no numbers")
    sp.save_checkpoint(sp.nn.Linear(2, 2), tmp_path / "other.safetensors")
    for source in (
        {"pca_mat_path": tmp_path / "p.npy"},
        {"pca_mat_path": tmp_path / "text.npy"},
        {"weight_load_dir": tmp_path},
    ):
        config = {"boost": manual(dim_reduce=True), "dim_reduce": {"n_components": 2, **source}}
        with refused(DataError):
            Boost("O1", config).make_step(model, None, optimizer, None, False)


# --- through Model -------------------------------------------------------------------------------------


def test_model_takes_level_and_dictionary():
    sp.manual_seed(0)
    network = sp.models.resnet.ResNet(sp.models.resnet.BasicBlock, (1, 1), 4, "cifar", in_channels=1)
    params = list(network.parameters())
    optimizer = sp.optim.Momentum(params, 0.05, 0.9, loss_scale=1024.0)
    model = sp.Model(
        network,
        sp.nn.CrossEntropyLoss(),
        optimizer,
        amp_level="O2",
        boost_level="O1",
        keep_batchnorm_fp32=False,
        loss_scale_manager=FixedLossScaleManager(1024, drop_overflow_update=False),
        boost_config_dict={
            "boost": manual(less_bn=True, grad_freeze=True, grad_accumulation=True),
            "grad_accumulation": {"grad_accumulation_step": 2},
            "grad_freeze": {"param_groups": 4},
        },
    )
    assert isinstance(model._step, BoostedStep)
    rng = np.random.default_rng(0)
    data = [(rng.normal(size=(4, 1, 8, 8)).astype(np.float32), np.arange(4)) for _ in range(4)]
    before = [p.numpy().copy() for p in params]
    history = model.train(1, data, progress=False)
    assert len(history.epoch) == 1
    assert any((p.numpy() != b).any() for p, b in zip(params, before, strict=True))
    assert isinstance(dict(network.named_modules())["layer1.0.bn1"], sp.nn.Identity)
    with refused(InputError):
        sp.Model(mlp(dtype=np.float32), boost_level="O9")
