# %% [markdown]
# # Lesson 2: Collectives
#
# Ranks are processes with memory of their own. A *collective* is a function that all ranks of a group call together, to
# exchange arrays or to add them up. All parallel training is built from a few of them. You need NumPy. Lesson 1 is
# about the training of one device, and is not needed here.
#
# Run it: `python tutorials/02_collectives.py`, or open it as a notebook. Pictures also go into the folder `pictures`.
#
# First the result: four processes add up their arrays, and each one gets the sum.

# %%
import re
from pathlib import Path

import numpy as np

import simparallel as sp
from simparallel.errors import RunFailedError


def add_up():
    x = 10.0 * sp.get_rank() + np.arange(4)
    before = x.copy()
    sp.all_reduce(x)  # replaces x by the sum over all ranks
    return before, x


results = sp.launch(add_up, world_size=4)
for rank, (before, after) in enumerate(results):
    print(f"rank {rank}: {before} -> {after}")

# %% [markdown]
# ## The same on one device
#
# One NumPy line says what the collective must return. Every collective has such a line, and it is its test.

# %%
expected = np.sum([before for before, _ in results], axis=0)
for _, after in results:
    np.testing.assert_array_equal(after, expected)
print("all ranks have", expected)

# %% [markdown]
# ## Which rank has which chunk
#
# To see where values go, give each one a bit of its own: chunk 2 of rank 1 is the integer with only bit 6 set. A sum
# then shows all of its addends. The picture writes rank 1 as `B`, so this value is `B2`, and `AB2` is the sum of the
# chunks 2 of ranks 0 and 1.
#
# In this lesson, most programs run with `transport="inline"`: the ranks are then threads that take turns. They start
# faster than processes, and the results are the same.
#
# First the collectives with a *root*: one rank that has the data before, or gets it in the end.
#
# - `broadcast` copies the root's array to all ranks.
# - `scatter` gives each rank one chunk of it.
# - `gather` collects a chunk of each rank on the root.
# - `reduce` adds up all arrays, on the root only.
#
# Predict first: what does rank 2 have after `scatter`, and rank 0 after `reduce`?

# %%
P = 4


def tagged():
    return 1 << (P * sp.get_rank() + np.arange(P))


def at_its_place(chunk):
    """Return P chunks: the given one at the place of this rank, and nothing else."""
    return np.where(np.arange(P) == sp.get_rank(), chunk, 0)


def contents(rows):
    return [[[divmod(bit, P) for bit in range(P * P) if value >> bit & 1] for value in map(int, row)] for row in rows]


def before_and_after(collective):
    before, after = zip(*sp.launch(collective, world_size=P, transport="inline"), strict=True)
    name = collective.__name__
    return {f"before {name}": contents(before), f"after {name}": contents(after)}


def show(picture, name):
    """Save a picture. A notebook shows it below the cell, too."""
    sp.view.save_figure(picture, Path("pictures", "02_collectives", f"{name}.png"), dpi=100)


# %%
def broadcast():
    x = tagged() if sp.get_rank() == 0 else np.zeros(P, int)
    return x.copy(), sp.broadcast(x, src=0)


def scatter():
    chunks = list(tagged().reshape(P, 1)) if sp.get_rank() == 0 else None
    return tagged() if chunks else [0] * P, at_its_place(sp.scatter(chunks, src=0))


def gather():
    chunk = tagged()[sp.get_rank()]
    found = sp.gather(chunk.reshape(1), dst=0)
    return at_its_place(chunk), [0] * P if found is None else np.concatenate(found)


def reduce():
    return tagged(), sp.reduce(tagged(), dst=0)


panels = {}
for collective in (broadcast, scatter, gather, reduce):
    panels |= before_and_after(collective)
assert panels["after scatter"][2] == [[], [], [(0, 2)], []]
assert panels["after reduce"][0][3] == [(0, 3), (1, 3), (2, 3), (3, 3)]
show(sp.view.plot_chunks(panels), "one_and_all")

# %% [markdown]
# Rank 2 has chunk 2 of the root, and only that. After `reduce`, the root has the sums, and all others keep their
# arrays. `gather` is the reverse of `scatter`, and `reduce` is `broadcast` turned round: where a copy goes out, an
# addend comes in. Backward passes rely on it: the gradient of a broadcast is a reduce.
#
# ## From all to all
#
# The other four have no root. Every rank gives something, and every rank gets something.
#
# - `all_gather`: each rank has one chunk, and gets all of them.
# - `reduce_scatter`: each rank has all chunks, and gets the sum of one.
# - `all_reduce`: each rank gets the sums of all chunks.
# - `all_to_all`: chunk `j` of rank `i` becomes chunk `i` of rank `j`.
#
# Predict first: write the chunks of all ranks as a matrix, a row for each rank. What does `all_to_all` do to the
# matrix?


