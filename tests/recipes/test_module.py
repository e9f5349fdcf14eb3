"""The recipe for Lightning: weights that are known, options of the Trainer, and resuming."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning", reason="the recipes need the extra recipes")

from bilevel_module import BilevelModule
from lightning.pytorch.callbacks import ModelCheckpoint

import meha

pytestmark = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning",  # Lightning with torch 2.13
    "ignore:Using ModelCheckpoint with manual optimization and every_n_train_steps, but",  # it is that after the step
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:The '.*_dataloader' does not have many workers",
)


def points(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, generator=generator)
    return inputs, (inputs.prod(dim=1) > 0).long(), torch.rand(count, generator=generator) < 0.3


TRAIN, LABELS, WRONG = points(256, seed=0)
VALID, RIGHT, _ = points(128, seed=1)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))


def loaders():
    labels = torch.where(WRONG, 1 - LABELS, LABELS)
    train = TensorDataset(TRAIN, labels, torch.arange(256))
    return dict(train=DataLoader(train, 32, shuffle=True), valid=DataLoader(TensorDataset(VALID, RIGHT), 50, shuffle=True))


def fit(folder, model=None, batches=None, ckpt_path=None, lr=0.02, **options):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu")
    trainer = lightning.Trainer(
        default_root_dir=folder, **{"max_epochs": 30, "enable_checkpointing": False, **quiet, **options}
    )
    module = BilevelModule(net() if model is None else model, torch.zeros(256), lr=lr)
    batches = meha.loaders.Together(**loaders()) if batches is None else batches
    trainer.fit(module, batches, DataLoader(TensorDataset(VALID, RIGHT), 64), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.parametrize("together", [True, False])
def test_wrong_labels_get_smaller_weights(together, tmp_path):
    module, trainer = fit(tmp_path, batches=None if together else loaders())
    weights = module.weights()
    assert weights[WRONG].mean() < weights[~WRONG].mean() - 0.3
    assert trainer.global_step == module.run.k == 240
    assert trainer.callback_metrics["accuracy"] > 0.9
    assert trainer.callback_metrics["lower"] > 0


def test_the_steps_are_those_of_a_loop_by_hand(tmp_path):
    """The same batches in a loop of meha.start, with the optimizer, the schedule and the clipping of the module."""
    batches = [batch._asdict() for batch in meha.loaders.Together(**loaders())]
    model, other = (net().requires_grad_(True) for _ in range(2))
    model[2].p = other[2].p = 0.0  # draws no random numbers
    module, _ = fit(tmp_path, model, batches=DataLoader(batches, batch_size=None), max_epochs=2)
    model.train()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    y_optimizer = meha.Optimizer(optimizer, scheduler=schedule, clip=1.0)
    run = meha.start(module.problem, torch.zeros(256), other, y_optimizer=y_optimizer, max_steps=16)
    for batch in 2 * batches:
        run.step(batch)
    assert module.run.x.abs().max() > 0.01
    torch.testing.assert_close(module.run.x, run.x)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    ("after", "when"), [(10, {"every_n_train_steps": 10}), (16, {"every_n_train_steps": 16}), (16, {"every_n_epochs": 1})]
)
def test_a_run_that_goes_on_ends_bit_for_bit_as_one_that_never_stopped(after, when, tmp_path):
    """In the middle of an epoch of 8 steps, and at the end of one, with dropout and loaders that shuffle."""
    keep = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **when)
    options = dict(max_epochs=4, enable_checkpointing=True, callbacks=[keep])
    torch.manual_seed(0)
    whole, _ = fit(tmp_path, **options)
    rest, trainer = fit(tmp_path, net(seed=5), ckpt_path=tmp_path / f"step={after}.ckpt", **options)
    assert trainer.global_step == rest.run.k == 32
    assert torch.equal(whole.run.x, rest.run.x)
    assert all(map(torch.equal, whole.net.parameters(), rest.net.parameters()))


def test_numbers_that_are_not_finite_end_the_training(tmp_path):
    with pytest.raises(RuntimeError, match=r"non-finite: Step . gave NaN or infinity"):
        fit(tmp_path, lr=1e30)


def compiled():
    return dict(model=torch.compile(net(), backend="eager"))


def mixed():
    return dict(model=net(), precision="bf16-mixed")


@pytest.mark.parametrize(("options", "near"), [(compiled, 1e-4), (mixed, 0.05)])
def test_options(options, near, tmp_path):
    found = []
    for make in (lambda: dict(model=net()), options):
        given = make()
        torch.manual_seed(0)
        found.append(fit(tmp_path, max_epochs=5, **given)[0].weights())
    assert found[1] == pytest.approx(found[0], abs=near)
    assert (found[0] - 0.5).abs().max() > 0.1
