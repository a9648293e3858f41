"""Cross-entropy with smoothed labels."""

import mindspore.nn as nn
from mindspore import Tensor
from mindspore.common import dtype as mstype
from mindspore.nn import LossBase
from mindspore.ops import functional as F, operations as P


class CrossEntropySmooth(LossBase):
    def __init__(self, sparse=True, reduction="mean", smooth_factor=0.0, num_classes=1000):
        super(CrossEntropySmooth, self).__init__()
        self.sparse, self.onehot = sparse, P.OneHot()
        self.on_value = Tensor(1.0 - smooth_factor, mstype.float32)
        self.off_value = Tensor(1.0 * smooth_factor / (num_classes - 1), mstype.float32)
        self.ce = nn.SoftmaxCrossEntropyWithLogits(reduction=reduction)

    def construct(self, logit, label):
        target = self.onehot(label, F.shape(logit)[1], self.on_value, self.off_value) if self.sparse else label
        return self.ce(logit, target)