# %%
def all_gather():
    chunk = tagged()[sp.get_rank()]
    return at_its_place(chunk), sp.all_gather(chunk.reshape(1))


def reduce_scatter():
    return tagged(), at_its_place(sp.reduce_scatter(tagged()))


def all_reduce():
    return tagged(), sp.all_reduce(tagged())


def all_to_all():
    return tagged(), sp.all_to_all(tagged())


panels = {}
for collective in (all_gather, reduce_scatter, all_reduce, all_to_all):
    panels |= before_and_after(collective)
matrix = panels["before all_to_all"]
assert panels["after all_to_all"] == [list(column) for column in zip(*matrix, strict=True)]
show(sp.view.plot_chunks(panels), "all_and_all")

# %% [markdown]
# It transposes the matrix.
#
# Look at the picture once more: `all_gather` begins with the places where `reduce_scatter` ends. So one after the
# other, they make an `all_reduce`. Real systems rely on that: in sharded training (Rajbhandari et al. 2020) each rank
# stores a slice of the parameters, and calls the two halves at different times.


# %%
def in_two_halves():
    x = np.random.default_rng(sp.get_rank()).normal(size=8)
    return sp.all_gather(sp.reduce_scatter(x)), sp.all_reduce(x.copy())


for halves, whole in sp.launch(in_two_halves, world_size=P):
    np.testing.assert_allclose(halves, whole, rtol=1e-12)
print("reduce_scatter, then all_gather: the result of all_reduce")

# %% [markdown]
# ## Messages
#
# Below the collectives are messages from one rank to another: `send(x, dst)` and `recv(x, src)`. `send` returns when
# `x` may be changed again; `recv` waits until the message has filled its array. `isend` starts a message and returns
# at once; its `wait()` returns when the message is on its way.
#
# Here each rank passes an array of 8 MB on to the next one, in a chain. The devices are described: a message takes
# 5 µs, and 0.1 ns for each byte. The picture shows this *simulated* time.
#
# Predict first: how long does the array take from rank 0 to rank 3? And in eight pieces of 1 MB?

# %%
link = sp.LinkSpec(latency_s=5e-6, bandwidth_bytes_per_s=10e9)


def pass_on(pieces):
    rank, last = sp.get_rank(), sp.get_world_size() - 1
    x = np.full(1_000_000, float(rank))  # 8 MB
    for piece in np.array_split(x, pieces):
        if rank > 0:
            sp.recv(piece, rank - 1)
        if rank < last:
            sp.send(piece, rank + 1)
    return x[0], x[-1]


times = {}
for pieces in (1, 8):
    run = sp.launch(pass_on, (pieces,), world_size=P, link=link, transport="inline")
    assert run == [(0.0, 0.0)] * P
    times[pieces] = run.trace.makespan_s * 1e3
    print(f"pieces: {pieces}, time: {times[pieces]:.3f} ms")
show(sp.view.plot_timeline(run.trace.events, title="Eight pieces, passed on in a chain"), "chain")
assert np.isclose(times[1], 3 * (0.005 + 0.8))
assert np.isclose(times[8], (3 + 7) * (0.005 + 0.1))

# %% [markdown]
# In one piece, each link carries the array while the others are idle: three times 0.805 ms. In pieces, the links work
# at the same time: rank 1 passes on a piece while it receives the next one. Ten turns of 0.105 ms are enough. All fast
# algorithms below do this: they cut the array, and keep every link busy.
#
# (A thin line is a `recv` that does not have to wait: its message arrived while the rank was sending.)
#
# ## Two ranks that wait for each other
#
# Predict first: each of two ranks first receives from the other one, and then sends. What happens?


# %%
def both_receive_first():
    other = 1 - sp.get_rank()
    received = np.empty(3)
    sp.recv(received, other)
    sp.send(np.ones(3), other)


def said(program, world_size=2):
    """Run a wrong program, and return the error without tracebacks and paths."""
    try:
        sp.launch(program, world_size=world_size, echo=False)
    except RunFailedError as error:
        return re.sub(r" at \S+:(\d+)", r", line \1", str(error).split("\n\n")[0])


