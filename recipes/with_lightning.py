"""0/1 Adam under Lightning: a regression.

    torchrun --standalone --nproc-per-node 2 recipes/with_lightning.py

It saves after the first epoch; with `--resume` it goes on from there, to the same bytes.
"""

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import zeroone


class ZeroOneStrategy(DDPStrategy):
    """Gradients stay local, and every rank saves and loads the state of its own optimizer.

    DDPStrategy would average the gradients, and save the state of rank 0 only.
    """

    def configure_ddp(self) -> None:
        super().configure_ddp()
        zeroone.local_gradients(self.model)

    def _own_state(self, path: Any) -> Path:
        return Path(f"{path}.rank{self.global_rank}")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        self._own_state(filepath).parent.mkdir(parents=True, exist_ok=True)
        torch.save(states, self._own_state(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        self._own_state(filepath).unlink(missing_ok=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        self._loaded = self._own_state(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        for optimizer, state in zip(self.optimizers, torch.load(self._loaded), strict=True):
            optimizer.load_state_dict(state)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = zeroone.ZeroOneAdam(
            self.parameters(),
            lr=1e-2,
            variance_schedule=zeroone.schedules.Doubling(kappa=4),
            sync_schedule=zeroone.schedules.Interval(4),
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=32)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_end(self) -> None:
        self.optimizers(use_pl_optimizer=False).sync()  # all replicas equal


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("results/lightning"))
    parser.add_argument("--resume", action="store_true", help="go on from what is in the output")
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(512, 8)
    data = DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=16)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=ZeroOneStrategy(process_group_backend="gloo"),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(options.output, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        ],
    )
    trainer.fit(model, data, ckpt_path=options.output / "epoch=0.ckpt" if options.resume else None)

    stats = trainer.optimizers[0].stats
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(
        f"rank {trainer.global_rank}: {stats.steps} steps, {stats.refreshes} refreshes, "
        f"{stats.syncs} syncs, {stats.bits_per_parameter_step:.2f} bits per parameter and step, "
        f"parameters {hashlib.sha256(parameters).hexdigest()[:16]}",
        flush=True,
    )
    # Else Gloo's threads may outlive the interpreter: "terminate called", now and then.
    torch.distributed.destroy_process_group()
