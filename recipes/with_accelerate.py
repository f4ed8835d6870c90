"""0/1 Adam under Hugging Face Accelerate: a classifier of points in a plane.

    torchrun --standalone --nproc-per-node 2 recipes/with_accelerate.py

It saves after the first epoch; with `--resume` it goes on from there, to the same bytes.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import zeroone

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default=Path("results/accelerate"))
parser.add_argument("--resume", action="store_true", help="go on from what is in the output")
options = parser.parse_args()

accelerator = Accelerator(cpu=True)  # makes the process group, so it comes first
torch.manual_seed(0)
points = torch.randn(512, 2)
data = DataLoader(TensorDataset(points, (points.norm(dim=1) > 1.2).long()), batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))

optimizer = zeroone.ZeroOneAdam(
    model.parameters(),
    lr=1e-2,
    variance_schedule=zeroone.schedules.Doubling(kappa=4),
    sync_schedule=zeroone.schedules.Interval(4),
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)

# Accelerate wraps the model in DistributedDataParallel; the gradients are to stay local. Optimizer
# and scheduler are used as they are: Accelerate would save the optimizer of rank 0 only.
model, data = accelerator.prepare(model, data)
if accelerator.num_processes > 1:
    zeroone.local_gradients(model)
accelerator.register_for_checkpointing(scheduler)
own_state = options.output / f"optimizer.rank{accelerator.process_index}.pt"

first = 0
if options.resume:
    accelerator.load_state(str(options.output))
    optimizer.load_state_dict(torch.load(own_state))  # after the model, which is rank 0's
    first = 1

for epoch in range(first, 2):
    for x, y in data:
        with accelerator.accumulate(model), accelerator.autocast():
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:  # not between the batches of one step
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if epoch == 0:
        accelerator.save_state(str(options.output))
        torch.save(optimizer.state_dict(), own_state)

optimizer.sync()  # all replicas equal
stats = optimizer.stats
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(
    f"rank {accelerator.process_index}: loss {loss:.3f}, {stats.steps} steps, {stats.refreshes} "
    f"refreshes, {stats.syncs} syncs, {stats.bits_per_parameter_step:.2f} bits per parameter and "
    f"step, parameters {hashlib.sha256(parameters).hexdigest()[:16]}",
    flush=True,
)
accelerator.end_training()
