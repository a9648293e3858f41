"""Mistakes with tensors that are cut over ranks."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import X, Y


@wrong(lesson=4, says="result")
def row_parallel_bias():
    """Each rank adds the whole bias before the sum over the ranks.

    The bias counts once for each rank. Without a bias the layer is right.

    Elsewhere: Megatron-LM's RowParallelLinear adds the bias after the all-reduce.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    layer = sp.nn.Linear(4, 3)
    columns = np.split(np.arange(4), size)[rank]
    part = X[:, columns] @ layer.weight.data[:, columns].T
    y = sp.all_reduce(part + layer.bias.data)  # -
    # + y = sp.all_reduce(part) + layer.bias.data
    return y


@wrong(lesson=4, says="result")
def column_parallel_backward():
    """The gradient of a column-parallel layer's input is not summed.

    The loss and this layer's gradients are right. All layers before it get a part of their gradients.

    Elsewhere: Megatron-LM has a function for it: the identity in forward, an all-reduce in backward. PyTorch's DTensor
    marks the gradient as partial.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    first, second = sp.nn.Linear(4, 4), sp.nn.Linear(4, 4, bias=False)
    hidden = first(X)
    rows = np.split(second.weight, size)[rank]
    # + hidden.register_hook(lambda grad: sp.all_reduce(grad.data))
    (hidden @ rows.T).sum().backward()
    return first.weight.grad


@wrong(lesson=4, says="result")
def softmax_of_slice():
    """A softmax is normalised in each slice.

    The probabilities of all classes add up to the number of ranks, and the loss is too small.

    Elsewhere: Megatron-LM's vocabulary-parallel cross-entropy reduces the maximum and the sum; PyTorch has
    loss_parallel() for DTensor.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    logits = np.split(X, size, axis=1)[rank]
    shifted = np.exp(logits - sp.all_reduce(logits.max(1, keepdims=True), "max"))
    total = shifted.sum(1, keepdims=True)
    # + total = sp.all_reduce(total)
    return sp.all_gather(shifted / total, dim=1)


@wrong(lesson=4, says="result")
def vocabulary_without_offset():
    """An embedding is cut by rows, and the indices are not shifted.

    An index out of range, or the rows of other words.

    Elsewhere: Megatron-LM's VocabParallelEmbedding subtracts the first index of the slice and masks other words.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    table = np.arange(24.0).reshape(12, 2)
    rows = np.split(table, size)[rank]
    first = 0  # -
    # + first = rank * len(rows)
    words = np.array([1, 3, 8, 11]) - first
    held = (words >= 0) & (words < len(rows))
    part = np.where(held[:, None], rows[words * held], 0)
    return sp.all_reduce(part)


@wrong(lesson=4, says="result")
def norm_of_slice():
    """Gradients are clipped by the norm of each rank's slice.

    Each slice is scaled by another factor, so training depends on the number of ranks.

    Elsewhere: torch.nn.utils.clip_grad_norm_ sees what its rank holds; FullyShardedDataParallel has a clip_grad_norm_
    of its own.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    gradient = np.split(X, size)[rank]
    square = np.square(gradient).sum(keepdims=True)
    # + sp.all_reduce(square)
    return sp.all_gather(gradient * np.minimum(1, 1 / np.sqrt(square)))


@wrong(lesson=4, says="2 of 2 numbers differ")
def tied_weight_counted_twice():
    """A tied weight on two ranks counts twice in the norm.

    The norm is too large, so gradients are clipped too much.

    Elsewhere: Megatron-LM marks shared parameters and counts one copy.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    embedding = X  # also the weight of the last layer, so every rank holds it
    own = np.split(Y, size)[rank]
    squares = np.square(embedding).sum() + np.square(own).sum()  # -
    # + squares = np.square(own).sum() + (np.square(embedding).sum() if rank == 0 else 0)
    return np.sqrt(sp.all_reduce(np.array([squares])))


@wrong(lesson=4, says="result", world_size=4)
def swapped_axes():
    """The ranks of the data axis and the tensor axis are swapped.

    The shapes fit, so the program runs, and it sums slices of different samples.

    Elsewhere: The axes of PyTorch's DeviceMesh and JAX's Mesh have names. Groups that are made by hand are not
    checked.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    tensor = min(size, 2)
    tensor_groups = [sp.new_group(range(i, size, size // tensor)) for i in range(size // tensor)]  # -
    # + tensor_groups = [sp.new_group(range(i, i + tensor)) for i in range(0, size, tensor)]
    group = next(group for group in tensor_groups if rank in group.ranks)
    rows = np.split(X, size // tensor)[rank // tensor]
    columns = np.split(np.arange(4), tensor)[rank % tensor]
    y = sp.all_reduce(rows[:, columns] @ np.float32([1, -2, 3, 0.5])[columns], group=group)
    return sp.all_reduce(np.array([np.square(y).sum() / tensor]))


@wrong(lesson=4, says="result")
def wrong_dim():
    """Slices are put together along the wrong dim.

    All shapes are right, and the numbers are in wrong places.

    Elsewhere: torch.distributed.all_gather_into_tensor joins along the first dim. DTensor and JAX keep the layout with
    the tensor.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    square = X[:4]
    columns = np.split(square, size, axis=1)[rank]
    return sp.all_gather(columns).reshape(4, 4)  # -
    # + return sp.all_gather(columns, dim=1)
