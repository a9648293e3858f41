"""Written by tests/stubs.py; do not edit."""

from simparallel.autograd.ops.activation import (GELU as GELU, LeakyReLU as LeakyReLU, SiLU as SiLU)
from simparallel.autograd.ops.along import (CumSum as CumSum, Flip as Flip, GatherD as GatherD, Scatter as Scatter, TopK
    as TopK)
from simparallel.autograd.ops.attention import (RotaryEmbedding as RotaryEmbedding, ScaledDotProductAttention as
    ScaledDotProductAttention)
from simparallel.autograd.ops.batch_norm import (BatchNorm as BatchNorm, BatchNormInference as BatchNormInference)
from simparallel.autograd.ops.bitwise import (BitwiseAnd as BitwiseAnd, BitwiseNot as BitwiseNot, BitwiseOr as
    BitwiseOr, BitwiseXor as BitwiseXor)
from simparallel.autograd.ops.cast import (Cast as Cast)
from simparallel.autograd.ops.compare import (Equal as Equal, Greater as Greater, GreaterEqual as GreaterEqual, Less as
    Less, LessEqual as LessEqual, NotEqual as NotEqual)
from simparallel.autograd.ops.conv import (Conv2d as Conv2d)
from simparallel.autograd.ops.conv_transpose import (ConvTranspose2d as ConvTranspose2d)
from simparallel.autograd.ops.dense_loss import (BinaryCrossEntropy as BinaryCrossEntropy, BinaryCrossEntropyWithLogits
    as BinaryCrossEntropyWithLogits, Huber as Huber, L1 as L1, MSE as MSE, SmoothL1 as SmoothL1)
from simparallel.autograd.ops.dropout import (Dropout as Dropout)
from simparallel.autograd.ops.einsum import (Einsum as Einsum)
from simparallel.autograd.ops.elementwise import (Abs as Abs, Add as Add, Clone as Clone, Div as Div, FloorDivide as
    FloorDivide, Mul as Mul, Neg as Neg, ReLU as ReLU, Remainder as Remainder, Sigmoid as Sigmoid, Sub as Sub)
from simparallel.autograd.ops.embedding import (Embedding as Embedding, OneHot as OneHot)
from simparallel.autograd.ops.expand import (BroadcastTo as BroadcastTo, Pad as Pad, Squeeze as Squeeze, Tile as Tile,
    Unsqueeze as Unsqueeze)
from simparallel.autograd.ops.extremum import (ArgMax as ArgMax, ArgMin as ArgMin, LogSumExp as LogSumExp, Max as Max,
    Min as Min, Std as Std, Var as Var)
from simparallel.autograd.ops.indexing import (Index as Index, Slice as Slice)
from simparallel.autograd.ops.join import (Coalesce as Coalesce, Concat as Concat, Stack as Stack)
from simparallel.autograd.ops.loss import (CrossEntropy as CrossEntropy, NLL as NLL, SoftmaxCrossEntropyWithLogits as
    SoftmaxCrossEntropyWithLogits)
from simparallel.autograd.ops.matmul import (Linear as Linear, MatMul as MatMul)
from simparallel.autograd.ops.norm import (GroupNorm as GroupNorm, LayerNorm as LayerNorm, RMSNorm as RMSNorm)
from simparallel.autograd.ops.pool import (AdaptiveAvgPool2d as AdaptiveAvgPool2d, AvgPool2d as AvgPool2d, MaxPool2d as
    MaxPool2d)
from simparallel.autograd.ops.power import (Pow as Pow)
from simparallel.autograd.ops.reduce import (Mean as Mean, Prod as Prod, Sum as Sum)
from simparallel.autograd.ops.selection import (Clip as Clip, Maximum as Maximum, Minimum as Minimum, Where as Where)
from simparallel.autograd.ops.shape import (Flatten as Flatten, Permute as Permute, Redistribute as Redistribute,
    Reshape as Reshape)
from simparallel.autograd.ops.softmax import (LogSoftmax as LogSoftmax, Softmax as Softmax)
from simparallel.autograd.ops.transfer import (Replicate as Replicate, ToDevice as ToDevice)
from simparallel.autograd.ops.unary import (Acos as Acos, Asin as Asin, Atan as Atan, Ceil as Ceil, Cos as Cos, Cosh as
    Cosh, Exp as Exp, Expm1 as Expm1, Floor as Floor, Log as Log, Log10 as Log10, Log1p as Log1p, Log2 as Log2, Round as
    Round, Rsqrt as Rsqrt, Sign as Sign, Sin as Sin, Sinh as Sinh, Sqrt as Sqrt, Tan as Tan, Tanh as Tanh, Trunc as
    Trunc)
