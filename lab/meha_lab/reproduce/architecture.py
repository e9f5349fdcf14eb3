"""Architecture search as cells: a search with a budget of passes, and the training of the network that it found."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from meha.method.optimizers import Optimizer
from meha.methods import CG, DARTS, IAPTT, MEHA, RHG, Method
from meha.problem.schedules import Cosine
from meha_lab.datasets.sources import cache_folder
from meha_lab.reproduce.cells import Cell, Record
from meha_lab.reproduce.learning import device
from meha_lab.tasks.architecture_search import (
    ArchitectureSearch,
    Found,
    Genotype,
    Stage,
    architecture_search,
    random_genotype,
    search,
    train_final,
)
from meha_lab.tasks.architecture_search.training import SGD

__all__ = [
    "FULL",
    "LONGER",
    "QUICK",
    "REDUCED",
    "ROWS",
    "Protocol",
    "SearchRow",
    "measure_architecture",
    "methods_of",
    "stages_of",
]


WORK = {"DARTS, order 1": 2, "DARTS, order 2": 5, "RHG": 3, "CG": 4, "IAPTT": 5, "MEHA": 3}
"""Gradients and Hessian-vector products in a step (of IAPTT, at most)."""

RECORDED = ("DARTS, order 1", "DARTS, order 2", "RHG", "MEHA")
"""Methods whose steps can be recorded as CUDA graphs; CG and IAPTT decide in Python how far they go."""

WARM_UP = {"P-DARTS": 10 / 25, "PC-DARTS": 15 / 50}
"""The share of the epochs before x moves."""

OWN = {"P-DARTS": (96, 0.025), "PC-DARTS": (256, 0.1)}
"""Batches and learning rates in the papers of the courses."""

DROPOUT = (0.0, 0.4, 0.7)
"""Rates of P-DARTS on skip connections at the start of each stage, on CIFAR-10."""

KEPT = (5, 3, None)
"""Operations that P-DARTS keeps on an edge after each stage."""

MOST_SKIPS = 2
"""Skip connections that P-DARTS allows in the normal cell."""

PARTIAL = 4
"""PC-DARTS sends a quarter of the channels through the operations."""

DIGITS = 9
"""Decimals to which a number of steps is rounded before it is rounded up, against errors of floating-point numbers."""

LAST_RATE = 1 / 25
"""The learning rate of y at the end of a search, relative to the start: 0.001 after 0.025 in DARTS."""


@dataclass(frozen=True)
class Protocol:
    """What all rows of a table have in common.

    Attributes:
        name: of the case.
        task: options of :func:`architecture_search`.
        work: passes of a search, if they limit it: gradients and Hessian-vector products together.
        epochs: passes over the images of a level, if they limit it. P-DARTS has half as many in each of its three stages.
        rate: learning rate of the weights by SGD with momentum.
        plain_rate: step of the weights without momentum, for methods that unroll their steps.
        x_rate: learning rate of Adam for x; P-DARTS and PC-DARTS have twice as much.
        meha_x_rate: the same for MEHA.
        depths: cells in the three stages of P-DARTS.
        candidates: networks that random search trains.
        final: options of the final network.
        final_rate: its learning rate.
    """

    name: str
    task: Mapping[str, Any]
    work: int | None
    epochs: int | None
    rate: float
    plain_rate: float
    x_rate: float
    meha_x_rate: float
    depths: tuple[int, int, int]
    candidates: int
    final: Mapping[str, Any]
    final_rate: float


REDUCED = Protocol(
    name="architecture search, reduced",
    task={"data": "cifar10", "channels": 16, "cells": 3, "batch": 128, "half": True},
    work=600,
    epochs=None,
    rate=0.05,
    plain_rate=0.2,
    x_rate=3e-3,
    meha_x_rate=3e-3,
    depths=(3, 4, 5),
    candidates=6,
    final={"epochs": 5, "channels": 16, "cells": 8, "batch": 256, "drop_path": 0.0, "cutout": False},
    final_rate=0.1,
)

LONGER = replace(
    REDUCED,
    name="architecture search, trained longer",
    final={"epochs": 30, "channels": 36, "cells": 8, "batch": 256, "drop_path": 0.0},
)

FULL = Protocol(
    name="architecture search, full",
    task={"data": "cifar10", "channels": 16, "cells": 3, "batch": 64},
    work=None,
    epochs=50,
    rate=0.025,
    plain_rate=0.1,
    x_rate=3e-4,
    meha_x_rate=8e-5,
    depths=(5, 11, 17),
    candidates=24,
    final={"epochs": 600, "channels": 36, "cells": 8, "batch": 96},
    final_rate=0.025,
)

QUICK = Protocol(
    name="architecture search, quick",
    task={"data": "digits", "channels": 4, "cells": 3, "batch": 16, "size": 320},
    work=30,
    epochs=None,
    rate=0.05,
    plain_rate=0.2,
    x_rate=0.03,
    meha_x_rate=0.03,
    depths=(3, 3, 4),
    candidates=2,
    final={"epochs": 1, "channels": 4, "cells": 3, "batch": 16, "drop_path": 0.0, "cutout": False},
    final_rate=0.05,
)


@dataclass(frozen=True)
class SearchRow:
    """A row of the table.

    Attributes:
        method: the bilevel method, by the name of its contender; "RandomSearch" has none.
        course: "DARTS", "P-DARTS" or "PC-DARTS".
        activation: "relu" or "swish".
    """

    method: str
    course: str = "DARTS"
    activation: str = "relu"


ROWS: Mapping[str, SearchRow] = {
    "DARTS, order 1": SearchRow("DARTS, order 1"),
    "DARTS, order 2": SearchRow("DARTS, order 2"),
    "P-DARTS": SearchRow("DARTS, order 1", "P-DARTS"),
    "PC-DARTS": SearchRow("DARTS, order 1", "PC-DARTS"),
    "RHG": SearchRow("RHG"),
    "CG": SearchRow("CG"),
    "IAPTT": SearchRow("IAPTT"),
    "MEHA": SearchRow("MEHA"),
    "MEHA, Swish": SearchRow("MEHA", activation="swish"),
    "MEHA on P-DARTS": SearchRow("MEHA", "P-DARTS"),
    "MEHA on PC-DARTS": SearchRow("MEHA", "PC-DARTS"),
    "Random search": SearchRow("RandomSearch"),
}
"""The paper's rows (DARTS in both orders), and ours."""


