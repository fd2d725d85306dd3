"""What the Python blocks of README and docs need around them, and which of them cannot be run here.

A setup is Python code that is run before a block of its page, counted from 0, in the namespace of the page; one with
the number of the blocks of a page is run after the last. Names that a page gets from its reader are made here.
"""

from __future__ import annotations

NOT_RUN = {
    ("docs/data.md", 1): "reads from a bucket, and starts Ray Data; tests/ray/test_ray_source.py runs Ray Datasets",
    ("docs/data.md", 2): "downloads a data set; tests/unit/test_user_loaders.py runs loaders",
    ("docs/data-delivery.md", 0): "reads from a bucket, and starts Ray Data; tests/ray/test_ray_delivery.py runs it",
    ("docs/ray-train.md", 0): "starts Ray Train; tests/ray/test_ray_train.py runs it",
    ("docs/ray-train.md", 1): "needs the result of Ray Train",
    ("docs/ray-train.md", 2): "runs in a worker of Ray Train",
    ("docs/ray-train.md", 3): "starts Ray Tune",
    ("docs/training.md", 4): "needs files of weights in a bucket; tests/unit/test_initial_weights.py runs them",
    ("docs/training.md", 5): "needs a downloaded model; tests/unit/test_frozen_parameters.py runs adapters",
}
"""Blocks whose names and arguments are checked, but which are not run, and why."""

_IMAGES = """
import numpy as np, pyarrow, pyarrow.parquet, pathlib
images = pyarrow.array(np.zeros((8, 784)).tolist(), pyarrow.list_(pyarrow.float32()))
rows = pyarrow.table({"image": images, "label": np.arange(8) % 10})
for folder in FOLDERS:
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(rows, f"{folder}/rows.parquet")
"""
_NETWORK = """
from torch.nn.functional import cross_entropy as _cross_entropy
build_model = lambda: nn.Linear(784, 10)
cross_entropy = lambda logits, labels: _cross_entropy(logits, labels, reduction="none")
adam = lambda parameters: torch.optim.Adam(parameters)
accuracy = lambda logits, labels: logits.argmax(1) == labels
"""
_NAMED = 'job = completed()\nbig_job = completed(name="big")\n'
_PROGRAMS = """
from tests.support.trainer_stand_ins import Classifier, Points, Trainer
class Digits:  # a LightningDataModule
    def __init__(self, folder): ...
    def prepare_data(self): ...
    def setup(self, stage): ...
    def train_dataloader(self): return torch.utils.data.DataLoader(Points(), batch_size=8)
    def val_dataloader(self): return self.train_dataloader()
trainer = Trainer()
"""

