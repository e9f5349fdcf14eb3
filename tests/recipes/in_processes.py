"""Train with the recipe in the processes that torchrun starts, and again from a checkpoint; write what each process gets."""

import json
import sys
from pathlib import Path

import torch


def train(folder, seed, resume=None):
    from bilevel_trainer import BilevelTrainer
    from texts import gpt2, texts
    from transformers import TrainingArguments

    sizes = dict(max_steps=40, per_device_train_batch_size=8, learning_rate=3e-3, save_strategy="steps", save_steps=15)
    args = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, **sizes)
    sources, target = texts(480, seed=0), texts(120, seed=1, domains=(0, 1))
    run = BilevelTrainer(gpt2(seed=seed), args, train_dataset=sources, eval_dataset=target, x=torch.zeros(3))
    run.train(resume_from_checkpoint=resume)
    return run


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples/recipes"))
    folder = sys.argv[1]
    first = train(folder, seed=0)
    second = train(folder, seed=5, resume=f"{folder}/checkpoint-15")
    same = all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    total = sum(p.detach().double().sum() for p in first.model.parameters()).item()
    found = {"weights": first.weights().tolist(), "total": total, "same": same}
    (Path(folder) / f"found{first.args.process_index}.json").write_text(json.dumps(found))
