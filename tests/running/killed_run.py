"""A run in two processes of which one is killed: torchrun killed_run.py folder kills steps; see test_distributed.py.

Each attempt kills one of the processes at a random moment, until there were so many kills.
"""

import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from processes import PROBLEM, shard
from test_distributed import loader, noisy_network, result, weights
from torch.distributed.device_mesh import init_device_mesh

import meha

LATEST = 1.5
"""Seconds after the start of an attempt until which it is killed."""


def kill(folder, delay):
    time.sleep(delay)
    (folder / f"killed-{time.time_ns()}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    folder, kills, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))  # gloo may fail to connect after a restart; torchrun repeats
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    y = shard(noisy_network(), init_device_mesh("cpu", (2,)))
    torch.manual_seed(7 + rank)
    done = len(list(folder.glob("killed-*")))
    draw = random.Random(done)
    victim, delay = draw.randrange(2), draw.uniform(0, LATEST)
    dist.barrier()
    if done < kills and rank == victim:
        threading.Thread(target=kill, args=(folder, delay), daemon=True).start()
    checkpoint = meha.SharedCheckpoint(folder / "run", every=3)
    solution = meha.solve(PROBLEM, weights(), y, batches=loader(), max_steps=steps, tol=None, checkpoint=checkpoint)
    torch.save(result(solution), folder / f"end-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
