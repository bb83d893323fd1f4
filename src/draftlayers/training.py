"""Training of a draft head, from start to end, and when a trained one is used again.

Used in chapter 06, by the heads' own jobs, and by benchmarks. ``train_head`` trains a head or takes
the one that lies there, if everything that determines it is the same. It goes through a plan of
updates, keeps the weights that do best on validation, and resumes after it was killed. Which heads
a run trains is left to ``contenders``; what a head learns from belongs to ``examples``, one
update's loss to ``ttt``, what a head is to ``head``.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from draftlayers.current import changed, code_digest, digest, libraries, read_record, write_record
from draftlayers.device import dtype_name, join_processes
from draftlayers.examples import Examples, TrainingData
from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.optimizers import make_optimizers, updated
from draftlayers.project import Say, UserError, quiet, write_atomically
from draftlayers.spec import RunSpec
from draftlayers.start import fit_start, start_at_random, start_from_target
from draftlayers.targets import Target
from draftlayers.ttt import STEP_WEIGHT, autocast, precision, ttt_loss, validate

CHECKPOINT_SECONDS = 60.0
FIT_ROWS = 50_000  # positions that the linear start is fitted on, at most
REMEDY = "lower learning_rate, or check the collected states for values that are not finite"
RECORD, CHECKPOINT = "training.json", "checkpoint.safetensors"


@dataclass(frozen=True)
class TrainingSettings:
    """How a head is trained; the same for every layer set of a comparison.

    Attributes
    ----------
    epochs
        Passes over the training conversations; fractions are allowed.
    batch_tokens
        Answer tokens of an update, about.
    learning_rate
        Peak of the learning rate, after a linear warm-up and before a cosine to zero.
    ttt_steps
        Steps of the training-time test.
    start
        ``"target"`` (the target's last layer, then a linear fit to its final states, which the
        store must hold) or ``"random"``.
    train_lm_head
        Whether the output matrix learns, as in EAGLE-3's code, or stays the target's own.
    fc_norm, norm_output, head_layers
        The head's shape, as ``HeadConfig`` has it.
    optimizer
        ``"adamw"``, or ``"muon"`` for the matrices inside the head.
    sharpen
        The target's distributions are raised to this power, so that more counts on its first
        choice, which is what greedy decoding accepts; 1 leaves them as they are.
    noise
        Deviation of the noise added to the target's states, as a share of each state's own size.
    depth
        Depth of the chain that validation judges, as in decoding.
    warmup
        Share of all updates spent warming up.
    clip
        Largest norm of the gradient.
    betas
        AdamW's.
    weight_decay
        Share of every weight that an update at the peak learning rate would take away, for each
        unit of that rate.
    """

    epochs: float
    batch_tokens: int
    learning_rate: float
    ttt_steps: int
    start: str = "target"
    train_lm_head: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    head_layers: int = 1
    optimizer: str = "adamw"
    sharpen: float = 1.0
    noise: float = 0.0
    depth: int = 5
    warmup: float = 0.05
    clip: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0

    @classmethod
    def from_spec(cls, spec: RunSpec) -> TrainingSettings:
        """The settings that a run's spec asks for."""
        return cls(
            epochs=spec.head_epochs,
            batch_tokens=spec.batch_tokens,
            learning_rate=spec.learning_rate,
            ttt_steps=spec.ttt_steps,
            start=spec.head_start,
            train_lm_head=spec.train_lm_head,
            fc_norm=spec.fc_norm,
            depth=spec.depth,
        )


@dataclass(frozen=True)
class TrainedHead:
    """A head as training left it: the weights that did best on validation.

    Attributes
    ----------
    head
        Ready to decode, on the target's device and in its precision.
    folder
        Where it lies.
    history
        One record for each validation: ``update``, ``tokens`` (answer tokens learned from so
        far), ``learning_rate``, ``train_loss`` and per-step ``train_step_losses`` and
        ``train_agreement`` since the record before, and the fields of `Validation`.
    best
        The record with the lowest validation loss, whose weights these are.
    seconds
        Time spent on training, all sessions together.
    """

    head: DraftHead
    folder: Path
    history: list[dict[str, Any]]
    best: dict[str, Any]
    seconds: float


