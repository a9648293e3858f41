"""Learning rates: a linear warm-up, then a linear decay."""

import numpy as np


def get_lr(lr_init, lr_end, lr_max, warmup_epochs, total_epochs, steps_per_epoch, lr_decay_mode):
    assert lr_decay_mode == "linear"
    warmup, total = warmup_epochs * steps_per_epoch, total_epochs * steps_per_epoch
    up = np.linspace(lr_init, lr_max, warmup, endpoint=False)
    down = np.linspace(lr_max, lr_end, total - warmup, endpoint=False)
    return np.concatenate([up, down]).astype(np.float32)
