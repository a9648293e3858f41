"""`mindspore.dataset`: pipelines."""

from simparallel import data as _data
from simparallel.backend import manual_seed as _manual_seed, random_state as _random_state
from simparallel.compat.front import take as _take, unused
from simparallel.compat.mindspore.dataset import transforms, vision

_take(globals(), _data, """
Cifar10Dataset FashionMnistDataset GeneratorDataset ImageFolderDataset MnistDataset NumpySlicesDataset
SourceDataset
""", Dataset="Pipeline")  # fmt: skip


class config:
    """`mindspore.dataset.config`: most settings are ignored, because the calling process reads the data."""

    @staticmethod
    def set_seed(seed: int) -> None:
        """Set the seed of orders and random transforms, together with all other seeds: see `sp.set_seed`."""
        _manual_seed(seed)

    @staticmethod
    def get_seed() -> int:
        return _random_state.seed

    @staticmethod
    def set_num_parallel_workers(num: int) -> None:
        unused("dataset.config", num_parallel_workers=num)

    @staticmethod
    def set_prefetch_size(size: int) -> None:
        unused("dataset.config", prefetch_size=size)