def train_head(
    data: TrainingData,
    layers: Sequence[int],
    target: Target,
    settings: TrainingSettings,
    seed: int,
    folder: Path,
    say: Say = quiet,
) -> TrainedHead:
    """Train one head, or load it when its folder already holds it.

    The folder names nothing by itself: ``causes_of`` the head decide whether what lies there is
    this head. What is damaged is trained again. A killed run continues from its last checkpoint to
    the same numbers as an undisturbed one. Under ``torchrun`` processes share each update.

    Parameters
    ----------
    data
        Shared by all heads that are compared.
    layers
        Boundaries the head reads, ascending.
    target
        Whose embedding the head shares, and whose last layer it may start from.
    settings, seed
        How to train; the seed fixes the order of the data and the random part of the start.
    folder
        Where the head, its history and its checkpoint go.
    say
        Called with a line of progress now and then.

    Raises
    ------
    UserError
        When the data cannot serve, or the loss stops being finite.
    """
    folder = Path(folder)
    config = HeadConfig.for_target(
        target,
        layers,
        len(data.vocabulary),
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        head_layers=settings.head_layers,
        tied_output=not settings.train_lm_head,
    )
    causes = causes_of(config, data, target, settings, seed)
    trained = finished(folder, causes, target, say)
    if trained is None:
        Trainer(config, data, target, settings, seed, folder, causes).run(say)
        trained = finished(folder, causes, target, say)
    if trained is None:
        raise UserError(
            f"the head that was written to {folder} cannot be read back; delete the folder and run "
            "again"
        )
    if (left := folder / CHECKPOINT).exists():  # by a run that was killed at the very end
        left.unlink(missing_ok=True)
    return trained


def causes_of(
    config: HeadConfig, data: TrainingData, target: Target, settings: TrainingSettings, seed: int
) -> dict[str, Any]:
    """Everything that determines a trained head."""
    device = target.model.get_input_embeddings().weight.device
    return {
        "head": config.to_dict(),
        "settings": asdict(settings),
        "seed": seed,
        "data": {
            "store": data.store.folder.name,  # the store names itself by what determines it
            "train": data.train.tolist(),
            "validation": data.validation.tolist(),
            "vocabulary": data.vocabulary.tolist(),
        },
        "target": target.digest,
        "code": code_digest("training"),
        "libraries": libraries(),
        "arithmetic": f"{device.type} {dtype_name(precision(device))}",
    }


def finished(folder: Path, causes: dict[str, Any], target: Target, say: Say) -> TrainedHead | None:
    """The finished head of a folder; None when there is none, or one of other causes or damaged."""
    path = folder / RECORD
    if not path.exists():
        return None
    try:
        if (record := read_record(path)) is None:
            raise UserError(f"{path} cannot be read")
        why = ", ".join(changed(record.get("causes", {}), causes)[:6])
        if not why:
            best, history, seconds = record["best"], record["history"], record["seconds"]
            return TrainedHead(DraftHead.load(folder, target), folder, history, best, seconds)
    except (KeyError, UserError) as err:
        why = f"damage: {err}"
    say(f"training {folder.name} again, because of {why}")
    return None