def methods_of(row: SearchRow, protocol: Protocol) -> Callable[[int], Method]:
    """The method of a row, made from the number of its steps."""
    rate = protocol.meha_x_rate if row.method == "MEHA" else protocol.x_rate
    rate *= 1 if row.course == "DARTS" else 2
    adam = partial(torch.optim.Adam, lr=rate, betas=(0.5, 0.999), weight_decay=1e-3)
    _, weights = _batch_and_rate(row, protocol)

    def sgd(steps: int) -> Optimizer:
        schedule = partial(CosineAnnealingLR, T_max=steps, eta_min=LAST_RATE * weights)
        return Optimizer(torch.optim.SGD, lr=weights, scheduler=schedule, **SGD)

    def plain(steps: int) -> Cosine:
        return Cosine(protocol.plain_rate, steps, LAST_RATE * protocol.plain_rate)

    makers: dict[str, Callable[[int], Method]] = {
        "DARTS, order 1": lambda n: DARTS(order=1, x_optimizer=adam, y_optimizer=sgd(n)),
        "DARTS, order 2": lambda n: DARTS(order=2, x_optimizer=adam, y_optimizer=sgd(n)),
        "RHG": lambda n: RHG(inner_steps=1, beta=plain(n), x_optimizer=adam),
        "CG": lambda n: CG(inner_steps=1, cg_steps=1, damping=1.0, beta=plain(n), x_optimizer=adam),
        "IAPTT": lambda n: IAPTT(inner_steps=2, beta=plain(n), eta=plain(n), x_optimizer=adam),
        "MEHA": lambda n: MEHA(
            gamma=200.0, c=2.0, p=0.49, gradients=2, x_optimizer=adam, y_optimizer=sgd(n), theta_optimizer=sgd(n)
        ),
    }
    return makers[row.method]


