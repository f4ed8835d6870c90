"""Pre-trains a small GPT-2 from scratch with 0/1 Adam, 1-bit Adam and AdamW, and compares them.

    torchrun --standalone --nproc-per-node 4 recipes/pretrain_gpt.py --optimizer all

Each optimizer starts from the same weights and sees the same batches; the model is a plain module,
and the optimizer does all averaging. Rank 0 writes a table (results.md), a figure (demo.png) and
everything measured (results.json). Nothing is downloaded: see corpus.py.

Bytes are checked twice. What the library counts must equal the closed form of closed_form.py, and
on one host it is compared with what the kernel saw on the loopback device, where every message
between two ranks passes once, in TCP/IP packets.
"""

import argparse
import json
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import closed_form
import corpus
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import zeroone

OPTIMIZERS = {"adamw": "AdamW", "one-bit-adam": "1-bit Adam", "zero-one-adam": "0/1 Adam"}
TIMEOUT = timedelta(minutes=5)  # the longest that a rank waits for another
COUNTERS = (
    "steps",
    "skipped_steps",
    "rounds",
    "refreshes",
    "syncs",
    "bytes_sent",
    "bytes_received",
    "dense_bytes",
    "bits_per_parameter_step",
    "local_seconds",
    "encode_seconds",
    "exchange_seconds",
    "commit_seconds",
)
TABLE: dict[str, Callable[["Run", float | None], str]] = {  # column: cell, given AdamW's loss
    "optimizer": lambda run, _: OPTIMIZERS[run.optimizer],
    "validation loss": lambda run, _: f"{run.final_loss:.4f}",
    "to AdamW": lambda run, adamw: f"{run.final_loss / adamw - 1:+.2%}" if adamw else "-",
    "bits": lambda run, _: f"{run.stats['bits_per_parameter_step']:.3f}",
    "rounds": lambda run, _: f"{run.stats['rounds']}",
    "MB sent": lambda run, _: f"{run.stats['bytes_sent'] / 1e6:.1f}",
    "dense": lambda run, _: ratio(run.stats["dense_bytes"], run.stats["bytes_sent"], ".1f"),
    "s / step": lambda run, _: f"{run.median_step_seconds:.3f}",
    "closed form": lambda run, _: "yes" if run.as_closed_form else "**no**",
    "loopback": lambda run, _: ratio(run.loopback_bytes, run.loopback_expected, ".3f"),
}
LEGEND = """\
to AdamW: difference of the validation losses. bits: per parameter and step. MB sent: by each rank.
dense: times as much would averaging the gradients in fp32 send. s / step: median. closed form:
whether rounds and bytes are exactly those that the definition of the algorithm gives. loopback:
bytes that the kernel saw on the loopback device / bytes that the ranks counted.
"""


@dataclass
class Run:
    """What one optimizer did, as written to results.json. Lists have one entry per step."""

    optimizer: str
    train_loss: list[float] = field(default_factory=list)  # before the step; mean over the ranks
    bytes_sent: list[int] = field(default_factory=list)  # so far, by this rank
    step_seconds: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)  # step, loss, bytes_sent
    stats: dict[str, float] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)  # by closed_form.py
    loopback_bytes: int | None = None  # seen by the kernel while the optimizer trained
    loopback_expected: int = 0  # sent by all ranks, as the library counts

    @property
    def final_loss(self) -> float:
        return self.evaluations[-1]["loss"]

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds)

    @property
    def as_closed_form(self) -> bool:
        return all(self.stats[name] == value for name, value in self.expected.items())


