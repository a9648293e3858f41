"""What kernels, memory and links achieve of their data sheets: all constants of prices that are no data sheet's.

They come from published times of kernels, copies and collectives, and hold for every model. `docs/published.md` prints
the hash of this file. Not a blind choice: the time of a tile, the 64 x 64 tile, the share of an H100 and that of
float32 were chosen after a look at the errors of published steps (docs/published.md).
"""

from __future__ import annotations

# --- matrix products: chosen to match the bfloat16 products of an H100 in OpenXLA (matmul_interpolator_data.h, sm_90;
# the median error is 4 %) and of an A100 PCIe in SimuMax (@4dcaae5, a100_pcie.json; 3 %). In these tables products that
# fill the multiprocessors reach 0.84 and 0.76 of the peak. That is for one kernel alone on a cool GPU; a training step
# reaches less, see MATRIX_UNITS.

# Rows and columns of a tile -> its speed, of that of the largest: small tiles reuse less of what they read.
TILES = {(128, 256): 1.0, (256, 128): 1.0, (128, 128): 0.9, (64, 128): 0.7, (128, 64): 0.7, (64, 64): 0.5}
# Parts of the inner dim, and their least size.
SPLITS, LEAST_PART = (1, 2, 3, 4, 6, 8, 16, 32), 256
# The time in which a multiprocessor begins and ends a tile: memory answers, and the result is written.
TILE_S = 1.2e-6
# Speed of a product whose rows in memory do not begin at multiples of 16 bytes.
MISALIGNED = 0.5

# Device -> the arguments of `MatrixUnits`: multiprocessors; shares of products, convolutions, attention, float32; lanes
# for float32, of data sheets.
#
# A100, products: the times of one block of a 22B model, forward and backward, on eight A100 (Korthikanti et al. 2022,
# table 4, the median of five). Attention: FlashAttention-2 reaches 50 to 73 % (Dao 2023, arXiv 2307.08691, abstract).
# float32: one product measured on an H100, 51.3 of 66.9 Tflop/s.
#
# Other GPUs: products lose as much as on an A100 against the best of any shape, 271.2 of 312 Tflop/s there, and 794.5
# of 989 on H100 and H200, 1745 of 2250 on B200, 1822 of 2500 on GB200, 668.4 of 1300 on MI300X (Bekman, "Machine
# learning engineering", maximum achievable matmul flops). Attention on an H100: FlashAttention-2 reaches 35 % (Shah et
# al. 2024, arXiv 2407.08608, abstract) forward, and less backward.
#
# Assumed: L40S, H20 and NPUs as an A100, but attention of NPUs as by the first FlashAttention; B200, GB200 and MI300X
# attention as on an H100.
MATRIX_UNITS = {
    "a100": (108, 0.708, 0.708, 0.5, 0.77, 64),
    "h100": (132, 0.654, 0.654, 0.3, 0.77, 128),
    "h200": (132, 0.654, 0.654, 0.3, 0.77, 128),
    "b200": (148, 0.632, 0.632, 0.3, 0.77, 128),
    "gb200": (148, 0.594, 0.594, 0.3, 0.77, 128),
    "h20": (78, 0.708, 0.708, 0.5, 0.77, 128),
    "l40s": (142, 0.708, 0.708, 0.5, 0.77, 128),
    "mi300x": (304, 0.419, 0.419, 0.3, 0.419, 64),
    "ascend910": (32, 0.708, 0.708, 0.325, 0.77, 64),
    "ascend910b": (24, 0.708, 0.708, 0.325, 0.77, 64),
    "ascend910c": (48, 0.708, 0.708, 0.325, 0.77, 64),
}
# A device of which nothing but its peak is known: the same share for every shape, which makes the block of table 4
# right, and the first FlashAttention, 25 to 40 % (Dao 2023, arXiv 2307.08691, abstract).
ANY_SHAPE = (0, 0.642, 0.642, 0.325, 0.642)

# --- memory: copies, 2903 of 3350 GB/s on an H100 (Voltage Park, aigatech/vpbenchmarking), and fractions by bytes
# moved, the steps of Calculon for an A100, joined (calculon-ai/calculon @caa4b11).
COPY = 2903 / 3350
MEMORY_BY_SIZE = ((1e5, 0.3), (1e6, 0.6), (1e7, 0.75), (1e8, 0.9))

# --- single operations of PyTorch 2.11 on one H100, of sizes that are not those of the steps in docs/gpus.md: 37
# convolutions, 21 batch norms and 12 linear layers, forward and backward, in each type and memory format.

# Speed of a product in float32 and in TF32, of that of others: cuDNN's kernels of float32, of which those of gradients
# compute filters of several taps by transforms; weights' gradients in TF32, whose operands lie in the other order.
CONVOLUTION, TAPS_GRADIENT, POINTS_GRADIENT = (0.73, 1.0), (1.2, 1.0), (0.47, 1.0)
CONVOLUTION_WEIGHT, LINEAR_WEIGHT = 0.6, 0.8
# Of the bandwidth, what kernels reach that change the memory order of images of 2 and of 4 bytes, and that sum columns.
REORDER, COLUMN_SUM = {2: 0.67, 4: 0.85}, 0.45
# Elements of a channel a second, forward and backward: a batch norm of planes has a block for each channel.
CHANNEL_ITEMS_PER_S = 1.3e9, 0.6e9
# Of the bandwidth, forward and backward: PyTorch's own batch norm, which it takes where weights have 16 bits; and norms
# of rows of 2 and of 4 bytes an item.
OWN_BATCH_NORM, ROW_NORM = (0.37, 0.55), {2: 0.48, 4: 0.68}

# --- links: NCCL plans with 20 of 25 GB/s a link (NVIDIA/nccl, src/graph/topo.h); ports reach 23.5 of 25 GB/s
# (aliyun/SimAI, calbusbw.h).
LINK, NODE_LINK = 20 / 25, 23.5 / 25

# --- interpreters: the time in which PyTorch starts an operation: a step of an MLP on an H100, 0.77 ms for 13 of them,
# forward, backward and optimizer (784-512-512-10, batch 256).
OP_START_S = 59e-6
