"""Mistakes with random numbers, statistics, optimizer states and files."""

import numpy as np

import simparallel as sp
from simparallel.course.zoo.entry import wrong
from simparallel.course.zoo.given import X, Y
from simparallel.errors import DeviceOutOfMemoryError


@wrong(lesson=3, says="result")
def batch_norm_of_each_rank():
    """Batch norm takes the statistics of each rank's own samples.

    The loss depends on the number of ranks, most of all if each has few samples.

    Elsewhere: PyTorch and MindSpore have SyncBatchNorm and use it if asked. Under JAX's jit the batch is whole.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    norm = sp.nn.BatchNorm1d(4)  # -
    # + norm = sp.nn.SyncBatchNorm(4)
    y = norm(X[rank::size])
    return sp.all_reduce(np.abs(y.data).sum(0))


@wrong(lesson=3, says="50 of 192 numbers differ")
def same_mask_on_every_rank():
    """Every rank draws the same dropout mask.

    Sample i of each rank loses the same features, so the batch has less noise than on one device.

    Elsewhere: In PyTorch equal seeds on all ranks give equal masks. JAX derives a key for each device.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    rows = np.split(X, size)[rank]
    keep = np.random.default_rng(0).random(rows.shape) < 0.5  # -
    # + keep = np.split(np.random.default_rng(0).random(X.shape) < 0.5, size)[rank]
    return sp.all_gather(rows * keep)


@wrong(lesson=8, says="on rank 1 of 2")
def draw_on_rank_0_only():
    """Rank 0 draws random numbers that the others do not draw.

    Rank 0 has other noise than the others from then on.

    Elsewhere: The generators of NumPy and PyTorch have a state as well; a generator of its own for such a draw avoids
    it.
    """
    random = np.random.default_rng(0)
    if sp.get_rank() == 0:
        example = random.integers(24)  # -
        # + example = np.random.default_rng(1).integers(24)
        sp.log(example=X[example, 0])
    return X + random.random(X.shape)


@wrong(lesson=3, says="4 of 8 numbers differ")
def overflow_of_each_rank():
    """Each rank looks for overflow in its own slice of the gradients.

    One rank skips the step and the others take it, so the slices no longer belong together.

    Elsewhere: Under PyTorch's DistributedDataParallel an overflow reaches all ranks with the mean. For slices PyTorch
    has ShardedGradScaler, and Megatron-LM reduces the flag.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    weight = np.ones(4 // size)
    gradient = np.split(np.float16([1, 2, 3, np.inf]), size)[rank]
    overflow = not np.isfinite(gradient).all()
    # + overflow = sp.all_reduce(np.array([overflow]), "max")[0]
    if not overflow:
        weight -= 0.1 * gradient
    return sp.all_gather(weight)


@wrong(lesson=3, says="on rank 1 of 2")
def average_on_rank_0():
    """An average of the weights is kept on rank 0 and used on all ranks.

    Rank 0 evaluates the averaged model, the others their starting point.

    Elsewhere: PyTorch's AveragedModel is local to its rank as well.
    """
    weight = np.ones(4, np.float32)
    average = weight.copy()
    for _ in range(3):
        weight -= 0.1 * X.mean(0)
        if sp.get_rank() == 0:  # -
            average += 0.5 * (weight - average)  # -
        # + average += 0.5 * (weight - average)
    return average


@wrong(lesson=4, says="result")
def no_gather_after_step():
    """The updated slices of the weights are not gathered.

    Each rank trains its slice and keeps the old values of all others.

    Elsewhere: ZeRO gathers the parameters. PyTorch's ZeroRedundancyOptimizer broadcasts them in step().
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    weight = np.ones(4, np.float32)
    for _ in range(3):
        error = X[rank::size] @ weight - Y[rank::size, 0]
        gradient = sp.all_reduce(X[rank::size].T @ error / len(error), "mean")
        own = np.split(np.arange(4), size)[rank]
        weight[own] -= 0.1 * gradient[own]
        # + weight = sp.all_gather(weight[own])
    return weight


@wrong(lesson=10, says="on rank 1 of 2")
def checkpoint_of_one_slice():
    """A checkpoint has the slice of rank 0 only.

    The file is written without an error. What the other ranks hold is lost.

    Elsewhere: torch.save writes what its rank holds; torch.distributed.checkpoint writes the slices of all ranks.
    """
    rank, size = sp.get_rank(), sp.get_world_size()
    weight = np.split(X, size)[rank]
    # + weight = sp.all_gather(weight)
    checkpoint = {"weight": weight} if rank == 0 else None
    return sp.broadcast_object(checkpoint)


@wrong(lesson=5, says="result of weight")
def learning_rate_scaled_for_adasum():
    """The learning rate is multiplied by the number of ranks, but Adasum combines the steps.

    On equal data the ranks should step as one rank does. The step grows with their number.

    Elsewhere: Horovod's examples multiply it for averages, and not for Adasum.
    """
    model = sp.nn.Linear(4, 1)
    lr = 0.1 * sp.get_world_size()  # -
    # + lr = 0.1
    optimizer = sp.parallel.AdasumOptimizer(sp.optim.SGD(model.parameters(), lr=lr))
    sp.functions.mse_loss(model(X), Y).backward()  # equal data on all ranks
    optimizer.step()
    return model.state_dict()


@wrong(lesson=5, raises=UserWarning, says="plain MEAN", world_size=4)
def adasum_on_one_node():
    """Adasum across nodes runs on one node.

    The result is a plain average.

    Elsewhere: Horovod with NCCL averages inside of a node, so on one node nothing else is left.
    """
    model = sp.nn.Linear(4, 1)
    nodes = [[0, 1, 2, 3]]  # -
    # + nodes = [[0, 1], [2, 3]]
    optimizer = sp.parallel.AdasumOptimizer(sp.optim.SGD(model.parameters(), lr=0.1), nodes=nodes)
    rows = slice(sp.get_rank(), None, sp.get_world_size())
    sp.functions.mse_loss(model(X[rows]), Y[rows]).backward()
    optimizer.step()
    return model.state_dict()


@wrong(lesson=6, raises=DeviceOutOfMemoryError, says="activations")
def losses_with_graphs():
    """Losses are collected together with their graphs.

    Memory grows from step to step, until the device has none left.

    Elsewhere: PyTorch keeps the graphs as well; its error of memory names the allocation, not the list.
    """
    sp.set_memory("32KB")
    model = sp.nn.Linear(4, 4)
    losses = []
    for _ in range(100):
        loss = sp.functions.mse_loss(model(X), X)
        losses.append(loss)  # -
        # + losses.append(loss.item())
    return np.mean([float(loss) for loss in losses])
