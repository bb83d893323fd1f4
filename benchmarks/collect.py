"""How much the collection of all boundaries costs on top of the target's forward pass.

    python benchmarks/collect.py --json -

Both sides see the same batches, in turns: the bare pass computes the model's logits, the
collection also keeps every boundary, its norms and the entropy of every next-token distribution,
and writes it all to disk. ``ratio`` is the collection's tokens/s over the bare pass's.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from _record import write

from draftlayers import states
from draftlayers.answers import load_answers, shipped_answers
from draftlayers.corpus import pair
from draftlayers.prompts import TRAIN, read_prompts
from draftlayers.targets import Target, load_target


@torch.inference_mode()
def bare(target: Target, conversations: list) -> None:
    """The model's logits of the batches that the collection would make."""
    for start in range(0, len(conversations), states.SHARD):
        shard = [c.tokens for c in conversations[start : start + states.SHARD]]
        for batch in states.batches([len(tokens) for tokens in shard]):
            ids = torch.zeros(len(batch), max(len(shard[i]) for i in batch), dtype=torch.long)
            for row, i in enumerate(batch):
                ids[row, : len(shard[i])] = torch.tensor(shard[i])
            target.model(ids.to(target.device), use_cache=False)


def main(
    model: Annotated[str, typer.Option(help="Target.")] = "smollm2-135m",
    conversations: Annotated[int, typer.Option(help="Conversations in each round.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds of both sides.")] = 5,
    to: Annotated[str, typer.Option("--json", help="File for the result, - to print it.")] = "-",
) -> None:
    """Compare collection with the bare forward pass."""
    target = load_target(model)
    prompts = read_prompts(TRAIN)
    answers = load_answers(shipped_answers(target), {"target": target.digest})
    if not answers:
        raise typer.BadParameter(f"no answers of {model} are shipped; see data/make_answers.py")
    texts = pair(target, prompts, answers, 320, 128)[:conversations]
    tokens = sum(len(c.tokens) for c in texts)
    boundaries = range(target.n_layers + 1)
    times: dict[str, list[float]] = {"bare": [], "collect": []}
    for number in range(rounds + 1):
        folder = Path(tempfile.mkdtemp(prefix="draftlayers-"))
        for name, work in (
            ("bare", lambda: bare(target, texts)),
            ("collect", lambda folder=folder: states.collect(target, texts, boundaries, folder)),
        ):
            started = time.perf_counter()
            work()
            if target.device.type == "cuda":
                torch.cuda.synchronize()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - started)
        shutil.rmtree(folder)
    pairs = zip(times["bare"], times["collect"], strict=True)
    result = {
        "model": model,
        "tokens": tokens,
        "bare_tokens_per_s": tokens / statistics.median(times["bare"]),
        "collect_tokens_per_s": tokens / statistics.median(times["collect"]),
        "ratio": statistics.median(one / other for one, other in pairs),
    }
    write(result, to)


if __name__ == "__main__":
    typer.run(main)
