"""The recipe for the Trainer of transformers: weights that are known, options of the Trainer, resuming, LoRA, and TRL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # is read when the packages are imported
transformers = pytest.importorskip("transformers", reason="the recipes need the extra recipes")
datasets = pytest.importorskip("datasets", reason="the recipes need the extra recipes")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from accelerate.state import AcceleratorState
from bilevel_trainer import Bilevel, BilevelTrainer, losses
from texts import gpt2, llama, texts

import meha

pytestmark = pytest.mark.filterwarnings(
    "ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning",  # names that the packages use among themselves
    "ignore:`torch.jit:DeprecationWarning",
)


@pytest.fixture(autouse=True)
def separate():
    """What a Trainer leaves in the environment and in accelerate is not seen by the next."""
    before = dict(os.environ)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


def without(rows, *columns):
    return [{name: value for name, value in row.items() if name not in columns} for row in rows]


SOURCES = without(texts(480, seed=0), "example")
TARGET = without(texts(120, seed=1, domains=(0, 1)), "example")


def arguments(folder, kind=None, **options):
    options = {"max_steps": 40, "save_strategy": "no", "logging_steps": 20} | options
    options = dict(per_device_train_batch_size=16, per_device_eval_batch_size=64, learning_rate=3e-3) | options
    kind = kind or transformers.TrainingArguments
    return kind(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **options)


def trainer(folder, model=None, kind=BilevelTrainer, sources=SOURCES, **options):
    own = {name: options.pop(name) for name in ("x", "column") if name in options}
    data = dict(train_dataset=datasets.Dataset.from_list(sources), eval_dataset=datasets.Dataset.from_list(TARGET))
    return kind(gpt2() if model is None else model, arguments(folder, **options), **data, **({"x": torch.zeros(3)} | own))


@pytest.mark.parametrize(("model", "attention"), [(gpt2, "sdpa"), (llama, "eager")])
def test_a_domain_of_noise_gets_the_least_weight(model, attention, tmp_path):
    run = trainer(tmp_path, model(attention))
    before = run.evaluate()["eval_loss"]
    run.train()
    first, second, noise = run.weights().tolist()
    assert noise < 0.7 * min(first, second)
    assert run.evaluate()["eval_loss"] < 0.7 * before
    logged = [entry for entry in run.state.log_history if "grad_norm" in entry]
    assert len(logged) == 2
    assert all(entry["grad_norm"] > 0 and entry["upper"] > 0 for entry in logged)
    assert logged[0]["learning_rate"] == pytest.approx(3e-3 * 21 / 40)  # the schedule of the Trainer
    assert [logged[1][f"weight_{i}"] for i in range(3)] == pytest.approx(run.weights().tolist())


def test_examples_of_noise_get_smaller_weights(tmp_path):
    wrong = set(range(0, 32, 4))
    rows = without(texts(32, seed=2, domains=(0, 1), wrong=wrong), "domain")
    run = trainer(tmp_path, gpt2(dropout=0.0), sources=rows, x=torch.zeros(32), column="example", max_steps=100)
    run.train()
    noise = torch.tensor([i in wrong for i in range(32)])
    weights = run.weights()
    assert weights[noise].mean() < 0.5 * weights[~noise].mean()
    assert (weights[noise, None] < weights[None, ~noise]).float().mean() > 0.85
    assert not any("weight_0" in entry for entry in run.state.log_history)  # so many weights are not logged


class Recording(BilevelTrainer):
    """Keeps the batches of each step."""

    def training_step(self, *given, **named):
        self.seen = [*getattr(self, "seen", []), self.parts]
        return super().training_step(*given, **named)


def test_the_steps_are_those_of_a_loop_by_hand(tmp_path):
    """The same batches in a loop of meha.start, with the optimizer, the schedule and the clipping of the Trainer."""
    run = trainer(tmp_path, gpt2(dropout=0.0), Recording, gradient_accumulation_steps=2, max_steps=10, max_grad_norm=0.5)
    run.train()
    steps = {id(parts): parts for parts in run.seen}  # a list grows until its step is taken
    model = gpt2(dropout=0.0)
    other = trainer(tmp_path, model, max_steps=10)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer := other.create_optimizer(), 0, 10)
    y_optimizer = meha.Optimizer(optimizer, scheduler=schedule, clip=0.5)
    hand = meha.start(other.problem, torch.zeros(3), model.train(), y_optimizer=y_optimizer, max_steps=10)
    for parts in steps.values():
        info = hand.step(meha.MicroBatches(parts))
    assert hand.k == len(steps) == 10
    torch.testing.assert_close(hand.x, run.run.x)
    torch.testing.assert_close(model.state_dict(), run.model.state_dict())
    assert info["upper"] == pytest.approx(run.info["upper"])


def test_a_run_that_goes_on_ends_bit_for_bit_as_one_that_never_stopped(tmp_path):
    """In the middle of an epoch, with dropout, parts of a step and evaluations."""
    options = dict(max_steps=10, gradient_accumulation_steps=2, save_strategy="steps", save_steps=7)
    options |= dict(eval_strategy="steps", eval_steps=5)
    whole = trainer(tmp_path, **options)
    whole.train()
    rest = trainer(tmp_path, gpt2(seed=5), **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert torch.equal(whole.run.x, rest.run.x)
    assert all(map(torch.equal, whole.model.parameters(), rest.model.parameters()))
    rest.args.max_steps = 2
    rest.train()  # once more from the start
    assert rest.run.k == 2


def compiled(folder):
    return trainer(folder, max_steps=16, torch_compile=True, torch_compile_backend="eager")


def placed(folder):
    from accelerate import dispatch_model

    return trainer(folder, dispatch_model(gpt2(), device_map={"": "cpu"}, force_hooks=True), max_steps=16)


def checkpointed(folder):
    return trainer(folder, max_steps=16, activation_checkpointing=True)


def mixed(folder):
    return trainer(folder, max_steps=16, bf16=True)


@pytest.mark.parametrize(("make", "near"), [(compiled, 1e-3), (placed, 1e-6), (checkpointed, 1e-6), (mixed, 0.02)])
def test_options_of_the_trainer(make, near, tmp_path, plain):
    run = make(tmp_path)
    run.train()
    assert run.weights() == pytest.approx(plain, abs=near)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    run = trainer(tmp_path_factory.mktemp("plain"), max_steps=16)
    run.train()
    return run.weights()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(fp16=True), "fp16: its scaling of the loss would be undone twice; use bf16=True"),
        (dict(column="source"), "train_dataset: has no column 'source', or loses it, as by packing=True"),
        (
            dict(activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True}),
            "you can either set use_reentrant=False",  # torch says so
        ),
    ],
)
def test_mistakes(change, message, tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=message):
        trainer(tmp_path, **change).train()


def test_numbers_that_are_not_finite_end_the_training(tmp_path):
    run = trainer(tmp_path, learning_rate=1e38, max_grad_norm=0.0, max_steps=10)
    with pytest.raises(RuntimeError, match=r"non-finite: Step . gave NaN or infinity"):
        run.train()


def with_lora(model, targets):
    peft = pytest.importorskip("peft", reason="the recipes need the extra recipes")
    transposed = model.config.model_type == "gpt2"  # the layers of GPT-2 are
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=transposed)
    return peft.get_peft_model(model, config)


ADAPTED = pytest.mark.parametrize(("model", "targets"), [(gpt2, ["c_attn"]), (llama, ["q_proj", "v_proj"])])


@ADAPTED
def test_all_copies_share_the_frozen_base(model, targets, tmp_path):
    run = trainer(tmp_path, with_lora(model(), targets), max_steps=30)
    frozen = {name: p for name, p in run.model.named_parameters() if not p.requires_grad}
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    base = {name: p.clone() for name, p in frozen.items()}
    run.train()
    probe = run.run.state.probe.value
    assert all(p is frozen[name] for name, p in probe.named_parameters() if not p.requires_grad)
    assert all(torch.equal(p, base[name]) for name, p in frozen.items())
    own = {p.data_ptr() for p in trained.values()}
    assert not any(p.data_ptr() in own for p in probe.parameters())
    tensors = {p.untyped_storage().data_ptr(): p.nbytes for module in (run.model, probe) for p in module.parameters()}
    assert sum(tensors.values()) == sum(p.nbytes for p in frozen.values()) + 2 * sum(p.nbytes for p in trained.values())
    tied = model is gpt2
    for one in (run.model, probe):
        assert (one.get_output_embeddings().weight is one.get_input_embeddings().weight) == tied
    first, second, noise = run.weights().tolist()
    assert noise < 0.7 * min(first, second)

    state = run.run.state_dict()["state"]  # has the base once, and does not copy it
    assert all(state["y"][name].data_ptr() == p.data_ptr() for name, p in frozen.items())
    assert set(state["probe"]) & set(state["y"]) == set(trained) | {name for name, _ in run.model.named_buffers()}

    batch = {name: torch.tensor([row[name] for row in TARGET]) for name in TARGET[0]}
    before = losses(run.model.eval(), batch)
    merged = run.model.merge_and_unload()
    torch.testing.assert_close(losses(merged, batch), before)
    assert not torch.allclose(losses(model().eval(), batch), before, atol=0.01)


def test_a_run_with_lora_goes_on_bit_for_bit_and_its_checkpoint_has_no_base(tmp_path):
    options = dict(max_steps=6, save_strategy="steps", save_steps=5, activation_checkpointing=True)
    whole = trainer(tmp_path, with_lora(llama(), ["q_proj"]), **options)
    whole.train()
    rest = trainer(tmp_path, with_lora(llama(), ["q_proj"]), **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert torch.equal(whole.run.x, rest.run.x)
    assert all(map(torch.equal, whole.model.parameters(), rest.model.parameters()))
    saved = torch.load(tmp_path / "checkpoint-5" / "bilevel.pt", weights_only=True)["state"]
    kept = [tensor for part in ("response", "probe", "square") for tensor in saved[part].values()]
    assert "y" not in saved
    assert sum(tensor.numel() for tensor in kept) < 4 * sum(p.numel() for p in rest.model.parameters() if p.requires_grad)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(10)} | {"<eos>": 10, "<pad>": 11}
    made = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def sft(folder, model, **options):
    trl = pytest.importorskip("trl", reason="the recipes need the extra recipes")

    class BilevelSFTTrainer(Bilevel, trl.SFTTrainer):
        pass

    def words(rows, *columns):
        return datasets.Dataset.from_list(
            [{"text": " ".join(f"w{i % 10}" for i in row["input_ids"])} | {c: row[c] for c in columns} for row in rows]
        )

    args = arguments(folder, trl.SFTConfig, bf16=False, max_steps=30, **options)
    data = dict(train_dataset=words(SOURCES, "domain"), eval_dataset=words(TARGET))
    return BilevelSFTTrainer(model, args, processing_class=tokenizer(), **data, x=torch.zeros(3))


@pytest.mark.parametrize("adapted", [False, True])
def test_trl(adapted, tmp_path):
    run = sft(tmp_path, with_lora(llama(), ["q_proj", "v_proj", "o_proj"]) if adapted else llama())
    before = run.evaluate()
    run.train()
    first, second, noise = run.weights().tolist()
    assert noise < 0.75 * min(first, second)
    after = run.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_mean_token_accuracy"] > before["eval_mean_token_accuracy"]


def test_packed_texts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="train_dataset: has no column 'domain', or loses it, as by packing=True"):
        sft(tmp_path, llama("eager"), packing=True, max_length=32).train()


@pytest.mark.slow
def test_two_processes(tmp_path):
    script = Path(__file__).with_name("in_processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]  # both processes have the same weights and the same model
    first, second, noise = found[0]["weights"]
    assert noise < 0.7 * min(first, second)
    assert found[0]["same"]  # the run that went on ends as the other