def main() -> None:
    options = parse_options()
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of settings left alone
    start_process_group(options.backend)
    try:
        text = load_corpus(options)
        say(
            f"{text.train.size:,} tokens to train on, {text.validation.size:,} to validate; corpus "
            f"{text.digest}; {dist.get_world_size()} ranks of {options.batch_size} x "
            f"{options.context} tokens"
        )
        runs = [train(name, options, text) for name in options.optimizer]
        if dist.get_rank() == 0:
            report(runs, options, text)
    finally:
        dist.destroy_process_group()


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that there are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0], formatter_class=HelpFormatter
    )

    add = parser.add_argument_group("model").add_argument
    add("--layers", type=positive, default=4, help="transformer blocks")
    add("--width", type=positive, default=192, help="of the embedding")
    add("--heads", type=positive, default=6, help="of attention, in each block")
    add("--context", type=positive, default=128, help="tokens in a sequence")

    add = parser.add_argument_group("data").add_argument
    text = "of .txt, .md and .py files to train on (default: the documentation in Python itself)"
    add("--corpus", type=Path, metavar="FOLDER", help=text)
    add("--cache", type=Path, default=Path("results/corpus"), help="folder for the tokens")
    add("--batch-size", type=positive, default=4, help="sequences per rank and step")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, default=300, help="of the optimizer")
    add("--lr", type=float, default=1e-3, help="peak; a cosine takes it down to a tenth")
    text = "of the steps, in which the learning rate rises"
    add("--warmup-fraction", type=fraction, default=0.1, help=text)
    add("--weight-decay", type=float, default=0.01, help="decoupled, of all parameters")
    text = (
        "clip each rank's own gradient to this norm, before anything is averaged (default: don't)"
    )
    add("--clip", type=float, metavar="NORM", help=text)
    add("--seed", type=int, default=0, help="of the first weights and of the batches")

    add = parser.add_argument_group("optimizer").add_argument
    text = f"{', '.join(OPTIMIZERS)} or all; may be repeated (default: zero-one-adam)"
    add("--optimizer", action="append", metavar="NAME[,NAME...]", help=text)
    text = "of the steps: then 1-bit Adam ends its dense phase, 0/1 Adam its refreshes"
    add("--freeze-fraction", type=fraction, default=0.2, help=text)
    text = "0/1 Adam: the gap between refreshes doubles after so many of them"
    add("--kappa", type=positive, default=4, help=text)
    text = "0/1 Adam: most steps between syncs, which get rarer as the learning rate falls"
    add("--max-interval", type=positive, default=16, help=text)
    add("--scale", choices=("l1", "l2"), default="l1", help="norm that scales the one-bit codes")

    add = parser.add_argument_group("run").add_argument
    text = "steps between validations (default: a tenth of all)"
    add("--evaluate-every", type=positive, metavar="STEPS", help=text)
    add("--output", type=Path, metavar="FOLDER", default=Path("results/demo"), help="for results")
    add("--backend", default="gloo", help="of torch.distributed; it must carry CPU tensors")

    options = parser.parse_args()
    options.optimizer = chosen_optimizers(parser, options.optimizer or ["zero-one-adam"])
    options.evaluate_every = options.evaluate_every or math.ceil(options.steps / 10)
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    if options.context < 2:
        parser.error("--context must be at least 2: the first token is only read")
    if options.lr <= 0:
        parser.error("--lr must be positive")
    return options


