"""The data of the programs: 24 samples with 4 features, a target and a class each."""

import numpy as np

from simparallel.backend import random_normal

# float32, (24, 4).
X = random_normal(7, "zoo", 0, 96).reshape(24, 4).astype(np.float32)
# Targets, float32, (24, 1): a linear map of the features, with noise.
Y = (X @ [[1.0], [-2.0], [0.5], [3.0]] + random_normal(8, "zoo", 0, 24)[:, None]).astype(np.float32)
# Classes 0, 1 and 2, int64, (24,): the place of the largest of three features.
LABELS = X[:, :3].argmax(1)
