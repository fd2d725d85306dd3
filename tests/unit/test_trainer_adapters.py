"""`tw.from_lightning` and `tw.from_hf_trainer` equal a plain loop in what they cover, and refuse the rest by name."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

import trainwright as tw
from tests.support.run_views import storage
from tests.support.torch_engines import feed, one_device
from tests.support.trainer_stand_ins import (
    BATCH,
    Classifier,
    LightningDataModule,
    LightningModule,
    Points,
    Texts,
    Trainer,
    padded,
    plain_losses,
    plain_text_losses,
)
from trainwright.core.cluster import Cluster
from trainwright.core.data import Batch, Feed
from trainwright.core.errors import JobError
from trainwright.planning.job_description import describe
from trainwright.planning.job_preparation import plan_for, prepare

schedulers = torch.optim.lr_scheduler


def losses_of(job: tw.Job) -> list[float]:
    """The losses of a job on one device, in the order of the rows."""
    index = job.train.index()
    rows = np.arange(index.rows)
    batches = [rows[first : first + job.batch_size] for first in range(0, index.rows, job.batch_size)]
    total = len(batches) * job.epochs
    engine, losses = one_device(job.model_spec(total)), []
    for step in range(total):
        losses.append(engine.train_step(step_feed(job.train, batches[step % len(batches)], step)).loss)
    return losses


def step_feed(dataset: Any, rows: Any, step: int = 0) -> Feed:
    columns = dataset.read(dataset.index(), rows)
    return feed(Batch(columns=columns, weights=np.ones(len(rows)), samples=rows), step=step)


# --- Lightning --------------------------------------------------------------------------------------------------------


class ByEpoch(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        parts = [schedulers.ConstantLR(optimizer), schedulers.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]
        return {"optimizer": optimizer, "lr_scheduler": schedulers.SequentialLR(optimizer, parts, milestones=[1])}


def named(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in samples]) * 2, "y": torch.stack([y for _, y in samples])}


class ByName(Classifier):
    """Its batches are dicts that a function of its own makes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch["x"] / 2, batch["y"]), batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(Points(), batch_size=BATCH, collate_fn=named, shuffle=True)


@pytest.mark.parametrize("kind", [Classifier, ByEpoch, ByName])
def test_a_lightning_module_trains_as_in_a_plain_loop(kind: type[Classifier]) -> None:
    module = kind()
    job = tw.from_lightning(module, epochs=3, workers=2)
    assert (job.batch_size, job.data.shuffle, job.scaling.workers) == (BATCH, kind is ByName, 2)
    expected = plain_losses(ByEpoch() if kind is ByEpoch else Classifier(), 3)
    assert losses_of(job) == pytest.approx(expected, rel=1e-6)
    assert all(each.grad is None for each in module.parameters())


def test_a_validation_step_gives_the_evaluation() -> None:
    job = tw.from_lightning(Classifier)
    engine = one_device(job.model_spec(7))
    found = engine.evaluate_step(step_feed(job.evaluate, np.arange(20))).means()
    x, y = Points(20, 2).x, Points(20, 2).y
    expected = nn.functional.cross_entropy(Classifier()(x), y).item()
    assert found == pytest.approx({"loss": expected, "val_loss": expected})


class OnPlateau(Classifier):
    monitor = "val_loss"

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        scheduler = {"scheduler": schedulers.ReduceLROnPlateau(optimizer), "monitor": self.monitor}
        return [optimizer], [scheduler]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        self.log("val_norm_loss", self.net[0].weight.norm())
        self.log("text_loss", 0.5)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def monitored(name: str) -> tw.Job:
    module = OnPlateau()
    module.monitor = name
    return tw.from_lightning(module)


def test_a_plateau_follows_what_the_evaluation_logs_under_its_name() -> None:
    for name in ("val_loss", "val_norm_loss"):
        job = monitored(name)
        assert (job.training.schedule_metric, job.training.schedule_by) == ("loss", "step")
        found = one_device(job.model_spec(7)).evaluate_step(step_feed(job.evaluate, np.arange(20))).means()
        assert found["loss"] == pytest.approx(found[name])


def test_a_plateau_that_follows_no_loss_of_the_evaluation_is_refused() -> None:
    for name in ("train_loss", "val_accuracy"):
        with pytest.raises(JobError, match=f"monitor='{name}': only a loss of the evaluation is covered"):
            monitored(name)
    for name in ("epoch_loss", "text_loss"):  # one is not logged, the other is not a tensor
        job = monitored(name)
        with pytest.raises(JobError, match=f"monitor='{name}'.* logs no tensor under this name"):
            one_device(job.model_spec(7)).evaluate_step(step_feed(job.evaluate, np.arange(20)))


@pytest.mark.filterwarnings("ignore")  # of one device, few workers of a DataLoader, and such
def test_a_module_of_the_library_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            scheduler = schedulers.OneCycleLR(
                optimizer, max_lr=0.05, total_steps=self.trainer.estimated_stepping_batches
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Losses(lightning.Callback):
        def __init__(self) -> None:
            self.told: list[float] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.told.append(outputs["loss"].item())

    monkeypatch.chdir(tmp_path)
    module, recorded = Module(), Losses()
    data = DataLoader(Points(), batch_size=BATCH)
    losses = losses_of(tw.from_lightning(module, train=data, epochs=3, clip_norm=0.5))
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=3, gradient_clip_val=0.5, callbacks=[recorded], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    assert losses == pytest.approx(recorded.told, rel=1e-5) and len(losses) == 21


class ByStepLR(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [schedulers.StepLR(optimizer, 1, gamma=0.5)]


class Plain(Classifier):
    def configure_optimizers(self) -> Any:
        return self.optimizer()


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.001)


@pytest.mark.parametrize(
    "adapted",
    [lambda **given: tw.from_lightning(ByStepLR(), **given), lambda **given: tw.from_hf_trainer(Trainer(), **given)],
)
def test_an_optimizer_given_alone_does_not_get_the_schedule_of_another(adapted: Any) -> None:
    with pytest.raises(JobError, match=r"optimizer= is given.*give schedule= too"):
        adapted(optimizer=sgd)
    for options in ({"schedule": None}, {"training": tw.Training(schedule=None)}):
        job = adapted(optimizer=sgd, **options)
        assert (job.optimizer, job.training.schedule) == (sgd, None)


def test_options_replace_what_configure_optimizers_returns() -> None:
    assert tw.from_lightning(Plain(), optimizer=sgd).optimizer is sgd
    job = tw.from_lightning(several(), optimizer=sgd, schedule=tw.schedules.cosine)
    assert (job.optimizer, job.training.schedule) == (sgd, tw.schedules.cosine)
    assert tw.from_lightning(several(), optimizer=sgd).optimizer is sgd


class Sized(Classifier):
    """Notes the lengths that it was told."""

    told: ClassVar[list[tuple[int, int]]] = []

    def configure_optimizers(self) -> Any:
        self.told.append((self.trainer.estimated_stepping_batches, self.trainer.num_training_batches))
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"epochs": 2, "epoch_samples": 640}, (160, 80)),
        ({"epochs": 2, "data": tw.Data(epoch_samples=640)}, (160, 80)),
        ({"epochs": 2, "drop_last": True}, (12, 6)),
        ({"epochs": 2, "batch_size": 25}, (4, 2)),
    ],
)
def test_a_lightning_module_is_told_the_steps_that_the_options_give(options: Any, steps: tuple[int, int]) -> None:
    tw.from_lightning(Sized(), **options)
    assert Sized.told.pop() == steps


def test_the_plan_notes_a_schedule_that_was_made_for_a_run_of_another_length() -> None:
    job = tw.from_lightning(ByStepLR(), epochs=2, workers=1, storage=storage())
    for epochs, told in ((2, False), (3, True)):
        notes = plan_for(prepare(job.replace(epochs=epochs)), Cluster.parse("1x2xCPU")).chosen.notes
        assert any("the schedule was made for" in note for note in notes) == told, notes
    assert describe(job)["schedule"] == describe(tw.from_lightning(ByStepLR(), epochs=3))["schedule"]


def test_a_schedule_given_alone_counts_as_it_does_in_any_job() -> None:
    kinds = (ByStepLR, OnPlateau, TwoSchedulers)
    for job in [tw.from_lightning(kind(), schedule=tw.schedules.cosine) for kind in kinds]:
        assert (job.training.schedule_by, job.training.schedule_metric) == ("step", None)
        assert job.training.schedule is tw.schedules.cosine
    by_epoch = tw.from_lightning(ByStepLR(), schedule=tw.schedules.cosine, schedule_by="epoch")
    assert by_epoch.training.schedule_by == "epoch"
    with pytest.raises(JobError, match="OneCycleLR has set the rates of the optimizer: give optimizer="):
        tw.from_lightning(Classifier(), schedule=tw.schedules.cosine)


class TwoSchedulers(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [schedulers.StepLR(optimizer, 1), schedulers.StepLR(optimizer, 2)]


class Uncovered(Classifier):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, self.current_epoch)

    def on_train_epoch_end(self) -> None: ...

    def optimizer_step(self, *_: Any) -> None: ...


def test_hooks_of_a_lightning_module_are_refused_by_name() -> None:
    with pytest.raises(JobError) as refused:
        tw.from_lightning(Uncovered())
    words = ("on_train_epoch_end()", "optimizer_step()", "automatic_optimization", "self.current_epoch")
    assert len(refused.value.problems) == len(words)
    assert all(any(word in problem for problem in refused.value.problems) for word in words)


class PointsModule(LightningDataModule):
    def prepare_data(self) -> None:
        self.rows = 24

    def setup(self, stage: str) -> None:
        self.points = Points(self.rows)

    def teardown(self, stage: str) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def train_dataloader(self) -> Any:
        return DataLoader(self.points, batch_size=6)


class Normalized(PointsModule):
    def transfer_batch_to_device(self, batch: Any, device: Any, number: int) -> Any:
        return batch

    def on_after_batch_transfer(self, batch: Any, number: int) -> Any:
        return [batch[0] / 2, batch[1]]


def test_hooks_of_a_data_module_that_change_batches_are_refused_by_name() -> None:
    job = tw.from_lightning(Classifier(), PointsModule())
    assert (job.batch_size, job.train.index().rows) == (6, 24)
    with pytest.raises(JobError) as refused:
        tw.from_lightning(Classifier(), Normalized())
    words = ("transfer_batch_to_device()", "on_after_batch_transfer()")
    assert len(refused.value.problems) == len(words)
    assert all(any(word in problem for problem in refused.value.problems) for word in words)


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ()


def sampled(sampler: Any) -> Any:
    return DataLoader(Points(), batch_size=4, sampler=sampler)


def several() -> Any:
    module = Classifier()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]
    object.__setattr__(module, "configure_optimizers", lambda: optimizers)
    return module


@pytest.mark.parametrize(
    ("module", "loader", "problem"),
    [
        (Classifier(), DataLoader(Streamed()), "no rows by number"),
        (Classifier(), DataLoader(Points(), sampler=WeightedRandomSampler([1.0], 1)), "weighted"),
        (Classifier(), sampled(RandomSampler(Points(), num_samples=8)), r"draws 8 of 50 rows.*epoch_samples=8"),
        (Classifier(), sampled(SequentialSampler(range(9))), r"draws 9 of 50 rows"),
        (Classifier(), [DataLoader(Points())], "give one torch DataLoader"),
        (several(), None, "2 optimizers"),
        (nn.Linear(1, 1), None, "no LightningModule"),
    ],
)
def test_what_a_job_has_not_is_refused_with_the_way_out(module: Any, loader: Any, problem: str) -> None:
    with pytest.raises(JobError, match=problem):
        tw.from_lightning(module if isinstance(module, LightningModule) else lambda: module, train=loader)


def test_a_metric_object_and_a_step_without_a_loss_are_refused() -> None:
    class Logs(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("f1", SimpleNamespace(compute=float))

    class Nothing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    for module, problem in ((Logs(), "metric object"), (Nothing(), r"training_step\(\) returned no loss")):
        job = tw.from_lightning(module)
        with pytest.raises(JobError, match=problem):
            losses_of(job)


def test_other_weights_are_no_other_job(tmp_path: Path) -> None:
    first, other, wider = Classifier(), Classifier(), Classifier()
    nn.init.zeros_(other.net[0].weight)
    wider.net[1] = nn.ReLU()
    texts = [describe(tw.from_lightning(module, storage=str(tmp_path))) for module in (first, other, wider)]
    assert texts[0] == texts[1]
    assert texts[0]["model"] != texts[2]["model"]


# --- transformers -----------------------------------------------------------------------------------------------------


def test_a_trainer_trains_as_in_a_plain_loop() -> None:
    trainer = Trainer()
    job = tw.from_hf_trainer(trainer)
    assert (job.name, job.batch_size, job.epochs, job.training.clip_norm) == ("tuned", 8, 3, 0.5)
    assert trainer.optimizer is None
    assert losses_of(job) == pytest.approx(plain_text_losses(), rel=1e-6)


def test_lengths_of_a_trainer() -> None:
    def found(**arguments: Any) -> tuple[int, int | None]:
        job = tw.from_hf_trainer(Trainer(**arguments))
        return job.epochs, job.data.epoch_samples

    assert found(max_steps=6) == (2, None)
    assert found(max_steps=2) == (1, 16)
    assert found(gradient_accumulation_steps=1, train_batch_size=2, eval_strategy="steps", eval_steps=11) == (3, None)
    assert found(gradient_accumulation_steps=1, train_batch_size=2, num_train_epochs=0.5, max_steps=0) == (1, 12)
    with pytest.raises(JobError, match="not whole passes of 3 steps"):
        found(num_train_epochs=1.5)
    with pytest.raises(JobError, match="not a multiple of eval_steps=5"):
        found(eval_strategy="steps", eval_steps=5)


def test_checkpoints_by_epoch_of_a_trainer_stay_where_epochs_are_no_passes() -> None:
    def checkpoint_steps(**arguments: Any) -> Any:
        trainer = Trainer(gradient_accumulation_steps=1, train_batch_size=2, save_strategy="epoch", **arguments)
        return tw.from_hf_trainer(trainer).checkpointing.checkpoint_steps

    assert checkpoint_steps() is None
    assert checkpoint_steps(max_steps=28) == 11
    assert checkpoint_steps(max_steps=28, eval_strategy="steps", eval_steps=14) == 11


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"max_steps": 28, "eval_strategy": "epoch", "train_batch_size": 2}, "set max_steps to a multiple of 11$"),
        (
            {"num_train_epochs": 2.5, "eval_strategy": "epoch", "train_batch_size": 2},
            "set num_train_epochs to a whole number$",
        ),
        ({"max_steps": 9, "eval_strategy": "epoch"}, "set max_steps to a multiple of 6$"),
        (
            {"max_steps": 9, "eval_strategy": "steps", "eval_steps": 3},
            'set max_steps to a multiple of 6 and eval_strategy="epoch"$',
        ),
        ({"max_steps": 12, "eval_strategy": "steps", "eval_steps": 4}, 'steps: set eval_strategy="epoch"$'),
    ],
)
def test_epochs_that_are_no_whole_passes_are_refused_with_what_is_not_set_yet(arguments: Any, advice: str) -> None:
    with pytest.raises(JobError) as refused:
        tw.from_hf_trainer(Trainer(gradient_accumulation_steps=1, **arguments))
    (problem,) = refused.value.problems
    assert re.search(f"not whole passes of .*{advice}", problem)


class SizedTrainer(Trainer):
    """Notes the steps that its scheduler was made for."""

    told: ClassVar[list[int]] = []

    def create_scheduler(self, num_training_steps: int, optimizer: Any) -> Any:
        self.told.append(num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)


@pytest.mark.parametrize(
    ("options", "arguments", "length"),
    [
        ({"epochs": 1, "epoch_samples": 44}, {}, (1, 44, 6)),
        ({"epochs": 2, "data": {"epoch_samples": 44}}, {}, (2, 44, 12)),
        ({"drop_last": True}, {}, (3, None, 6)),
        ({"train": tw.datasets.from_torch(Texts(40))}, {}, (3, None, 15)),
        ({"epochs": 2, "batch_size": 1}, {"eval_strategy": "steps", "eval_steps": 11}, (4, 11, 44)),
    ],
)
def test_a_trainers_schedule_is_made_for_the_steps_that_the_options_give(
    options: Any, arguments: Any, length: tuple[int, int | None, int]
) -> None:
    job = tw.from_hf_trainer(SizedTrainer(**arguments), **options)
    assert (job.epochs, job.data.epoch_samples, SizedTrainer.told.pop()) == length


def test_samples_of_an_epoch_need_epochs() -> None:
    with pytest.raises(JobError, match=r"epoch_samples= is given.*give epochs= too"):
        tw.from_hf_trainer(Trainer(), epoch_samples=44)


def test_the_best_checkpoint_of_a_trainer_is_kept() -> None:
    def best(**arguments: Any) -> Any:
        trainer = Trainer(eval_strategy="epoch", **arguments)
        trainer.eval_dataset = Texts()
        return tw.from_hf_trainer(trainer).checkpointing.best

    assert best() is None
    assert best(save_strategy="best") == best(load_best_model_at_end=True) == "loss"
    with pytest.raises(JobError, match="metric_for_best_model='accuracy' is not covered"):
        best(save_strategy="best", metric_for_best_model="accuracy")


class OwnLoss(Trainer):
    def compute_loss(self) -> None: ...


def test_what_a_trainer_has_and_a_job_has_not_is_refused_by_name() -> None:
    evaluations = {"eval_delay": 2, "eval_on_start": True}
    trainer = OwnLoss(deepspeed="file.json", label_smoothing_factor=0.1, optim="schedule_free_adamw", **evaluations)
    trainer.compute_metrics = len
    trainer.callback_handler.callbacks = [Points()]
    trainer.eval_dataset = Streamed()
    with pytest.raises(JobError) as refused:
        tw.from_hf_trainer(trainer)
    words = (
        "compute_loss()", "deepspeed=", "label_smoothing_factor=", "compute_metrics=", "Points", "eval_dataset",
        "eval_delay=2", "eval_on_start=True", "optim='schedule_free_adamw'",
    )  # fmt: skip
    assert len(refused.value.problems) == len(words)
    assert all(any(word in problem for problem in refused.value.problems) for word in words)
    with pytest.raises(JobError, match=r"not a transformers\.Trainer"):
        tw.from_hf_trainer(Classifier())


def test_a_trainer_of_the_library_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import utils

    monkeypatch.setattr(utils, "is_datasets_available", lambda: False)  # it finds the folder of this repository
    import transformers

    torch.manual_seed(0)
    config = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, **dropout)),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            learning_rate=3e-3, weight_decay=0.1, warmup_steps=3, lr_scheduler_type="cosine", max_grad_norm=0.5,
            train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Texts(),
        data_collator=padded,
    )  # fmt: skip
    losses = losses_of(tw.from_hf_trainer(trainer))
    trainer.train()
    told = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(told, abs=1e-5)
