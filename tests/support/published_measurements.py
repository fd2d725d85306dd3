"""Published measurements as the planner's own types; `reference/planner/README.md` says where they come from."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

import trainwright as tw
from trainwright.strategies.cost_model.estimator import expected_terms
from trainwright.strategies.cost_model.step_work import StepWork, planned_step_work

FOLDER = Path(__file__).parents[1] / "reference" / "planner"
VTRAIN_SMALL, VTRAIN_LARGE = "vtrain_a100_up_to_4_gpus", "vtrain_a100_up_to_512_gpus"
_CLUSTERS = {
    "a100_40gb": "{}x8xA100-40GB@1600Gb",
    "a100_80gb": "{}x8xA100-80GB@800Gb",
    "h100_80gb": "{}x8xH100-80GB@3200Gb",
}


def table(name: str) -> list[dict[str, str]]:
    """The rows of one file."""
    with (FOLDER / f"{name}.csv").open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


@cache
def vtrain(name: str) -> tuple[tw.Measurement, ...]:
    """GPT-style models under Megatron-DeepSpeed."""
    return tuple(_vtrain(row) for row in table(name))


@cache
def mosaicml(gpu: str) -> tuple[tw.Measurement, ...]:
    """MPT models under FSDP on one kind of GPU."""
    return tuple(_mosaicml(row) for row in table("mosaicml_mpt") if row["gpu"] == gpu)


@cache
def megatron(scheme: str) -> tuple[tw.Measurement, ...]:
    """GPT of 175 and 530 billion parameters under `PTD-P` or `ZeRO-3`."""
    return tuple(_megatron(row) for row in table("megatron_zero3") if row["scheme"] == scheme)


def error(measured: Sequence[tw.Measurement], calibration: tw.Calibration | None = None) -> float:
    """Mean of |predicted / measured - 1|."""
    predicted = _predicted(measured, calibration)
    return float(np.mean([abs(step / one.step_s - 1) for step, one in zip(predicted, measured, strict=True)]))


def regret(measured: Sequence[tw.Measurement], calibration: tw.Calibration | None = None) -> float:
    """How much longer the plan predicted best takes than the best one, mean over jobs with a choice."""
    return chosen_regret(measured, _predicted(measured, calibration))


def chosen_regret(measured: Sequence[tw.Measurement], merit: Sequence[float]) -> float:
    """Likewise, by any merit of each measurement: the least is chosen."""
    jobs = defaultdict(list)
    for one, value in zip(measured, merit, strict=True):
        jobs[(one.cluster.accelerators, one.batch_size, one.profile)].append((value, one.step_s))
    choices = [steps for steps in jobs.values() if len(steps) > 1]
    lost = [min(steps)[1] / min(step for _, step in steps) - 1 for steps in choices]
    return float(np.mean(lost)) if lost else 0.0


def estimated(one: tw.Measurement, calibration: tw.Calibration) -> tw.Estimate:
    """With its interval, which takes ten times as long as the figure alone."""
    return tw.estimate(
        one.profile,
        one.cluster,
        one.plan,
        batch_size=one.batch_size,
        precision=one.precision,
        calibration=calibration,
    )


def coverage(measured: Sequence[tw.Measurement], calibration: tw.Calibration) -> float:
    """Share of the measured steps that lie in the interval that promises nine of ten."""
    found = [(estimated(one, calibration), one.step_s) for one in measured]
    return float(np.mean([one.low_s <= step_s <= one.high_s for one, step_s in found]))


def split(
    measured: Sequence[tw.Measurement], count: int, seed: int
) -> tuple[list[tw.Measurement], list[tw.Measurement]]:
    """So many at random, and the others."""
    order = np.random.default_rng(seed).permutation(len(measured))
    return [measured[i] for i in order[:count]], [measured[i] for i in order[count:]]


def _predicted(measured: Sequence[tw.Measurement], calibration: tw.Calibration | None) -> list[float]:
    known = calibration or tw.Calibration()
    return [sum(expected_terms(_work(one), known).values()) for one in measured]


@cache
def _work(one: tw.Measurement) -> StepWork:
    return planned_step_work(one.profile, one.cluster, planned(one))


def planned(one: tw.Measurement) -> tw.Plan:
    """The plan with its batch and precision."""
    return replace(one.plan, batch_size=one.batch_size, precision=one.precision)


@cache
def _model(hidden: int, layers: int, heads: int, sequence: int, vocabulary: int, fused: bool) -> tw.ModelProfile:
    return tw.transformer_profile(
        hidden=hidden,
        layers=layers,
        heads=heads,
        sequence=sequence,
        vocabulary=vocabulary,
        fused_attention=fused,
        fused_loss=fused,
    )


@cache
def _cluster(text: str) -> tw.Cluster:
    return tw.Cluster.parse(text)


def _vtrain(row: dict[str, str]) -> tw.Measurement:
    gpus = int(row["# GPUs"])
    degrees = f"dp={row['data parallelism']},tp={row['tensor parallelism']},pp={row['pipeline parallelism']}"
    sizes = (row["hidden size"], row["# layers"], row["attention heads"], row["sequence length"])
    return tw.Measurement(
        profile=_model(*map(int, sizes), 51_200, False),
        cluster=_cluster(f"1x{gpus}xA100-80GB" if gpus <= 8 else f"{gpus // 8}x8xA100-80GB@800Gb"),
        plan=tw.Plan.parse(f"{degrees},micro_batch={row['micro batch']},recompute=full"),
        batch_size=int(row["global batch"]),
        precision="fp16",
        step_s=float(row["iteration time (ms)"]) / 1000,
    )


def _mosaicml(row: dict[str, str]) -> tw.Measurement:
    gpus, sequence, batch = int(row["gpus"]), int(row["sequence"]), int(row["global_batch"])
    zero = 3 if row["sharding"] == "FULL_SHARD" else 2
    recompute = "full" if row["activation_checkpointing"] == "True" else "none"
    return tw.Measurement(
        profile=_model(int(row["hidden"]), int(row["layers"]), int(row["heads"]), sequence, 50_368, True),
        cluster=_cluster(_CLUSTERS[row["gpu"]].format(gpus // 8)),
        plan=tw.Plan.parse(f"fsdp={gpus},zero={zero},micro_batch={row['micro_batch']},recompute={recompute}"),
        batch_size=batch,
        precision="bf16",
        step_s=batch * sequence / float(row["tokens_per_s"]),
    )


def _megatron(row: dict[str, str]) -> tw.Measurement:
    """A step that takes the operations of equation 3 there, at the published rate."""
    layers, hidden, gpus, batch = (int(row[name]) for name in ("layers", "hidden", "gpus", "global_batch"))
    sequence, vocabulary, parts = 2048, 51_200, int(row["model_parallel"])
    share = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    flops = 96 * batch * sequence * layers * hidden**2 * share
    layout = f"fsdp={gpus}" if row["scheme"] == "ZeRO-3" else f"dp={gpus // parts},tp=8,pp={parts // 8},schedule=1f1b"
    return tw.Measurement(
        profile=_model(hidden, layers, int(row["heads"]), sequence, vocabulary, False),
        cluster=_cluster(f"{gpus // 8}x8xA100-80GB@1600Gb"),
        plan=tw.Plan.parse(f"{layout},micro_batch={row['micro_batch']},recompute=full"),
        batch_size=batch,
        precision="fp16",
        step_s=flops / (gpus * float(row["teraflops_per_gpu"]) * 1e12),
    )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How much quicker than the first row of its table a plan is."""

    name: str
    predicted: float
    published: float

    @property
    def off(self) -> float:
        """Of the prediction."""
        return self.predicted / self.published - 1


