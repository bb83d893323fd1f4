"""What all heads of a run learn from, collected once.

Used by chapter 06 and by the heads' own jobs. How a head reads it belongs to ``examples``.
"""

from __future__ import annotations

from draftlayers.contenders import planned_sets
from draftlayers.examples import TOP, TrainingData
from draftlayers.project import Say, quiet
from draftlayers.prompts import Corpus
from draftlayers.runs import Run
from draftlayers.states import collect
from draftlayers.targets import Target
from draftlayers.writing import fast_twin


def prepare(run: Run, target: Target, corpus: Corpus, say: Say = quiet) -> TrainingData:
    """Collect what all heads of a run learn from, once for all planned layer sets.

    In the precision in which the answers were written: a head learns from very many states, and
    what rounding adds to them is small beside what it does not know.
    """
    # Boundary N is no input; the start of every head is fitted to it.
    boundaries = {target.n_layers, *(b for layers in planned_sets(run).values() for b in layers)}
    conversations, folder = [*corpus.train, *corpus.validation], run.path("states")
    with run.hold():
        store = collect(
            fast_twin(target),
            conversations,
            sorted(boundaries),
            folder,
            predict="answer",
            top=TOP,
            say=say,
        )
    return TrainingData.split(store, len(corpus.validation), run.spec.draft_vocab)
