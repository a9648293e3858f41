"""Written by tests/stubs.py; do not edit."""

from simparallel.autograd.ops.activation import (gelu as gelu, leaky_relu as leaky_relu, silu as silu)
from simparallel.autograd.ops.along import (cumsum as cumsum, flip as flip, gather as gather, scatter as scatter,
    scatter_add as scatter_add, sort as sort, topk as topk)
from simparallel.autograd.ops.attention import (rotary_embedding as rotary_embedding, scaled_dot_product_attention as
    scaled_dot_product_attention)
from simparallel.autograd.ops.batch_norm import (batch_norm as batch_norm)
from simparallel.autograd.ops.bitwise import (bitwise_and as bitwise_and, bitwise_not as bitwise_not, bitwise_or as
    bitwise_or, bitwise_xor as bitwise_xor)
from simparallel.autograd.ops.cast import (cast as cast)
from simparallel.autograd.ops.compare import (eq as eq, ge as ge, gt as gt, le as le, lt as lt, ne as ne)
from simparallel.autograd.ops.conv import (conv1d as conv1d, conv2d as conv2d)
from simparallel.autograd.ops.conv_transpose import (conv_transpose2d as conv_transpose2d)
from simparallel.autograd.ops.dense_loss import (binary_cross_entropy as binary_cross_entropy,
    binary_cross_entropy_with_logits as binary_cross_entropy_with_logits, huber_loss as huber_loss, l1_loss as l1_loss,
    mse_loss as mse_loss, smooth_l1_loss as smooth_l1_loss)
from simparallel.autograd.ops.dropout import (dropout as dropout)
from simparallel.autograd.ops.einsum import (einsum as einsum)
from simparallel.autograd.ops.elementwise import (abs as abs, add as add, clone as clone, div as div, floor_divide as
    floor_divide, mul as mul, neg as neg, relu as relu, remainder as remainder, sigmoid as sigmoid, sub as sub)
from simparallel.autograd.ops.embedding import (embedding as embedding, one_hot as one_hot)
from simparallel.autograd.ops.expand import (broadcast_to as broadcast_to, expand as expand, pad as pad, squeeze as
    squeeze, tile as tile, unsqueeze as unsqueeze)
from simparallel.autograd.ops.extremum import (argmax as argmax, argmin as argmin, logsumexp as logsumexp, max as max,
    min as min, std as std, var as var)
from simparallel.autograd.ops.indexing import (chunk as chunk, getitem as getitem, split as split, take as take)
from simparallel.autograd.ops.interpolate import (interpolate as interpolate)
from simparallel.autograd.ops.join import (cat as cat, concat as concat, stack as stack)
from simparallel.autograd.ops.loss import (cross_entropy as cross_entropy, cross_entropy_expand as cross_entropy_expand,
    nll_loss as nll_loss, softmax_cross_entropy_with_logits as softmax_cross_entropy_with_logits)
from simparallel.autograd.ops.matmul import (linear as linear, matmul as matmul)
from simparallel.autograd.ops.norm import (group_norm as group_norm, layer_norm as layer_norm, rms_norm as rms_norm)
from simparallel.autograd.ops.pool import (adaptive_avg_pool2d as adaptive_avg_pool2d, avg_pool2d as avg_pool2d,
    max_pool2d as max_pool2d)
from simparallel.autograd.ops.power import (pow as pow, square as square)
from simparallel.autograd.ops.reduce import (all as all, any as any, mean as mean, prod as prod, sum as sum)
from simparallel.autograd.ops.selection import (clamp as clamp, clip as clip, masked_fill as masked_fill, maximum as
    maximum, minimum as minimum, where as where)
from simparallel.autograd.ops.shape import (flatten as flatten, permute as permute, redistribute as redistribute,
    reshape as reshape, transpose as transpose)
from simparallel.autograd.ops.softmax import (log_softmax as log_softmax, softmax as softmax)
from simparallel.autograd.ops.transfer import (to as to)
from simparallel.autograd.ops.unary import (acos as acos, asin as asin, atan as atan, ceil as ceil, cos as cos, cosh as
    cosh, exp as exp, expm1 as expm1, floor as floor, log as log, log10 as log10, log1p as log1p, log2 as log2, round as
    round, rsqrt as rsqrt, sign as sign, sin as sin, sinh as sinh, sqrt as sqrt, tan as tan, tanh as tanh, trunc as
    trunc)