deadlock = said(both_receive_first)
print(deadlock)
assert "DeadlockError" in deadlock

# %% [markdown]
# A *deadlock*: no rank can continue. Most systems hang here until they are stopped. This one sees that every rank
# waits, and names the two lines.
#
# The way out is to start the message, then receive, and then wait for the message.
#
# Predict first: does this program work?


# %%
def exchange():
    rank = sp.get_rank()
    received = np.empty(3)
    sending = sp.isend(np.full(3, rank), 1 - rank)
    sp.recv(received, 1 - rank)
    sending.wait()
    return received[0]


wrong_dtype = said(exchange)
print(wrong_dtype)
assert "int64" in wrong_dtype

# %% [markdown]
# Not yet: `np.full(3, 0)` makes integers, and the receiver has room for floats. A message must have the shape and the
# dtype of the array that it fills. With floats it works:


# %%
def exchange_floats():
    rank = sp.get_rank()
    received = np.empty(3)
    sending = sp.isend(np.full(3, float(rank)), 1 - rank)
    sp.recv(received, 1 - rank)
    sending.wait()
    return float(received[0])


swapped = sp.launch(exchange_floats, world_size=2)
print("received by ranks 0 and 1:", *swapped)
assert swapped == [1, 0]

# %% [markdown]
# ## An all-reduce from messages
#
# The plain way: all ranks send their arrays to rank 0, which adds them up and sends the sum back. Rank 0 then receives
# and sends everything, while all other links are idle.
#
# The *ring* (Patarasuk and Yuan 2009) uses all links all the time. The ranks stand in a circle. The array is cut into
# as many chunks as there are ranks. In each turn, every rank sends one chunk to the next rank:
#
# - In the first `P - 1` turns, the receiver *adds* the chunk to its own. This is a reduce-scatter.
# - In the other `P - 1` turns, the receiver *replaces* its own by it. This is an all-gather.
#
# To watch it, here are all four ranks in one process. `state[rank, chunk]` changes turn by turn.

# %%
values = np.array([[1 << (P * rank + chunk) for chunk in range(P)] for rank in range(P)])
states = [values]
for turn in range(2 * (P - 1)):
    state = states[-1].copy()
    for rank in range(P):
        chunk, after = (rank - 1 - turn) % P, (rank + 1) % P
        arriving = states[-1][rank, chunk]
        state[after, chunk] = arriving + (state[after, chunk] if turn < P - 1 else 0)
    states.append(state)
assert (states[-1] == values.sum(axis=0)).all()
titles = ["start", *(f"turn {turn}: {'add' if turn < P - 1 else 'replace'}" for turn in range(2 * (P - 1)))]
panels = {title: contents(state) for title, state in zip(titles, states, strict=True)}
show(sp.view.plot_chunks(panels, title="A ring of four ranks"), "ring")

# %% [markdown]
# Follow chunk 3: it starts on rank 0, and has passed all ranks after turn 2. Then each rank has one complete chunk,
# with four stripes. The complete chunks go round once more.
#
# Predict first: how many bytes does each rank send, for an array of `n` bytes? What if there are 1,000 ranks?
#
# The library has this algorithm. A `Ledger` counts the messages and the bytes of each step:


# %%
def counted(algorithm):
    with sp.Ledger() as ledger:
        sp.all_reduce(np.ones(1000, np.float32), algorithm=algorithm)
    return ledger


