"""Every name that the tutorial on adaptive summation takes from MindSpore and the model zoo, on small images."""

import argparse
import os

from mindspore import FixedLossScaleManager, Model, ParallelMode, Tensor, context, nn, set_seed
from mindspore.common import initializer as weight_init
from mindspore.communication import init
from mindspore.nn import Momentum
from mindspore.parallel import set_algo_parameters
from mindspore.train.callback import LossMonitor, TimeMonitor
from models.official.cv.resnet.src.CrossEntropySmooth import CrossEntropySmooth
from models.official.cv.resnet.src.dataset import create_dataset2 as create_dataset
from models.official.cv.resnet.src.lr_generator import get_lr
from models.official.cv.resnet.src.metric import ClassifyCorrectCell, DistAccuracy
from resnet import resnet50 as resnet

DEVICES, CLASSES, BATCH, SIZE, EPOCHS = 4, 11, 4, 16, 2

set_seed(1)


def begin(network):
    draw = {nn.Conv2d: weight_init.XavierUniform, nn.Dense: weight_init.TruncatedNormal}
    for _, cell in network.cells_and_names():
        for kind, initial in draw.items():
            if isinstance(cell, kind):
                weight = cell.weight
                weight.set_data(weight_init.initializer(initial(), weight.shape, weight.dtype))


def groups(network):
    every = network.trainable_params()
    rest = [param for param in every if any(word in param.name for word in ("beta", "gamma", "bias"))]
    decayed = [param for param in every if not any(param is other for other in rest)]
    print("without decay:", " ".join(param.name for param in rest))
    return [{"params": decayed, "weight_decay": 0.0001}, {"params": rest}, {"order_params": every}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data_path", type=str, default="./data")
    args = parser.parse_args()

    context.set_context(mode=context.GRAPH_MODE, device_target="Ascend")
    context.set_context(device_id=int(os.getenv("DEVICE_ID")))
    context.set_auto_parallel_context(device_num=DEVICES, parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True)
    set_algo_parameters(elementwise_op_strategy_follow=True)
    init()

    def images(folder, do_train):
        return create_dataset(
            dataset_path=os.path.join(args.data_path, folder),
            do_train=do_train,
            batch_size=BATCH,
            train_image_size=SIZE,
            eval_image_size=SIZE,
            target="Ascend",
            distribute=True,
        )

    ds_train = images("train", do_train=True)
    step_size = ds_train.get_dataset_size()

    net = resnet(num_classes=CLASSES)
    names = [param.name for param in net.trainable_params()]
    begin(net)

    loss = CrossEntropySmooth(sparse=True, reduction="mean", smooth_factor=0.1, num_classes=CLASSES)
    loss_scale = FixedLossScaleManager(1024, drop_overflow_update=False)
    lr = get_lr(
        lr_init=0,
        lr_end=0.0,
        lr_max=0.1,
        warmup_epochs=1,
        total_epochs=EPOCHS,
        steps_per_epoch=step_size,
        lr_decay_mode="linear",
    )
    opt = Momentum(groups(net), Tensor(lr), 0.9, loss_scale=1024)

    dist_eval_network = ClassifyCorrectCell(net)
    # A cell without prefix leaves the names as they are.
    assert names == [param.name for param in net.trainable_params()]
    off = dict.fromkeys(("less_bn", "grad_freeze", "grad_accumulation", "dim_reduce"), False)
    model = Model(
        net,
        loss_fn=loss,
        optimizer=opt,
        metrics={"acc": DistAccuracy(BATCH, DEVICES)},
        loss_scale_manager=loss_scale,
        amp_level="O2",
        boost_level="O2",
        keep_batchnorm_fp32=False,
        boost_config_dict={"boost": {"mode": "manual", "adasum": True, **off}},
        eval_network=dist_eval_network,
    )
    cb = [TimeMonitor(data_size=step_size), LossMonitor()]
    model.train(EPOCHS, ds_train, callbacks=cb, sink_size=step_size, dataset_sink_mode=True)
    print("accuracy:", model.eval(images("validation_preprocess", do_train=False))["acc"])