def gpipe() -> tuple[Speed, ...]:
    """Table 2 of Huang et al. (2019): a transformer of 48 layers on TPUs, 32 micro-batches, against 2 partitions."""
    profile = tw.transformer_profile(hidden=2048, layers=48, heads=32, sequence=1024, vocabulary=32_000)
    rows = [row for row in table("gpipe_table2_throughput") if row["model"] == "Transformer-48"]
    found = []
    for row in rows:
        if row["M_microbatches"] == "32":
            partitions = int(row["K_partitions"])
            plan = tw.Plan.parse(f"pp={partitions},micro_batch=1,schedule=gpipe,recompute=full")
            cluster = _cluster(f"{partitions}xTPU-V3")
            step_s = tw.estimate(profile, cluster, plan, batch_size=32, precision="bf16").step_s
            found.append((f"K={partitions}", 32 / step_s, float(row["normalized_throughput"])))
    return _speeds(found)


def torchgpipe(name: str) -> tuple[Speed, ...]:
    """One of torchgpipe's networks on up to 8 P40, with its balances, micro-batches and batches."""
    from tests.support import torchgpipe_models

    builders = {
        "resnet101": torchgpipe_models.resnet101,
        "unet": torchgpipe_models.unet,
        "amoebanetd": torchgpipe_models.amoebanet,
    }
    profile = torchgpipe_models.layered(builders[name], 192 if name == "unet" else 224)
    found = []
    for row in table(f"torchgpipe_{name}_speed"):
        row = {key.partition("(")[0]: value for key, value in row.items()}
        stages = tuple(map(int, row["balance"].split(",")))
        count, batch = int(row.get("chunks") or row["m_microbatches"]), int(row["batch"])
        named = row.get("experiment") or f"n={len(stages)}, m={count}"
        step_s = _torchgpipe_s(profile, stages, count, batch, plain=named == "baseline")
        found.append((f"{name} {named}", batch / step_s, float(row["samples_per_s"])))
    return _speeds(found)


