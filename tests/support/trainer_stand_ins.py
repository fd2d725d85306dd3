"""Stand-ins for the classes of Lightning and of transformers' Trainer, with what the adapters look at, and programs."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tests.support.torch_jobs import Kill, rank

ROWS, BATCH = 50, 8


class LightningModule(nn.Module):
    """With the hooks that tests override."""

    automatic_optimization = True
    trainer: Any = None

    @property
    def current_epoch(self) -> int:
        return 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        raise NotImplementedError

    def train_dataloader(self) -> Any:
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        raise NotImplementedError

    def log(self, name: str, value: Any, **_: Any) -> None:
        raise RuntimeError("there is no Trainer")

    def log_dict(self, values: Any, **_: Any) -> None:
        raise RuntimeError("there is no Trainer")

    def on_train_epoch_end(self) -> None: ...

    def optimizer_step(self, *_: Any) -> None: ...

    def setup(self, stage: str) -> None: ...


class LightningDataModule:
    """With the hooks that tests override."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def teardown(self, stage: str) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def train_dataloader(self) -> Any:
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        raise NotImplementedError

    def transfer_batch_to_device(self, batch: Any, device: Any, number: int) -> Any:
        return batch

    def on_after_batch_transfer(self, batch: Any, number: int) -> Any:
        return batch


class Points(Dataset[Any]):
    """Pairs of a point and its class."""

    def __init__(self, rows: int = ROWS, seed: int = 1) -> None:
        self.x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
        self.y = self.x[:, :3].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]


def strike_in_training(model: Any) -> None:
    """Count a step of a model in training, and die where its `kill` says."""
    if model.training:
        if model.kill is not None and model.kill.rank == rank() and model.kill.step == int(model.steps):
            model.kill.strike()
        model.steps += 1


class Classifier(LightningModule):
    """A program of Lightning's; it dies where `kill` says."""

    def __init__(self, kill: Kill | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        for parameter in self.net.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.kill = kill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        strike_in_training(self)
        outputs = self(x)
        self.log("accuracy", (outputs.argmax(1) == y).float().mean(), prog_bar=True)
        return {"loss": functional.cross_entropy(outputs, y), "outputs": outputs.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log_dict({"val_loss": functional.cross_entropy(self(x), y)})

    def optimizer(self) -> torch.optim.Optimizer:
        """Weights and biases in a group each."""
        groups = [[each for each in self.parameters() if (each.dim() > 1) == matrix] for matrix in (True, False)]
        return torch.optim.AdamW(
            [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "lr": 0.02}], lr=0.05
        )

    def configure_optimizers(self) -> Any:
        optimizer, steps = self.optimizer(), self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(Points(), batch_size=BATCH)

    def val_dataloader(self) -> Any:
        return DataLoader(Points(20, 2), batch_size=BATCH)


def plain_losses(module: Classifier, epochs: int) -> list[float]:
    """The losses of a plain loop over a copy of a module."""
    module, losses = copy.deepcopy(module), []
    loader = list(module.train_dataloader())
    module.trainer = SimpleNamespace(estimated_stepping_batches=len(loader) * epochs)
    made = module.configure_optimizers()
    entry = made["lr_scheduler"]
    entry = entry if isinstance(entry, dict) else {"scheduler": entry}
    for number in range(epochs * len(loader)):
        x, y = loader[number % len(loader)]
        loss = functional.cross_entropy(module(x), y)
        made["optimizer"].zero_grad()
        loss.backward()
        made["optimizer"].step()
        if entry.get("interval", "epoch") == "step" or (number + 1) % len(loader) == 0:
            entry["scheduler"].step()
        losses.append(loss.item())
    return losses


# --- transformers -----------------------------------------------------------------------------------------------------


class Texts(Dataset[Any]):
    """Tokens of unequal length, whose first labels do not count."""

    def __init__(self, rows: int = 22) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = []
        for number in range(rows):
            tokens = torch.randint(1, 50, (5 + number % 7,), generator=generator)
            labels = tokens.clone()
            labels[: 1 + number % 3] = -100
            self.rows.append({"input_ids": tokens, "labels": labels, "number": torch.tensor(number)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A data collator."""
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([each["input_ids"] for each in samples], batch_first=True),
        "labels": pad([each["labels"] for each in samples], batch_first=True, padding_value=-100),
    }


class LanguageModel(nn.Module):
    """A causal language model as those of transformers are; it dies where `kill` says."""

    loss_type = "ForCausalLM"

    def __init__(self, kill: Kill | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.kill = kill

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> Any:
        strike_in_training(self)
        logits = self.head(self.embedding(input_ids))
        assert labels is not None
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Trainer:
    """Of transformers, with its defaults; `arguments` change its TrainingArguments."""

    optimizer = lr_scheduler = compute_loss_func = compute_metrics = eval_dataset = None
    model_accepts_loss_kwargs = True

    def __init__(self, kill: Kill | None = None, **arguments: Any) -> None:
        given: dict[str, Any] = {
            "output_dir": "out/tuned", "train_batch_size": 4, "gradient_accumulation_steps": 2, "world_size": 1,
            "num_train_epochs": 3.0, "max_steps": -1, "eval_strategy": "no", "eval_steps": None, "seed": 42,
            "save_strategy": "steps", "save_steps": 500, "save_total_limit": None, "load_best_model_at_end": False,
            "metric_for_best_model": None, "dataloader_drop_last": False, "max_grad_norm": 0.5, "bf16": False,
            "fp16": False, "train_sampling_strategy": "sequential",
        }  # fmt: skip
        self.args = SimpleNamespace(**{**given, **arguments})
        self.state = SimpleNamespace(global_step=0)
        self.callback_handler = SimpleNamespace(callbacks=[])
        self.model, self.train_dataset, self.data_collator = LanguageModel(kill), Texts(), padded

    def compute_loss(self) -> None: ...

    def create_optimizer(self) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_training_steps)

    def _get_collator_with_removed_columns(self, collator: Any, description: str) -> Any:
        return collator


def plain_text_losses() -> list[float]:
    """The losses of a plain loop that does what a `Trainer` with its defaults does."""
    model, texts, losses = LanguageModel(), Texts(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(9):
        rows = range(step % 3 * 8, min(step % 3 * 8 + 8, 22))
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 9)
        loss = model(**padded([texts[row] for row in rows]))["loss"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses
