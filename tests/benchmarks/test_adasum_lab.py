"""The Adasum lab: faithful workers, combinations, training results, command and pictures."""

from __future__ import annotations

import math
import sys
from functools import partial

import cloudpickle
import matplotlib
import numpy as np
import pytest
from refusals import refused

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import simparallel as sp
from benchmarks import adasum_lab as lab
from benchmarks.adasum_pictures import plot_accuracies, plot_costs
from simparallel import view
from simparallel.errors import InputError
from simparallel.parallel import DistributedDataParallel
from simparallel.parallel.ddp import comm_hooks

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def digits(workers: int, batch_size: int = 4) -> tuple[np.ndarray, np.ndarray]:
    images, labels = sp.data.digits("train")[: workers * batch_size]
    return images.reshape(workers, batch_size, 64), labels.reshape(workers, batch_size)


def test_one_backward_gives_all_worker_gradients():
    team = lab.Workers(3, 8, seed=1)
    images, labels = digits(3)
    loss, own = team.gradients(images, labels)
    losses = []
    for worker in range(3):
        team.model.zero_grad()
        alone = sp.functions.cross_entropy(team.model(sp.Tensor(images[worker])), labels[worker])
        alone.backward()
        losses.append(float(alone))
        for grad, param in zip(own[worker], team.model.parameters(), strict=True):
            np.testing.assert_allclose(grad, param.grad.numpy(), rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(sum(losses) / 3)


def one_step(seed: int) -> list[np.ndarray]:
    """Train one step on ranks with the lab's batches."""
    model = DistributedDataParallel(lab.Workers(1, 8, seed).model)
    model.register_comm_hook(None, comm_hooks.adasum_hook)
    images, labels = digits(sp.get_world_size())
    sp.functions.cross_entropy(model(sp.Tensor(images[sp.get_rank()])), labels[sp.get_rank()]).backward()
    return [param.grad.numpy().copy() for param in model.parameters()]


def test_ranks_match_the_lab():
    expected = lab.combine(lab.Workers(4, 8, seed=2).gradients(*digits(4))[1], "adasum")
    for result in sp.launch(one_step, args=(2,), world_size=4, transport="inline", echo=False):
        for grad, wanted in zip(result, expected, strict=True):
            np.testing.assert_allclose(grad, wanted, rtol=2e-4, atol=1e-6)


def test_ways_to_combine():
    grads = [[np.array([1.0, 0.0]), np.array([2.0])], [np.array([0.0, 1.0]), np.array([4.0])]]
    told = {how: [layer.tolist() for layer in lab.combine(grads, how)] for how in lab.HOWS}
    assert told["mean"] == [[0.5, 0.5], [3.0]]
    assert told["sum"] == [[1.0, 1.0], [6.0]]
    assert told["adasum"] == [[1.0, 1.0], [3.0]]
    assert told["adasum flat"] != told["adasum"]
    assert lab.orthogonality(grads) == [1.0, 9 / 20]
    assert math.isnan(lab.orthogonality([[np.zeros(2)], [np.zeros(2)]])[0])
    with refused(InputError):
        lab.combine(grads, "median")
    with refused(InputError):
        lab.train("mean", 500)


@pytest.mark.matrices
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_16_workers_at_one_workers_learning_rate(seed):
    adasum, mean = (lab.train(how, 16, seed).accuracy for how in ("adasum", "mean"))
    assert adasum >= 0.97
    assert mean <= adasum - 0.05


def test_diverged_sum_is_reported():
    run = lab.train("sum", 16, 0, lab.Setup(lr=1e30, epochs=1))
    assert run.diverged
    assert run.accuracy < 0.3
    assert "1 diverged" in lab.table({(16, "sum"): [run]})


def test_orthogonality_over_the_training():
    run = lab.train("adasum", 8, 0, lab.Setup(epochs=2, hidden=16), watch=True)
    assert list(run.ratios) == [f"{i}.{name}" for i in (0, 2, 4) for name in ("weight", "bias")]
    for ratios in run.ratios.values():
        assert len(ratios) == len(run.losses) == 2 * (1440 // 40)
        assert all(0 <= ratio <= 1 + 1e-6 for ratio in ratios)


@pytest.mark.process
def test_command_measures_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lab, "costs", partial(lab.costs, (1 << 16,), ranks=2, rounds=1))
    assert lab.main(["--workers", "1", "4", "--seeds", "1", "--epochs", "1", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "test accuracy after 1 epochs" in told
    assert "65536 and 65560 bytes" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "accuracy.png",
        "costs.png",
        "orthogonality.png",
        "vectors.png",
    ]
    plt.close("all")


def test_pictures():
    ax = plot_accuracies({"mean": [(1, [0.9, 0.8]), (4, [0.7])], "Adasum": [(1, [0.9]), (4, [0.95])]})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["mean", "Adasum"]
    assert ax.get_lines()[0].get_ydata().tolist() == pytest.approx([0.85, 0.7])
    ax = plot_accuracies({"mean": [(4, [0.972, 0.974])], "Adasum": [(4, [0.973])]})
    ax.figure.draw_without_rendering()
    ticks = [label.get_text() for label in ax.get_yticklabels()]
    assert len(set(ticks)) == len(ticks)
    assert ax.get_legend().get_window_extent().x0 > ax.get_window_extent().x1
    ax = view.plot_orthogonality({"a": [0.5, 1.0, 0.0], "b": [1.0, 1.0, 1.0]}, workers=4, smooth=1)
    assert ax.get_lines()[2].get_ydata().tolist() == [0.75, 1.0, 0.5]
    figure = view.plot_vectors({"one": lab.vectors((1, 0), (1, 1)), "two": lab.vectors((0, 0), (1, 1))})
    assert [ax.get_title() for ax in figure.axes] == ["one", "two"]
    assert lab.vectors((1, 0), (1, 1))["Adasum"].tolist() == [1.25, 0.75]
    row = {"size_bytes": 4, "sum_s": 1.0, "adasum_s": 2.0, "ratio": 2.0, "sum_bytes": 6, "adasum_bytes": 78}
    figure = plot_costs([row])
    assert [[text.get_text() for text in ax.texts] for ax in figure.axes] == [["2.0 x"], ["+ 72 B"]]
    rows = [{**row, "size_bytes": size} for size in (4, 16, 64)]
    figure = plot_costs(rows)
    figure.draw_without_rendering()
    for panel in figure.axes:
        assert all(text.get_window_extent().x0 > panel.get_window_extent().x0 for text in panel.texts)
    for draw in (plot_accuracies, view.plot_vectors, plot_costs):
        with refused(InputError):
            draw({})
    with refused(InputError):
        view.plot_orthogonality({}, 2)
    plt.close("all")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--workers 0", "--workers 0: must be at least 1."),
        ("--workers 4,-1", "--workers -1"),
        ("--seeds 0", "--seeds 0: must be at least 1"),
        ("--epochs 0", "--epochs 0: must be at least 1"),
        ("--lr -1", "--lr -1: must be a number above 0"),
        ("--lr inf", "--lr inf: must be a number above 0"),
        ("--out /proc/x", "simparallel: /proc/x"),
    ],
)
def test_bad_options_are_refused_before_training(words, told, capsys, monkeypatch):
    monkeypatch.setattr(lab, "compare", None)
    assert lab.main(words.split()) == 2
    assert told in capsys.readouterr().err