def _torchgpipe_s(profile: tw.ModelProfile, stages: tuple[int, ...], count: int, batch: int, *, plain: bool) -> float:
    """A step in which all micro-batches but the last are computed again, or the only one; none where it is plain."""
    text = f"micro_batch={-(-batch // count)}" + (f",pp={len(stages)},schedule=gpipe" if len(stages) > 1 else "")
    plan = replace(tw.Plan.parse(text), stages=stages if len(stages) > 1 else ())
    again = 0.0 if plain else max(count - 1, 1) / count
    none, full = (
        tw.estimate(
            profile, _cluster("8xP40-24GB"), replace(plan, recompute=name), batch_size=batch, precision="fp32"
        ).step_s
        for name in ("none", "full")
    )
    return (1 - again) * none + again * full


def _speeds(rows: Sequence[tuple[str, float, float]]) -> tuple[Speed, ...]:
    _, predicted, published = rows[0]
    return tuple(Speed(name=name, predicted=one / predicted, published=other / published) for name, one, other in rows)


KNOWN = (0, 4, 8, 16, 32)  # rows
_DOCS = Path(__file__).parents[2] / "docs" / "planning.md"
_HEADING = "| published steps |"


def sets() -> dict[str, tuple[tw.Measurement, ...]]:
    """All published steps, by what they are of."""
    mpt = {
        "a100_40gb": "MPT, FSDP, 8 to 128 A100 40 GB", "a100_80gb": "MPT, FSDP, 8 to 64 A100 80 GB",
        "h100_80gb": "MPT, FSDP, 8 to 512 H100",
    }  # fmt: skip
    return {
        "GPT, Megatron-DeepSpeed, 2 and 4 A100": vtrain(VTRAIN_SMALL),
        "the same on 64 to 512 A100": vtrain(VTRAIN_LARGE),
        **{name: mosaicml(gpu) for gpu, name in mpt.items()},
        "GPT, Megatron-LM, 384 to 2,240 A100": megatron("PTD-P"),
        "the same under DeepSpeed's ZeRO-3": megatron("ZeRO-3"),
    }


def curve(measured: Sequence[tw.Measurement], count: int, draws: int = 20) -> tuple[float, float]:
    """Error, and coverage of the interval, of the rows that are not known, mean over draws of `count` known ones."""
    if not count:
        return error(measured), coverage(measured, tw.Calibration())
    drawn = [split(measured, count, seed) for seed in range(draws)]
    found = [(tw.calibrate(known), rest) for known, rest in drawn]
    errors = [error(rest, one) for one, rest in found]
    covered = [coverage(rest[:: max(1, len(rest) // 40)], one) for one, rest in found[:5]]
    return float(np.mean(errors)), float(np.mean(covered))


def _table() -> list[str]:
    """Lines of a table: the error, and in brackets the coverage, by the number of rows known."""
    lines = [f"{_HEADING} steps | " + " | ".join(f"{count or 'no'} rows known" for count in KNOWN) + " |"]
    lines.append("|---|" + "---|" * (1 + len(KNOWN)))
    for name, rows in sets().items():
        cells = [curve(rows, count) if count < len(rows) else None for count in KNOWN]
        figures = ["-" if cell is None else f"{cell[0]:.1%} ({cell[1]:.0%})" for cell in cells]
        lines.append(f"| {name} | {len(rows)} | {' | '.join(figures)} |")
    return lines


def main() -> None:
    """Write the table of errors into docs/planning.md, and print it with the figures of plans and speeds."""
    lines = _table()
    text = _DOCS.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(text) if line.startswith(_HEADING))
    last = next(number for number in range(first, len(text)) if not text[number].startswith("|"))
    _DOCS.write_text("\n".join([*text[:first], *lines, *text[last:]]) + "\n", encoding="utf-8")
    print("\n".join(lines))
    small, large = vtrain(VTRAIN_SMALL), vtrain(VTRAIN_LARGE)
    for count in (8, 16):
        drawn = [split(small, count, seed) for seed in range(20)]
        worse = np.mean([regret(rest, tw.calibrate(known)) for known, rest in drawn])
        print(f"regret on 2 and 4 A100, {count} rows known: {worse:.1%}")
    print(f"regret on 2 and 4 A100, no row known: {regret(small):.1%}")
    two = tw.calibrate([one for one in small if one.cluster.accelerators == 2])
    four = [one for one in small if one.cluster.accelerators == 4]
    print(f"fitted on 2 A100: 4 A100 {error(four, two):.1%} (regret {regret(four, two):.1%}), ", end="")
    print(f"64 to 512 {error(large, two):.1%} (regret {regret(large, two):.1%})")
    for name in ("data", "tensor", "pipeline"):
        merit = [-getattr(one.plan.mesh, name) for one in small]
        print(f"always the most {name} parallel, with the best micro-batch: regret {chosen_regret(small, merit):.1%}")
    for speed in (*gpipe(), *torchgpipe("resnet101"), *torchgpipe("unet"), *torchgpipe("amoebanetd")):
        print(f"{speed.name}: {speed.predicted:.2f} times, published {speed.published:.2f} ({speed.off:+.1%})")


if __name__ == "__main__":
    main()