def chosen_optimizers(parser: argparse.ArgumentParser, lists: list[str]) -> list[str]:
    names = {name.strip() for text in lists for name in text.split(",")}
    if "all" in names:
        return list(OPTIMIZERS)
    if unknown := names - set(OPTIMIZERS):
        parser.error(
            f"--optimizer: unknown {', '.join(sorted(unknown))}; "
            f"known are {', '.join(OPTIMIZERS)}, all"
        )
    return [name for name in OPTIMIZERS if name in names]


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def fraction(text: str) -> float:
    if not 0 < (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def start_process_group(backend: str) -> None:
    """Joins torchrun's ranks; started with plain `python`, a group of one."""
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def load_corpus(options: argparse.Namespace) -> corpus.Corpus:
    """One rank of each host builds the corpus, the others read it; a failure ends all of them."""
    mine: tuple[str | None, str | None] = (None, None)  # digest, error
    if local_rank() == 0:
        try:
            folder = options.corpus
            documents = corpus.read_folder(folder) if folder else corpus.read_python_docs()
            text = corpus.build(documents, options.cache)
            if (
                min(text.train.size, text.validation.size // dist.get_world_size())
                < options.context
            ):
                raise corpus.CorpusError(
                    f"corpus too small: {text.train.size} tokens to train on and "
                    f"{text.validation.size} to validate, for {dist.get_world_size()} ranks with "
                    f"--context {options.context}"
                )
            mine = (text.digest, None)
        except (corpus.CorpusError, OSError) as error:
            mine = (None, str(error))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    digests = sorted({digest for digest, _ in everyone if digest})
    errors = [error for _, error in everyone if error]
    if len(digests) > 1:
        errors.append(f"hosts differ in their corpus ({', '.join(digests)}); give all one --corpus")
    if errors:
        say(f"error: {errors[0]}")
        sys.exit(1)
    return corpus.load(options.cache, digests[0])


def train(name: str, options: argparse.Namespace, text: corpus.Corpus) -> Run:
    """Trains a fresh model with optimizer `name`, and validates it on the way.

    A validation before the last is the mean over the ranks' own replicas, each on its part of the
    split, without a sync: a sync would cost a round that training alone does not need. The last one
    is of the one model that `optimizer.sync()` leaves on all ranks.
    """
    model = make_model(options, text.vocabulary)
    optimizer = make_optimizer(name, model, options)
    factor = learning_rate_factor(options)
    scheduler = LambdaLR(optimizer, factor)
    batches = draw_batches(torch.from_numpy(text.train.astype("int64")), options)
    windows = validation_windows(text, options.context)
    run = Run(name)

    def validate(step: int) -> None:
        loss = validation_loss(model, windows)
        sent = optimizer.stats.bytes_sent
        run.evaluations.append({"step": step, "loss": loss, "bytes_sent": sent})

    validate(0)
    seen = 0
    with tqdm(total=options.steps, desc=OPTIMIZERS[name], disable=dist.get_rank() != 0) as bar:
        for first in range(1, options.steps + 1, options.evaluate_every):
            last = min(first + options.evaluate_every - 1, options.steps)
            before = loopback_bytes()
            for _ in range(first, last + 1):
                begin = time.perf_counter()
                loss = one_step(model, optimizer, scheduler, next(batches), options.clip)
                run.step_seconds.append(time.perf_counter() - begin)
                run.train_loss.append(loss)
                run.bytes_sent.append(optimizer.stats.bytes_sent)
                bits = optimizer.stats.bits_per_parameter_step
                bar.set_postfix_str(f"loss {loss:.3f}, {bits:.3f} bits", refresh=False)
                bar.update()
            if last == options.steps:
                optimizer.sync()
            seen += loopback_bytes() - before
            validate(last)

    losses = torch.tensor(run.train_loss, dtype=torch.float64)
    dist.all_reduce(losses)
    run.train_loss = (losses / dist.get_world_size()).tolist()
    run.stats = {counter: getattr(optimizer.stats, counter) for counter in COUNTERS}
    run.expected = expected_counts(name, model, options)
    if seen and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == dist.get_world_size():
        run.loopback_bytes = seen
        run.loopback_expected = dist.get_world_size() * optimizer.stats.bytes_sent
    return run


def make_model(options: argparse.Namespace, vocabulary: int) -> GPT2LMHeadModel:
    """Equal on all ranks and for all optimizers. No dropout: the text is seen about once."""
    torch.manual_seed(options.seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=options.context,
            n_embd=options.width,
            n_layer=options.layers,
            n_head=options.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def make_optimizer(
    name: str, model: torch.nn.Module, options: argparse.Namespace
) -> zeroone.AdamW | zeroone.OneBitAdam | zeroone.ZeroOneAdam:
    parameters = model.parameters()
    common = {"lr": options.lr, "weight_decay": options.weight_decay}
    if name == "adamw":
        return zeroone.AdamW(parameters, **common)
    if name == "one-bit-adam":
        return zeroone.OneBitAdam(
            parameters, **common, warmup_steps=freeze_step(options), scale=options.scale
        )
    return zeroone.ZeroOneAdam(
        parameters,
        **common,
        variance_schedule=zeroone.schedules.Doubling(options.kappa, until=freeze_step(options)),
        sync_schedule=zeroone.schedules.LearningRateTied(options.max_interval),
        scale=options.scale,
    )


def freeze_step(options: argparse.Namespace) -> int:
    step: int = round(options.freeze_fraction * options.steps)
    return max(1, step)


def learning_rate_factor(options: argparse.Namespace) -> Callable[[int], float]:
    """Linear warm-up, then a cosine down to a tenth. A function of the steps already taken."""
    warmup: int = max(1, round(options.warmup_fraction * options.steps))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, options.steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


def draw_batches(tokens: torch.Tensor, options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Random windows of the training split: each rank its own, the same for every optimizer."""
    generator = torch.Generator().manual_seed(
        options.seed * dist.get_world_size() + dist.get_rank()
    )
    windows = tokens.unfold(0, options.context, 1)
    while True:
        yield windows[torch.randint(len(windows), (options.batch_size,), generator=generator)]


def validation_windows(text: corpus.Corpus, context: int) -> torch.Tensor:
    """This rank's share of the validation split, cut into windows that do not overlap."""
    tokens = torch.from_numpy(text.validation.astype("int64"))
    windows = tokens[: tokens.numel() // context * context].view(-1, context)
    return windows[dist.get_rank() :: dist.get_world_size()]


def one_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    batch: torch.Tensor,
    clip: float | None,
) -> float:
    """One optimizer step; returns this rank's loss before it."""
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    value: float = loss.item()
    return value


@torch.no_grad()
def validation_loss(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """Mean over the whole split, of which each rank computes its part."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, windows
    for batch in torch.split(windows, 16):
        loss = model(input_ids=batch, labels=batch).loss
        total += torch.tensor([loss.item() * len(batch), len(batch)], dtype=torch.float64)
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def loopback_bytes() -> int:
    """What the kernel has counted on the loopback device, by any process; 0 where it can't be read.

    Waits for all ranks first, so that nobody is still sending what was sent before.
    """
    dist.barrier()
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    received = [line.split(":")[1].split()[0] for line in lines if line.strip().startswith("lo:")]
    return int(received[0]) if received else 0


def expected_counts(
    name: str, model: torch.nn.Module, options: argparse.Namespace
) -> dict[str, int]:
    """The statistics that follow from the definition of the algorithm, without the library."""
    if name == "adamw":
        rounds = closed_form.adamw(options.steps)
    elif name == "one-bit-adam":
        rounds = closed_form.one_bit_adam(options.steps, freeze_step(options))
    else:
        factor = learning_rate_factor(options)
        rounds = closed_form.zero_one_adam(
            [options.lr * factor(step) for step in range(options.steps)],
            options.kappa,
            freeze_step(options),
            options.max_interval,
        )
    numels = [parameter.numel() for parameter in model.parameters()]
    sent = closed_form.bytes_sent(rounds, numels, dist.get_world_size())
    return {
        "refreshes": len(rounds.refreshes),
        "syncs": len(rounds.syncs),
        "rounds": len(rounds.refreshes) + len(rounds.syncs),
        "bytes_sent": sent,
        "bytes_received": sent,
    }


def report(runs: list[Run], options: argparse.Namespace, text: corpus.Corpus) -> None:
    """Prints the table, and writes it with the figure and all numbers to the output folder."""
    adamw = next((run.final_loss for run in runs if run.optimizer == "adamw"), None)
    rows = [[cell(run, adamw) for cell in TABLE.values()] for run in runs]
    table = markdown([list(TABLE), *rows])
    print(f"\n{table}\n\n{LEGEND}")

    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.md").write_text(f"{table}\n\n{LEGEND}")
    results = {
        "options": vars(options),
        "world_size": dist.get_world_size(),
        "corpus": text.digest,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "runs": [
            asdict(run) | {"final_loss": run.final_loss, "as_closed_form": run.as_closed_form}
            for run in runs
        ],
    }
    (output / "results.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
    draw(runs, output / "demo.png")
    print(f"results.json, results.md and demo.png are in {output}")


def ratio(value: float | None, unit: float, precision: str) -> str:
    return f"{value / unit:{precision}} x" if value and unit else "-"


def markdown(rows: list[list[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    lines = (
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(f"| {line} |" for line in lines)


def draw(runs: list[Run], path: Path) -> None:
    """Loss against steps, and against what a rank has sent."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_bytes) = pyplot.subplots(
        1, 2, figsize=(10, 4), sharey=True, layout="constrained"
    )
    for index, run in enumerate(runs):
        color, label = f"C{index}", OPTIMIZERS[run.optimizer]
        smooth = smoothed(run.train_loss)
        steps, losses, sent = zip(*(point.values() for point in run.evaluations), strict=True)
        by_step.plot(range(1, len(smooth) + 1), smooth, color=color, alpha=0.35)
        by_step.plot(steps, losses, "o-", color=color, markersize=4, label=label)
        if run.stats["bytes_sent"]:
            by_bytes.plot([b / 1e6 for b in run.bytes_sent], smooth, color=color, alpha=0.35)
            by_bytes.plot([b / 1e6 for b in sent[1:]], losses[1:], "o-", color=color, markersize=4)
            by_bytes.set_xscale("log")
    by_step.set(xlabel="step", ylabel="loss (points: validation, pale: training)")
    by_bytes.set(xlabel="MB sent per rank")
    by_step.legend()
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def smoothed(values: list[float]) -> list[float]:
    """Running mean over the last twentieth."""
    width = max(1, len(values) // 20)
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    main()
