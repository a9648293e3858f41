"""`weight_init=` and `bias_init=`: legal values, and slices equal to slices of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import nn, parallel
from simparallel.errors import DTypeError, InputError, LayoutError, ShapeError
from simparallel.nn import init
from simparallel.nn.deferred import is_deferred, materialize
from simparallel.parallel import no_init_parameters

# A name, an equivalent object, and the function behind both.
SAME = {
    "zeros": (init.Zero(), init.zeros_),
    "ones": (init.One(), init.ones_),
    "normal": (init.Normal(0.01, 0.0), lambda t: init.normal_(t, 0.0, 0.01)),
    "uniform": (init.Uniform(0.07), lambda t: init.uniform_(t, -0.07, 0.07)),
    "truncated_normal": (init.TruncatedNormal(0.01), lambda t: init.trunc_normal_(t, 0.0, 0.01, -0.02, 0.02)),
    "xavier_uniform": (init.XavierUniform(1), init.xavier_uniform_),
    "xavier_normal": (init.XavierNormal, init.xavier_normal_),
    "he_uniform": (init.HeUniform(), init.kaiming_uniform_),
    "he_normal": (init.HeNormal(), init.kaiming_normal_),
    "orthogonal": (init.Orthogonal(), init.orthogonal_),
}
LAYERS = {
    "Linear": lambda **inits: nn.Linear(6, 4, **inits),
    "Conv1d": lambda **inits: nn.Conv1d(6, 4, 3, **inits),
    "Conv2d": lambda **inits: nn.Conv2d(6, 4, (1, 3), **inits),
    "ConvTranspose2d": lambda **inits: nn.ConvTranspose2d(6, 4, (1, 3), **inits),
    "BatchNorm1d": lambda **inits: nn.BatchNorm1d(4, **inits),
    "BatchNorm2d": lambda **inits: nn.BatchNorm2d(4, **inits),
    "LayerNorm": lambda **inits: nn.LayerNorm((2, 4), **inits),
    "GroupNorm": lambda **inits: nn.GroupNorm(2, 4, **inits),
}


def begun(weight_init):
    sp.manual_seed(3)
    return nn.Linear(5, 7, weight_init=weight_init).weight.numpy()


@pytest.mark.parametrize("name", SAME)
def test_name_object_and_function_agree(name):
    thing, function = SAME[name]
    camel = "".join(part.title() for part in name.split("_"))
    expected = nn.Parameter(np.empty((7, 5), np.float32))
    sp.manual_seed(3)
    function(expected)
    for given in (name, camel, thing, function, init.initializer(name, (7, 5))):
        if isinstance(given, nn.Parameter):  # drawn from a later stream: its own values are taken
            np.testing.assert_array_equal(begun(given), given.numpy())
        else:
            np.testing.assert_array_equal(begun(given), expected.numpy())


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_takes_numbers_and_arrays(layer):
    made = LAYERS[layer](weight_init=0.5)
    assert (made.weight.numpy() == 0.5).all()
    values = np.arange(made.bias.size).reshape(made.bias.shape)
    again = LAYERS[layer](weight_init="ones", bias_init=values)
    np.testing.assert_array_equal(again.bias.numpy(), values)
    assert again.bias.dtype == np.float32
    values[...] = -1  # the layer has a copy
    assert again.bias.numpy().min() >= 0
    with refused(InputError):
        LAYERS[layer](weight_init="nothing")
    with refused(ShapeError):
        LAYERS[layer](bias_init=np.zeros((9, 9)))
    with refused(DTypeError):
        LAYERS[layer](bias_init=np.zeros(made.bias.shape, complex))


def test_layers_with_a_weight_alone():
    table = nn.Embedding(5, 3, padding_idx=1, weight_init="ones").weight.numpy()
    assert table.tolist() == [[float(i != 1)] * 3 for i in range(5)]
    assert nn.RMSNorm(4, weight_init=2).weight.numpy().tolist() == [2.0] * 4
    assert nn.Linear(3, 2, bias=False, bias_init="zeros").bias is None


@pytest.mark.parametrize("given", [None, "normal", "he_uniform", 0.25, "array", "parameter"])
def test_deferred_layers_have_same_initial_values(given):
    def make():
        sp.manual_seed(11)
        value = np.arange(48.0).reshape(6, 8) if given == "array" else given
        if given == "parameter":
            value = nn.initializer("normal", (6, 8))
        return nn.Linear(8, 6, weight_init=value, bias_init=None if given is None else "ones")

    whole = make()
    with no_init_parameters():
        later = make()
    assert is_deferred(later.weight)
    assert is_deferred(later.bias)
    part = (slice(2, 5), slice(1, 8))
    np.testing.assert_array_equal(materialize(later.weight, part), whole.weight.numpy()[part])
    np.testing.assert_array_equal(materialize(later.bias), whole.bias.numpy())


def test_deferred_layers_are_filled_after_the_block():
    with no_init_parameters():
        layer = nn.Linear(3, 2)
    init.constant_(layer.weight, 2)
    assert is_deferred(layer.weight)
    np.testing.assert_array_equal(materialize(layer.weight), np.full((2, 3), 2.0))


def filled(letters, cuts):
    """Return (index of the rank's slice, its values) after each initializer, for a parameter that is cut."""
    mesh, found = sp.Mesh((2, 3), ("tp", "shard")), {}
    layer = nn.Linear(5, 7, bias=False)
    if cuts:
        part = mesh.part(("tp",), sp.get_rank()) if letters else sp.Mesh((5,), ("tp",), tuple(range(5)))
        sp.distribute_module(layer, sp.Layout.of_mesh(part), {"weight": cuts})
    if letters:
        parallel.fully_shard(layer, mesh, **dict(zip(("parameter", "gradient", "state"), letters, strict=True)))
    p = layer.weight
    for name, (_, function) in SAME.items():
        sp.manual_seed(3)
        function(p)
        found[name] = p._data.copy()
    init.copy_(p, np.arange(35).reshape(7, 5))
    found["whole"] = p._data.copy()
    init.zeros_(p)
    with parallel.implicit_replication(p.placement.layout.mesh.ranks):
        init.copy_(p, sp.distribute_tensor(np.arange(35.0).reshape(7, 5), p.layout))
    found["cut"] = p._data.copy()
    mesh = p.placement.layout.mesh
    return p.placement.layout.slices(sp.get_rank(), p.shape) if sp.get_rank() in mesh.ranks else None, found


@pytest.mark.parametrize(
    ("letters", "cuts"),
    [("", ("tp", "None")), ("", ("None", "tp")), ("SSS", None), ("RPS", None), ("SSS", ("tp", "None")),
     ("RSS", ("None", "tp"))],
    ids=str,
)  # fmt: skip
def test_slices_are_filled_as_the_whole(letters, cuts):
    """Uneven and empty slices; in the first two cases a rank has nothing of the tensor."""
    expected = {}
    for name, (_, function) in SAME.items():
        sp.manual_seed(3)
        expected[name] = function(nn.Parameter(np.empty((7, 5), np.float32))).numpy()
    expected |= dict.fromkeys(("whole", "cut"), np.arange(35).reshape(7, 5))
    for index, found in sp.launch(filled, (letters, cuts), world_size=6, transport="inline"):
        for name, value in found.items():
            own = expected[name][index] if index is not None else np.empty((0, 0))
            np.testing.assert_array_equal(value, own, err_msg=name)


def test_addends_of_a_sum_are_not_filled():
    def program():
        addend = parallel.from_local(np.ones(3), sp.Layout((2,), ("tp",))("None").with_partial(("tp",)))
        with refused(LayoutError):
            init.ones_(addend)

    sp.launch(program, world_size=2, transport="inline")


def sharded_weights():
    sp.manual_seed(5)
    with no_init_parameters():
        net = nn.Sequential(nn.Linear(8, 4, weight_init="xavier_uniform", bias_init=0.5), nn.LayerNorm(4))
        first = sp.ops.MatMul().shard(((1, 2), (2, 2)))
    step = sp.AutoParallel(lambda x: net[1](first(x, net[0].weight.transpose(0, 1)) + net[0].bias))
    y = step(np.ones((2, 8), np.float32))
    return y.numpy()


def test_sharded_layers_have_same_initial_values():
    sp.manual_seed(5)
    net = nn.Sequential(nn.Linear(8, 4, weight_init="xavier_uniform", bias_init=0.5), nn.LayerNorm(4))
    expected = net(sp.Tensor(np.ones((2, 8), np.float32))).numpy()
    for y in sp.launch(sharded_weights, world_size=4, transport="inline"):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_initializer_takes_the_shape_of_an_array():
    assert nn.initializer(np.eye(2), dtype=np.float64).numpy().tolist() == [[1, 0], [0, 1]]
    assert nn.initializer("ones", 3).shape == (3,)
    with refused(InputError):
        nn.initializer("ones")
    for wrong in ("nothing", None, [1, 2], True):
        with refused(InputError):
            nn.initializer(wrong, (2, 2))