class Trainer:
    """One training run: its data, head, optimiser and place in the plan of updates."""

    def __init__(
        self,
        config: HeadConfig,
        data: TrainingData,
        target: Target,
        settings: TrainingSettings,
        seed: int,
        folder: Path,
        causes: dict[str, Any],
    ) -> None:
        self.target, self.settings, self.folder, self.causes = target, settings, folder, causes
        self.seed = seed
        self.rank, self.world = join_processes()
        embedding = target.model.get_input_embeddings().weight
        device = embedding.device
        if self.world > 1 and device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        self.head = DraftHead(config, embedding.to(device), data.vocabulary.to(device)).to(device)
        self.parameters = [p for p in self.head.parameters() if p.requires_grad]
        self.optimizers = make_optimizers(
            self.head,
            settings.optimizer,
            settings.learning_rate,
            settings.betas,
            settings.weight_decay,
        )
        self.optimizer_of = [
            next(o for o in self.optimizers if any(p is q for q in updated(o)))
            for p in self.parameters
        ]
        self.data, self.held_out = (
            Examples(data.store, config.layers, part, data.vocabulary, config.vocab_size, device)
            for part in (data.train, data.validation)
        )
        if settings.start == "target":
            start_from_target(self.head, target, seed)
            fit_start(self.head, *self.data.first_guesses(config.n_layers, FIT_ROWS), seed)
        else:
            start_at_random(self.head, seed)
        if config.tied_output:
            self.head.tie_output(target)
        if self.world > 1:
            for p in self.head.parameters():
                dist.broadcast(p.data, 0)
        self.batches = self.planned_batches(seed)
        self.update, self.tokens, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.since = torch.zeros(settings.ttt_steps, 2)  # sums of reports since the last record
        self.since_updates = 0

    def planned_batches(self, seed: int) -> list[list[int]]:
        """The batches of all updates, in order."""
        batches: list[list[int]] = []
        whole = math.ceil(self.settings.epochs)
        for epoch in range(whole):
            batches += self.data.epoch_batches(self.settings.batch_tokens, seed * 1009 + epoch)
        return batches[: max(1, round(len(batches) * self.settings.epochs / whole))]

    def validation_every(self) -> int:
        """Updates between validations: twelve in all, or fewer so that they cost a tenth."""
        # A validation is a forward pass, a third of an update's work for each token and step.
        steps = max(self.settings.depth, self.settings.ttt_steps) / self.settings.ttt_steps
        tokens = sum(self.held_out.answer_tokens) * steps / 3
        affordable = math.ceil(10 * tokens / self.settings.batch_tokens)
        return max(1, min(len(self.batches), max(affordable, math.ceil(len(self.batches) / 12))))

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to zero."""
        total = len(self.batches)
        warm = max(1, round(total * self.settings.warmup))
        if self.update < warm:
            return self.settings.learning_rate * (self.update + 1) / warm
        share = (self.update - warm) / max(1, total - warm)
        return self.settings.learning_rate * 0.5 * (1 + math.cos(math.pi * share))

    def run(self, say: Say) -> None:
        """Train to the end of the plan and write ``training.json``."""
        self.resume(say)
        if self.update:
            say(f"continuing at update {self.update} of {len(self.batches)}")
        elif self.rank == 0:
            # The head of an earlier training is overwritten from here on: it must neither be taken
            # for finished nor be gone on with.
            for name in (RECORD, CHECKPOINT):
                (self.folder / name).unlink(missing_ok=True)
        every = self.validation_every()
        started = saved = time.monotonic()
        before = self.seconds
        while self.update < len(self.batches):
            self.step()
            self.seconds = before + time.monotonic() - started
            done = self.update == len(self.batches)
            if done or self.update % every == 0:
                say(self.record())
            if self.rank == 0 and (done or time.monotonic() - saved > CHECKPOINT_SECONDS):
                self.checkpoint()
                saved = time.monotonic()
        if self.rank == 0:
            record = {
                "best": min(self.history, key=lambda r: r["loss"]),
                "seconds": round(self.seconds, 1),
                "history": self.history,
                "causes": self.causes,
            }
            write_record(self.folder / RECORD, record)
            (self.folder / CHECKPOINT).unlink(missing_ok=True)
        if self.world > 1:
            dist.barrier()

    def step(self) -> None:
        """One update."""
        chosen = self.batches[self.update]
        rate = self.learning_rate()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
            for group in optimizer.param_groups:
                group["lr"] = rate
        counts = self.data.loss_counts(chosen, self.settings.ttt_steps)
        report = torch.zeros_like(self.since)
        if mine := chosen[self.rank :: self.world]:
            batch = self.data.batch(mine, self.settings.ttt_steps)
            if self.settings.noise:
                self.disturb(batch.states)
            with autocast(self.head.fc.weight.device):
                loss, report = ttt_loss(self.head, batch, counts, self.settings.sharpen)
            loss.backward()
        report = self.gather(report.cpu())
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        if not (report.isfinite().all() and norm.isfinite()):
            raise UserError(
                f"training stopped at update {self.update + 1} of {len(self.batches)}: the loss or "
                f"its gradient is not finite (loss by step {report[:, 0].tolist()}, gradient norm "
                f"{norm.item():.3g}, learning rate {rate:.2g}); {REMEDY}"
            )
        for optimizer in self.optimizers:
            optimizer.step()
        self.update += 1
        self.tokens += sum(self.data.answer_tokens[c] for c in chosen)
        self.since += report
        self.since_updates += 1

    def disturb(self, states: Tensor) -> None:
        """Add noise to states ``[N, K*d]``, each layer's in proportion to its size."""
        generator = torch.Generator(states.device)
        generator.manual_seed((self.seed * 1009 + self.update) * self.world + self.rank)
        for part in states.chunk(self.head.config.k, dim=-1):
            size = part.square().mean(-1, keepdim=True).sqrt() * self.settings.noise
            noise = torch.randn(part.shape, generator=generator, device=part.device)
            part.add_(size * noise)

    def gather(self, report: Tensor) -> Tensor:
        """Sum gradients and reports over all processes; means were already taken over all."""
        if self.world == 1:
            return report
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        parts = flat.split([g.numel() for g in gradients])
        for held, part in zip(gradients, parts, strict=True):
            held.copy_(part.view_as(held))
        report = report.to(flat.device)
        dist.all_reduce(report)
        return report.cpu()

    def record(self) -> str:
        """Validate, remember the result, keep the weights if they are the best so far."""
        steps = self.settings.ttt_steps
        settings = self.settings
        result = validate(self.head, self.held_out, settings.depth, steps, settings.sharpen)
        weights = STEP_WEIGHT ** torch.arange(steps)
        means = self.since / self.since_updates
        record = {
            "update": self.update,
            "tokens": self.tokens,
            "learning_rate": self.learning_rate(),
            "train_loss": float((weights * means[:, 0]).sum()),
            "train_step_losses": means[:, 0].tolist(),
            "train_agreement": means[:, 1].tolist(),
            **asdict(result),
        }
        if not math.isfinite(result.loss):
            raise UserError(
                f"training stopped at update {self.update} of {len(self.batches)}: the loss on "
                f"validation is {result.loss} (in training {record['train_loss']:.3g}, learning "
                f"rate {record['learning_rate']:.2g}); {REMEDY}"
            )
        if self.rank == 0 and all(result.loss < r["loss"] for r in self.history):
            self.head.save(self.folder)
        self.history.append(record)
        self.since.zero_()
        self.since_updates = 0
        pace = self.tokens / max(self.seconds, 1e-9)
        return (
            f"update {self.update}/{len(self.batches)}  loss {record['train_loss']:.3f} "
            f"(validation {result.loss:.3f})  estimated tau {result.tau:.2f}  "
            f"{pace:.0f} answer tokens/s"
        )

    def checkpoint(self) -> None:
        """Everything a later process needs to go on, in one file put in place at once."""
        tensors = {f"head.{k}": v for k, v in self.head.state_dict().items()}
        for i, p in enumerate(self.parameters):
            for key, value in self.optimizer_of[i].state[p].items():
                tensors[f"optimizer.{i}.{key}"] = value
        tensors["since"] = self.since
        place = {
            "causes": digest(self.causes),
            "update": self.update,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "since_updates": self.since_updates,
            "history": self.history,
        }
        data = save(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()},
            {"place": json.dumps(place)},
        )
        write_atomically(self.folder / CHECKPOINT, data)

    def resume(self, say: Say) -> None:
        """Go to where this same training was last saved, if it was and nothing is damaged."""
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        try:
            with safe_open(path, "pt") as file:
                place = json.loads((file.metadata() or {}).get("place", "{}"))
                if place.pop("causes", None) != digest(self.causes):
                    return
                tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
            if place["history"]:
                DraftHead.load(self.folder, self.target)  # the best weights so far
        except (OSError, SafetensorError, ValueError) as err:
            say(f"starting {self.folder.name} over, because what was saved is damaged: {err}")
            return
        self.head.load_state_dict(
            {k.removeprefix("head."): v for k, v in tensors.items() if k.startswith("head.")}
        )
        for i, p in enumerate(self.parameters):
            prefix = f"optimizer.{i}."
            self.optimizer_of[i].state[p] = {
                k.removeprefix(prefix): v.to(p.device)
                for k, v in tensors.items()
                if k.startswith(prefix)
            }
        self.since = tensors["since"]
        for name, value in place.items():
            setattr(self, name, value)