ledger = sp.Ledger.join(sp.launch(counted, ("ring",), world_size=P, transport="inline"))
print(ledger.table())
assert {entry.total.sent_bytes for entry in ledger.entries} == {2 * (P - 1) * 4000 // P}

# %% [markdown]
# `2 (P - 1)` turns with `n / P` bytes each: `2 (P - 1) / P n` bytes, here 6,000 of an array of 4,000. With 1,000 ranks
# they are still less than `2 n`. The number of turns is the price: it grows with `P`.
#
# ## Fewer turns
#
# A *tree* adds in pairs: rank 1 sends to rank 0, rank 3 to rank 2; then rank 2 to rank 0. After `log2 P` turns, rank 0
# has the sum. The same tree takes it back. But each message is the whole array.
#
# *Halving and doubling* (Rabenseifner 2004) has few turns and few bytes: each rank exchanges half of the array with a
# partner, then a quarter with another one, and so on; and the same way back. The number of ranks must be a power of
# two. Any other ranks first give their arrays to a neighbour, and get the result at the end.
#
# Predict first: eight ranks. Which algorithm sends the fewest bytes from its busiest rank? Which has the fewest turns?

# %%
algorithms = ("naive", "ring", "tree", "halving_doubling")
figures = {}
for ranks in (8, 6):
    for algorithm in algorithms:
        entries = sp.Ledger.join(sp.launch(counted, (algorithm,), world_size=ranks, transport="inline")).entries
        busiest = max(entry.total.sent_bytes for entry in entries) / 4000
        figures[ranks, algorithm] = len(entries[0].steps), busiest
        print(
            f"{ranks} ranks, {algorithm:<16} {len(entries[0].steps):2d} turns, at most {busiest:.2f} n bytes of a rank"
        )
assert figures[8, "ring"] == (14, 1.75)
assert figures[8, "halving_doubling"] == (6, 1.75)
assert figures[8, "tree"] == (6, 3)
assert figures[8, "naive"] == (14, 7)

# %% [markdown]
# On eight ranks, halving and doubling sends as few bytes as the ring, in as few turns as the tree. On six ranks, its
# busiest rank sends more than in a ring.
#
# ## Latency and bandwidth
#
# A message of `m` bytes takes `α + m β`: `α` is the *latency*, `1 / β` the *bandwidth* (Hockney 1994). The time of an
# algorithm is the sum over its turns, with the largest message of each. With `q`, the largest power of two that is at
# most `P`:
#
# | all-reduce of `n` bytes | turns `α` | bytes `n β` |
# |---|---|---|
# | naive | `2 (P - 1)` | `2 (P - 1)` |
# | ring | `2 (P - 1)` | `2 (P - 1) / P` |
# | tree | `2 ⌈log2 P⌉` | `2 ⌈log2 P⌉` |
# | halving and doubling, `P = q` | `2 log2 q` | `2 (q - 1) / q` |
# | halving and doubling, `P > q` | `2 log2 q + 2` | `2 (q - 1) / q + 2` |
#
# For small arrays only the turns count, for large ones only the bytes. The simulated clock uses this model, with the
# latency and the bandwidth of the described link.
#
# Predict first: six ranks. For which sizes is the ring the fastest?

# %%
sizes = [4**k for k in range(1, 12)]  # 4 B to 4 MiB


def of_all_sizes(algorithm):
    for size in sizes:
        sp.all_reduce(np.ones(size // 4, np.float32), algorithm=algorithm)


points = {}
for ranks in (6, 8):
    for algorithm in algorithms:
        # A dry run: the same program and the same clock, on arrays without data.
        events = sp.dry_run(of_all_sizes, (algorithm,), world_size=ranks, device="a100", link=link).trace.events
        calls = [event for event in events if event.kind == "collective" and event.rank == 0]
        seconds = [(call.sim_end_ps - call.sim_start_ps) / 1e12 for call in calls]
        points.setdefault(("all_reduce", ranks), {})[algorithm] = list(zip(sizes, seconds, strict=True))
show(sp.view.plot_collectives(points), "sizes")

# %% [markdown]
# The curves are level on the left, where only the latency counts, and rise with the size on the right. Where do ring
# and halving and doubling cross? The table says `10 α + 5/3 n β` and `6 α + 7/2 n β`: at `n = 4 α / (11/6 β)`.

# %%
alpha, beta = 5e-6, 1 / 10e9
crossing = 4 * alpha / (11 / 6 * beta)
print(f"six ranks: the ring is the fastest above {crossing / 1000:.0f} kB")
fastest = {
    ranks: [min(algorithms, key=lambda name: points["all_reduce", ranks][name][i][1]) for i in range(len(sizes))]
    for ranks in (6, 8)
}
assert [name == "ring" for name in fastest[6]] == [size > crossing for size in sizes]
assert "ring" not in fastest[8]
for size, time_s in points["all_reduce", 6]["ring"]:
    assert np.isclose(time_s, 10 * alpha + 10 / 6 * size * beta, rtol=1e-4)

# %% [markdown]
# On eight ranks the ring never wins in this model. On real networks it often does: neighbours in a ring are close to
# each other, and partners of halving and doubling are far apart and share links.
#
# ## Choose an algorithm
#
# `algorithm=` chooses for one call, or, in `launch`, for all calls. The default is `direct`: ranks on one machine read
# each other's memory, and no messages are needed.
#
# Predict first: is the sum the same with each algorithm? And on each rank?


# %%
def sum_of_floats():
    x = np.random.default_rng(sp.get_rank()).normal(size=1000)
    return sp.all_reduce(x)


sums = {name: sp.launch(sum_of_floats, world_size=6, algorithm=name) for name in ("direct", "ring", "tree")}
for name, by_rank in sums.items():
    between_ranks = max(np.abs(by_rank[0] - other).max() for other in by_rank)
    to_direct = np.abs(by_rank[0] - sums["direct"][0]).max()
    print(f"{name:<7} largest difference between ranks {between_ranks:g}, to direct {to_direct:.0e}")
    assert between_ranks == 0
    assert to_direct < 1e-14
assert not np.array_equal(sums["ring"][0], sums["tree"][0])

# %% [markdown]
# All ranks have the same bits, because each element is added up on one rank only. Between algorithms the last bits
# differ: each one adds in another order, and floating-point sums depend on the order.
#
# ## What goes wrong
#
# **Different calls.** The ranks must make the same calls in the same order. Predict first: rank 0 calls `all_reduce`
# while rank 1 calls `broadcast`. What happens in a system that does not compare the calls?


# %%
def different_calls():
    x = np.ones(3)
    if sp.get_rank() == 0:
        sp.all_reduce(x)
    else:
        sp.broadcast(x, src=0)


mismatch = said(different_calls)
print(mismatch)
assert "CollectiveMismatchError" in mismatch

# %% [markdown]
# It hangs, or mixes up the data of the two calls without a word. Here each call carries a description, and the ranks
# compare them before any data changes.
#
# **A call in an `if`.** The most common cause: only one rank wants to print the mean loss.


# %%
def report():
    loss = np.array([1.0 + sp.get_rank()])
    if sp.get_rank() == 0:
        sp.all_reduce(loss, "mean")
        print("mean loss", loss)


forgotten = said(report)
print(forgotten)
assert "rank 1" in forgotten

# %% [markdown]
# All ranks have to call `all_reduce`; only `print` belongs in the `if`.
#
# **The array is replaced.** `all_reduce`, `broadcast` and `reduce` write into their argument. Predict first: what does
# this program return?


# %%
def replaced():
    x = np.ones(2)
    total = sp.all_reduce(x)
    return x, total / sp.get_world_size() - x


deviation = sp.launch(replaced, world_size=4, transport="inline")[0]
print("x is", deviation[0], "and mean - x is", deviation[1])
assert deviation[0].tolist() == [4, 4]
assert deviation[1].tolist() == [-3, -3]

# %% [markdown]
# The mean of ones is one, so the deviation should be zero. But `x` is the sum now. Use `sp.all_reduce(x.copy())`, or
# give an array for the result with `out=`.
#
# ## Exercises
#
# Write the functions below. Each check begins with the smallest case, and draws the first that fails. In the checks,
# all ranks are threads, and an answer with a deadlock is stopped. Solutions are in
# `tutorials/solutions/02_collectives.py`.


# %%
def ring_all_reduce(x):
    """Exercise 1: return the sum of the array `x`, which has one dimension, over all ranks, by a ring of messages.

    Use `sp.isend` and `sp.recv` only, and send to the next rank only. `np.array_split(x, ranks)` cuts an array into
    chunks, some of them one element shorter.
    """
    raise NotImplementedError


sp.exercises.check("ring_all_reduce", ring_all_reduce)


# %%
def tree_broadcast(x, root):
    """Exercise 2: fill the array `x` of every rank with that of rank `root`, and return it.

    Use messages only. In one round a rank sends one message, or receives one. There may be `ceil(log2 P)` rounds, so
    in each round all ranks that already have the data pass it on.
    """
    raise NotImplementedError


sp.exercises.check("tree_broadcast", tree_broadcast)


# %%
def all_to_all_by_messages(x):
    """Exercise 3: return what `sp.all_to_all(x)` returns: chunk j of rank i becomes chunk i of rank j.

    Use messages only. `x` has one dimension, and `P` divides its size.
    """
    raise NotImplementedError


sp.exercises.check("all_to_all_by_messages", all_to_all_by_messages)


# %%
def fastest_algorithm(ranks, size_bytes, latency_s, bandwidth_bytes_per_s):
    """Exercise 4: return "ring", "tree" or "halving_doubling": the fastest all-reduce by the table above.

    If two are equally fast, either is right.
    """
    raise NotImplementedError


sp.exercises.check("fastest_algorithm", fastest_algorithm)
