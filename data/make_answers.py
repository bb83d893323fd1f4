"""Let a target answer the prompts that ship, and keep its answers in ``data/answers``.

    python data/make_answers.py [--model smollm2-135m] [--limit N]

Of training prompts two answers of three are greedy, the third is sampled at a low temperature;
those to validation prompts are all greedy. The file grows group by group; running the script again
goes on where it stopped.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from draftlayers.answers import answer_prompts, shipped_answers
from draftlayers.prompts import TRAIN, VALIDATION, read_prompts
from draftlayers.spec import PROFILES
from draftlayers.targets import load_target


def main(
    model: Annotated[str, typer.Option(help="Target that answers.")] = "smollm2-135m",
    limit: Annotated[int, typer.Option(help="Answer only the first LIMIT prompts.")] = 1_000_000,
) -> None:
    """Answer the training prompts with the target itself."""
    started = time.monotonic()
    target = load_target(model, say=print)
    prompts = read_prompts(TRAIN)[:limit]
    full = PROFILES["full"]
    for some, greedy in ((read_prompts(VALIDATION), True), (prompts, False)):
        answer_prompts(
            target,
            some,
            full["answer_tokens"],
            full["max_prompt_tokens"],
            shipped_answers(target),
            say=lambda text: print(f"{time.monotonic() - started:6.0f} s  {text}", flush=True),
            # What ships is data: it stays valid when the code that wrote it changes.
            causes={"target": target.digest},
            greedy=greedy,
        )


if __name__ == "__main__":
    typer.run(main)
