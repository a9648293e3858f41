"""Images of ImageNet's form, this rank's part of them."""

import multiprocessing

import mindspore as ms
import mindspore.dataset as ds
import mindspore.dataset.transforms.c_transforms as C2
import mindspore.dataset.vision.c_transforms as C
from mindspore.communication.management import get_group_size, get_rank, init


def create_dataset2(
    dataset_path,
    do_train,
    batch_size=32,
    train_image_size=224,
    eval_image_size=224,
    target="Ascend",
    distribute=False,
    enable_cache=False,
    cache_session_id=None,
):
    assert (target, enable_cache, cache_session_id) == ("Ascend", False, None)
    ds.config.set_prefetch_size(64)
    workers = min(12, multiprocessing.cpu_count())
    part = {}
    if distribute:
        init()
        part = {"num_shards": get_group_size(), "shard_id": get_rank()}
    images = ds.ImageFolderDataset(dataset_path, num_parallel_workers=workers, shuffle=True, **part)
    if do_train:
        crop = C.RandomCropDecodeResize(train_image_size, scale=(0.08, 1.0), ratio=(0.75, 1.333))
        trans = [crop, C.RandomHorizontalFlip(prob=0.5)]
    else:
        trans = [C.Decode(), C.Resize(eval_image_size + 4), C.CenterCrop(eval_image_size)]
    normalize = C.Normalize(mean=[0.485 * 255, 0.456 * 255, 0.406 * 255], std=[0.229 * 255, 0.224 * 255, 0.225 * 255])
    images = images.map(operations=trans, input_columns="image", num_parallel_workers=workers)
    images = images.map(operations=[normalize, C.HWC2CHW()], input_columns="image", num_parallel_workers=workers)
    for type_cast in (C2.TypeCast(ms.int32), ds.transforms.transforms.TypeCast(ms.int32)):
        images = images.map(operations=type_cast, input_columns="label", num_parallel_workers=workers)
    return images.batch(batch_size, drop_remainder=True)