def stages_of(row: SearchRow, protocol: Protocol, images: int) -> list[Stage]:
    """The stages of a row, with as many steps as the budget allows; a step of the warm-up is one pass.

    Args:
        images: number of images of a level.
    """
    stages = 3 if row.course == "P-DARTS" else 1
    share = WARM_UP.get(row.course, 0.0)
    if protocol.work is None:
        assert protocol.epochs is not None
        epochs = protocol.epochs / 2 if stages == 3 else protocol.epochs
        total = round(epochs * (images // _batch_and_rate(row, protocol)[0]))
    else:
        each = share + (1 - share) * WORK[row.method]
        total = int(protocol.work / stages / each)
    warm_up = math.ceil(round(share * total, DIGITS))
    steps = total - warm_up
    if stages == 1:
        return [Stage(steps, warm_up)]
    parts = zip(protocol.depths, KEPT, DROPOUT, strict=True)
    return [Stage(steps, warm_up, cells, operations, dropout) for cells, operations, dropout in parts]


def _batch_and_rate(row: SearchRow, protocol: Protocol) -> tuple[int, float]:
    """Images in a batch and the learning rate of the weights: in the full protocol those of each course's paper."""
    common = int(protocol.task["batch"]), protocol.rate
    return OWN.get(row.course, common) if protocol.work is None else common


def measure_architecture(cell: Cell) -> Record:
    """Search, train the network that was found, and test it; a cell with a genotype trains that."""
    protocol: Protocol = dict(cell.case.arguments)["protocol"]
    folder, on_gpu = cache_folder() / "searches" / cell.key, device().type == "cuda"
    row = ROWS.get(cell.setting.get("row", ""), SearchRow(""))
    options = {**protocol.task, "batch": _batch_and_rate(row, protocol)[0], "activation": row.activation}
    if row.course == "PC-DARTS":
        options |= {"partial": PARTIAL, "edge_normalisation": True}
    if row.course == "P-DARTS":
        options |= {"most_skips": MOST_SKIPS}
    task = architecture_search(**options, seed=cell.seed, device=device())
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    record: Record = {"outcome": "work", "search": None, "curve": None}
    if "genotype" in cell.setting:
        genotype = Genotype.from_dict(cell.setting["genotype"])
    elif row.method == "RandomSearch":
        genotype, record["search"] = _random_search(task, protocol, cell.seed, folder)
    else:
        found = _search(row, protocol, task, folder, on_gpu)
        genotype, record["outcome"] = found.genotype, found.outcome
        record["search"] = {
            **found.task.evaluate(found.x, found.y),
            "steps": sum(stage.steps for stage in stages_of(row, protocol, len(task.train.labels))),
            "work": found.counts.upper + found.counts.lower + found.counts.hvp,
            "seconds": found.seconds,
        }
        record["curve"] = {name: found.history[name] for name in ("step", "upper", "entropy")}
    if record["search"] is not None:
        record["search"]["memory"] = torch.cuda.max_memory_allocated() if on_gpu else None
    trained = train_final(task.final(genotype, **protocol.final), lr=protocol.final_rate, folder=folder, compile=on_gpu)
    final = {**trained.scores, "parameters": trained.parameters, "epochs": protocol.final["epochs"], "seconds": trained.seconds}
    shutil.rmtree(folder, ignore_errors=True)
    return {**record, "genotype": genotype.to_dict(), "final": final}


def _search(row: SearchRow, protocol: Protocol, task: ArchitectureSearch, folder: Path, on_gpu: bool) -> Found:
    momentum = Optimizer(torch.optim.SGD, lr=_batch_and_rate(row, protocol)[1], **SGD)
    stages = stages_of(row, protocol, len(task.train.labels))
    compile = on_gpu and row.method in RECORDED
    return search(task, methods_of(row, protocol), stages, warm_up=momentum, folder=folder, compile=compile)


def _random_search(task: ArchitectureSearch, protocol: Protocol, seed: int, folder: Path) -> tuple[Genotype, dict[str, Any]]:
    """The best of some random genotypes: small networks, trained on the images of the lower level with an equal share of the
    passes each, and judged on those of the upper level."""
    generator = torch.Generator().manual_seed(seed)
    batches = len(task.train.labels) // task.batch
    each = (protocol.work or protocol.epochs * batches * 2) // protocol.candidates  # type: ignore[operator]
    epochs = each / batches
    best, scores, seconds = None, dict[str, float](), 0.0
    for i in range(protocol.candidates):
        genotype = random_genotype(task.space, generator)
        sizes: dict[str, Any] = {"channels": task.channels, "cells": task.cells, "batch": task.batch}
        training = task.final(genotype, epochs=epochs, auxiliary=False, drop_path=0.0, cutout=False, **sizes)
        training = replace(training, train=task.train, test=task.validation)
        trained = train_final(training, lr=protocol.rate, folder=folder / f"candidate-{i}")
        seconds += trained.seconds
        if best is None or trained.scores["accuracy"] > scores["accuracy"]:
            best, scores = genotype, trained.scores
    assert best is not None
    return best, {
        **scores,
        "steps": each * protocol.candidates,
        "work": each * protocol.candidates,
        "seconds": seconds,
    }