SETUPS = {
    ("README.md", 0): 'FOLDERS = ["data/fashion-mnist/train", "data/fashion-mnist/test"]' + _IMAGES + _NETWORK,
    ("README.md", 1): "import sys, types\nsys.modules['job'] = types.SimpleNamespace(job=job)",
    ("README.md", 2): "del sys.modules['job']",
    ("docs/best.md", 0): 'FOLDERS = ["data/valid"]' + _IMAGES.replace('"image"', '"x"').replace("784", "4") + _NETWORK,
    ("docs/data.md", 0): """
import pathlib
pathlib.Path("corpus").mkdir()
pathlib.Path("corpus/one.txt").write_text("one two\\n\\nthree")
tokenizer = lambda text: [ord(letter) for letter in text]
keep = lambda row: True
augment = lambda row, rng: row
crops = lambda row: [row, row]
decode = lambda columns: columns
web = books = tw.datasets.table({"x": np.zeros((8, 4), "float32"), "weight": np.ones(8)})
job = completed()
FOLDERS = ["predictions"]
"""
    + _IMAGES,
    ("docs/data.md", 3): "data = web",
    ("docs/distillation.md", 0): _NAMED + "build_tiny = lambda: nn.Linear(4, 2)\n",
    ("docs/distillation.md", 1): "build = build_tiny\npretrained = build_tiny",
    ("docs/distillation.md", 2): "distillation = tw.Distillation(student=job, teachers=(big,))",
    ("docs/distillation.md", 3): "data = job.train",
    ("docs/debugging.md", 0): """
import pathlib

pathlib.Path("job.py").write_text(
    "import numpy as np, torch, trainwright as tw\\n"
    "rows = tw.datasets.table({'x': np.ones((8, 4), np.float32), 'y': np.zeros(8, np.int64)})\\n"
    "job = tw.Job(name='n', model=lambda: torch.nn.Linear(4, 2), loss=torch.nn.CrossEntropyLoss(), train=rows,\\n"
    "             optimizer=lambda p: torch.optim.SGD(p, 0.1), inputs='x', targets='y', batch_size=4)\\n"
)
""",
    ("docs/debugging.md", 1): "assert outputs.shape == (4, 2)",
    ("docs/get-started.md", 2): "import torch.utils.data\n"
    "dataset = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64))\n"
    'FOLDERS = ["data/train"]' + _IMAGES + 'pathlib.Path("data/photos/cat").mkdir(parents=True)\n'
    "from PIL import Image\nImage.new('RGB', (8, 8)).save('data/photos/cat/one.png')\ntried(job)",
    ("docs/get-started.md", 3): "assert train.index().rows == 8",
    (
        "docs/get-started.md",
        4,
    ): "tried(job)\nimport pathlib; pathlib.Path('README.md').write_text('In the beginning ' * 99)",
    ("docs/get-started.md", 5): "tried(job)",
    ("docs/get-started.md", 6): "tried(job)",
    ("docs/moving-in.md", 0): 'FOLDERS = ["data/train"]' + _IMAGES,
    ("docs/moving-in.md", 1): "tried(job)\nNet = lambda: nn.Linear(784, 10)",
    ("docs/moving-in.md", 2): _PROGRAMS,
    ("docs/moving-in.md", 6): """
import keras
build = lambda: keras.Sequential([keras.Input((784,)), keras.layers.Dense(10, activation="softmax")])
""",
    ("docs/planning.md", 0): """
import json, pathlib
pathlib.Path("Llama-3.1-8B").mkdir()
pathlib.Path("Llama-3.1-8B/config.json").write_text(json.dumps({
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}))
""",
    ("docs/planning.md", 1): "from functools import partial",
    ("docs/tensorflow.md", 0): """
import keras, tensorflow as tf
GLOBAL_BATCH_SIZE = 8
create_model = lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
data = tw.datasets.table({"image": np.zeros((16, 4), "float32"), "label": np.arange(16) % 3})
""",
    ("docs/tensorflow.md", 1): "tried(job)",
    ("docs/trained-models.md", 0): _NAMED,
    (
        "docs/training.md",
        1,
    ): "tried(completed(optimizer=optimizer))\nadam = lambda parameters: torch.optim.Adam(parameters)\n"
    "class Gan(nn.Module): ...\n",
    ("docs/training.md", 3): "make_grid = lambda images: images",
    ("docs/training.md", 6): _PROGRAMS,
    ("docs/training.md", 7): """
class Coder(nn.Linear):
    def __init__(self):
        super().__init__(4, 6)
    def forward(self, x):
        return super().forward(x).split(2, 1)
reconstruction = lambda decoded, targets: (decoded - targets[:, None]).square().mean(1)
divergence = lambda mean, log_variance: (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
""",
    ("docs/training.md", 8): """
tried(job.replace(model=Coder))
build_network = lambda: nn.Linear(4, 10)
distance = lambda logits, center: (logits - center).square().mean(1)
""",
    ("docs/training.md", 9): "tried(job)",
    ("docs/tuning.md", 0): _NAMED,
    ("docs/watching.md", 1): """
from torch.distributions import Categorical
from torch.nn.functional import cross_entropy
from torchmetrics import F1Score
accuracy = lambda logits, labels: logits.argmax(1) == labels
""",
    ("docs/watching.md", 2): "tried(job.replace(metrics={'accuracy': accuracy}))",
}
