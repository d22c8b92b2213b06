"""The parts of isthmus in a plain PyTorch loop: data, model, replicas and checkpoints.

    torchrun --nproc-per-node 2 recipes/plain_loop.py [DIRECTORY [STEPS]]

Run it again and it goes on from its checkpoint, or says that it has finished. Expected: the loss
falls from 5.3 nats to below 3.5 within 30 steps, and all ranks print the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import isthmus
from isthmus.spec.data import StdlibData


def main(directory: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = isthmus.open_data(StdlibData(), cache_dir=directory / "cache", seed=0)
    model = isthmus.Transformer(isthmus.ModelSpec.preset("gpt-1m"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = isthmus.replicate(model, optimizer, "allreduce")
    checkpoints = isthmus.Checkpointer(directory / "checkpoint", keep_last=1)
    items = {"model": isthmus.Item(model), "optimizer": isthmus.Item(optimizer)}
    loaded = checkpoints.load(items)
    for step in range(loaded.step if loaded else 0, steps):
        tokens, targets = data.batch(step, global_batch_size=8, rank=rank, world_size=world_size)
        loss = isthmus.token_loss(model(tokens), targets) / targets.numel()
        loss.backward()  # gradients are averaged over the ranks when this returns
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % 10 == 0:
            dist.all_reduce(mean := loss.detach().clone(), dist.ReduceOp.AVG)
            print(f"rank {rank}: step {step + 1}: loss {mean:.4f} nats")
            checkpoints.save(step + 1, items)
    print(f"rank {rank}: finished {steps} steps, sent {replica.metrics().sent_nbytes:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    directory, steps, *_ = [*sys.argv[1:], *("runs/plain-loop", "30")[len(sys.argv) - 1 :]]
    main(Path(directory), int(steps))
