"""0/1 Adam under the Hugging Face Trainer: a small GPT-2 that learns to count.

    torchrun --standalone --nproc-per-node 2 recipes/with_trainer.py

It saves after the first epoch; with `--resume` it goes on from there, to the same bytes.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import zeroone

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default=Path("results/trainer"))
parser.add_argument("--resume", action="store_true", help="go on from what is in the output")
options = parser.parse_args()


class ZeroOneTrainer(Trainer):
    """Saves and loads the optimizer's state on every rank. Trainer would save rank 0's only."""

    def _own_state(self, folder: str) -> Path:
        return Path(folder, f"optimizer.rank{self.args.process_index}.pt")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own_state = self._own_state(output_dir)
        own_state.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.optimizer.state_dict(), own_state)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.optimizer.load_state_dict(torch.load(self._own_state(checkpoint)))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt")))


class LocalGradients(TrainerCallback):
    """Trainer wraps the model in DistributedDataParallel; the gradients are to stay local."""

    def on_train_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if args.world_size > 1:
            zeroone.local_gradients(trainer.model_wrapped)


arguments = TrainingArguments(  # makes the process group
    output_dir=str(options.output),
    use_cpu=True,
    num_train_epochs=2,
    per_device_train_batch_size=4,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    max_grad_norm=0,  # clipping before the step would be by the norm of this rank's gradient
    average_tokens_across_devices=False,  # it would send a number in every step
    save_strategy="epoch",
    ddp_find_unused_parameters=False,
    report_to="none",
    disable_tqdm=True,
)
torch.manual_seed(0)
starts = torch.randint(64, (128, 1))
data = [{"input_ids": row, "labels": row} for row in (starts + torch.arange(16)) % 64]
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
trainer = ZeroOneTrainer(
    model=model,
    args=arguments,
    train_dataset=data,
    callbacks=[LocalGradients()],
    optimizer_cls_and_kwargs=(
        zeroone.ZeroOneAdam,
        {
            "lr": arguments.learning_rate,
            "variance_schedule": zeroone.schedules.Doubling(kappa=4),
            "sync_schedule": zeroone.schedules.Interval(4),
        },
    ),
)
trainer.train(str(options.output / "checkpoint-16") if options.resume else None)

optimizer = trainer.optimizer.optimizer  # within Accelerate's
optimizer.sync()  # all replicas equal
stats = optimizer.stats
parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(
    f"rank {arguments.process_index}: {stats.steps} steps, {stats.refreshes} refreshes, "
    f"{stats.syncs} syncs, {stats.bits_per_parameter_step:.2f} bits per parameter and step, "
    f"parameters {hashlib.sha256(parameters).hexdigest()[:16]}",
    flush=True,
)
torch.distributed.destroy_process_group()
