"""The share of right predictions of all ranks."""

import mindspore.common.dtype as mstype
import mindspore.nn as nn
from mindspore.communication.management import GlobalComm
from mindspore.ops import operations as P


class ClassifyCorrectCell(nn.Cell):
    def __init__(self, network):
        super(ClassifyCorrectCell, self).__init__(auto_prefix=False)
        self._network = network
        self.argmax, self.equal, self.cast, self.reduce_sum = P.Argmax(), P.Equal(), P.Cast(), P.ReduceSum()
        self.allreduce = P.AllReduce(P.ReduceOp.SUM, GlobalComm.WORLD_COMM_GROUP)

    def construct(self, data, label):
        predicted = self.cast(self.argmax(self._network(data)), mstype.int32)
        right = self.cast(self.equal(predicted, label), mstype.float32)
        return (self.allreduce(self.reduce_sum(right)),)


class DistAccuracy(nn.Metric):
    def __init__(self, batch_size, device_num):
        super(DistAccuracy, self).__init__()
        self.batch_size, self.device_num = batch_size, device_num

    def clear(self):
        self._correct_num = self._total_num = 0

    def update(self, *inputs):
        self._correct_num += self._convert_data(inputs[0])
        self._total_num += self.batch_size * self.device_num

    def eval(self):
        return float(self._correct_num / self._total_num)
