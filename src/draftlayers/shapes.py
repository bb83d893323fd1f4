"""Which draft pays: how deep, how wide and how large, predicted before any of them is timed.

Used by chapter 07 and by the benchmark of decoding. A drafter grows the same tree whatever is cut
from it afterwards, so decoding once with a tree that keeps every guess tells what each smaller one
would have accepted: ``tree_length``. With the terms that ``costs`` measures that gives a predicted
speedup for every shape, and ``best_shape`` picks one. Growing trees belongs to ``drafting``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from draftlayers.costs import expected_length, measure_costs, predicted_speedup
from draftlayers.decoding import Decoded, Draft, acceptance_rates, decode
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.head import DraftHead
from draftlayers.project import Say, UserError, quiet

WIDTH = 4  # children of a node, and nodes that grow at each level of a tree
SLACK = 0.02  # predictions nearer than this are alike, as measured terms are no more exact


@dataclass(frozen=True)
class Shape:
    """A draft's shape: its levels, the children of a node (1: a chain), and its guesses in all."""

    depth: int
    width: int
    size: int

    @classmethod
    def chain(cls, depth: int) -> Shape:
        """A chain of as many guesses as levels."""
        return cls(depth, 1, depth)

    @classmethod
    def whole_tree(cls, depth: int) -> Shape:
        """A tree that keeps every guess its drafter makes."""
        return cls(depth, WIDTH, WIDTH + (depth - 1) * WIDTH**2)

    def __str__(self) -> str:
        if self.width == 1:
            return f"chain of {self.depth}"
        return f"tree of {self.size}, {self.depth} deep"

    def drafter(self, head: DraftHead) -> HeadDrafter:
        """What drafts in this shape."""
        return HeadDrafter(head, self.depth, self.width, self.size)


def trees_within(depth: int, sizes: Iterable[int]) -> list[Shape]:
    """Trees of some sizes and of every depth up to one, each with a guess on every level.

    >>> [str(tree) for tree in trees_within(2, [3, 7])]
    ['tree of 3, 1 deep', 'tree of 3, 2 deep', 'tree of 7, 2 deep']
    """
    return [
        Shape(levels, WIDTH, size)
        for size in sizes
        for levels in range(1, depth + 1)
        if levels <= size <= Shape.whole_tree(levels).size and size > 1
    ]


def tree_length(runs: Sequence[Decoded], shape: Shape) -> float:
    """Acceptance length of a smaller tree, from answers that were decoded with a whole one.

    Of every pass it is known which guesses the target agreed with, and which of all guesses the
    smaller tree would have kept: the likeliest within its levels. What another shape would have
    started from elsewhere in the text is not known; where passes start is taken to be alike.

    Parameters
    ----------
    runs
        Decoded greedily with ``Shape.whole_tree`` of at least this depth. Passes that had less
        room than its depth are left out, like those of the last tokens of an answer.

    Raises
    ------
    UserError
        When a draft is no tree with scores, or no pass is left.
    """
    added: list[int] = []
    deepest = max((draft.depth for run in runs for draft in run.drafts), default=0)
    for run in runs:
        for draft, path, produced in zip(run.drafts, run.paths, run.produced, strict=True):
            if draft.depth == deepest:
                kept = likeliest(draft, shape)
                agreed = sum(node in kept for node in path)
                added.append(min(agreed + 1, produced))
    if not added:
        raise UserError(
            f"no pass had room for a draft of depth {max(deepest, 1)}, so nothing says what a "
            f"{shape} would accept; decode longer answers (decode_tokens)"
        )
    return sum(added) / len(added)


def likeliest(draft: Draft, shape: Shape) -> set[int]:
    """The guesses of a whole tree that a smaller one of this shape keeps.

    >>> whole = Draft([5, 6, 7, 8], [-1, -1, 0, 1], scores=[-0.2, -1.0, -0.4, -2.0])
    >>> likeliest(whole, Shape(2, 4, 2)), likeliest(whole, Shape(1, 4, 2))
    ({0, 2}, {0, 1})
    """
    if draft.scores is None:
        raise UserError("drafts without scores are no trees, so none can be cut from them")
    scores, depths = draft.scores, draft.depths
    within = [node for node in range(len(scores)) if depths[node] <= shape.depth]
    return set(sorted(within, key=lambda node: (-scores[node], node))[: shape.size])


@dataclass(frozen=True)
class Forecast:
    """What is foretold for every shape before one of them is timed.

    Attributes
    ----------
    lengths, speedups
        Acceptance length τ and speedup over plain decoding of each shape.
    alpha
        Acceptance rates by place of a chain as long as the longest.
    """

    lengths: dict[Shape, float]
    speedups: dict[Shape, float]
    alpha: list[float | None]

    @property
    def best(self) -> Shape:
        """The shape to take, by ``best_shape``."""
        return best_shape(self.speedups)

    @property
    def trees(self) -> dict[Shape, float]:
        """The speedups of trees alone."""
        return {shape: speed for shape, speed in self.speedups.items() if shape.width > 1}


def foretell(
    engine: Engine,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    passes: Mapping[int, float],
    new_tokens: int,
    chain: int,
    tree: int,
    say: Say = quiet,
) -> Forecast:
    """Decode prompts with a long chain and a whole tree, and foretell every smaller shape.

    Parameters
    ----------
    prompts
        Of tokens; costs are measured behind the longest.
    passes
        From ``measure_passes``; trees are as large as these passes can verify.
    new_tokens
        Of each answer, at most.
    chain, tree
        Levels of the longest chain and of the deepest tree; no tree if the engine has none, or if
        answers are too short for one.
    """
    surveys = {"chain": Shape.chain(chain)}
    if engine.trees and new_tokens > tree + 1:
        surveys["tree"] = Shape.whole_tree(tree)
    drafters = {name: shape.drafter(head) for name, shape in surveys.items()}
    costs = measure_costs(engine, drafters, max(prompts, key=len), passes, repeats=20)
    runs: dict[str, list[Decoded]] = {}
    for name, drafter in drafters.items():
        runs[name] = [decode(engine, ids, new_tokens, drafter) for ids in prompts]
        say(f"decoded {len(prompts)} prompts with a {surveys[name]}")
    alpha = acceptance_rates(runs["chain"])
    chains = [Shape.chain(depth) for depth in range(1, chain + 1)]
    lengths = {shape: expected_length(alpha, shape.depth) for shape in chains}
    if "tree" in runs:
        shapes = trees_within(tree, [tokens - 1 for tokens in sorted(passes)])
        lengths |= {shape: tree_length(runs["tree"], shape) for shape in shapes}
    speedups = {
        shape: predicted_speedup(
            length, shape.depth, costs["chain" if shape.width == 1 else "tree"], shape.size
        )
        for shape, length in lengths.items()
    }
    return Forecast(lengths, speedups, alpha)


def best_shape(predicted: Mapping[Shape, float], slack: float = SLACK) -> Shape:
    """The cheapest shape whose predicted speedup is within a share `slack` of the highest.

    Cheapest is that with the fewest levels, then with the fewest guesses: what two measurements of
    the same terms disagree about should not decide.

    >>> best_shape({Shape(3, 4, 9): 1.61, Shape(2, 4, 7): 1.60, Shape.chain(1): 1.3})
    Shape(depth=2, width=4, size=7)
    """
    enough = (1 - slack) * max(predicted.values())
    good = [shape for shape, speedup in predicted.items() if speedup >= enough]
    return min(good, key=lambda shape: (shape.depth, shape.size, shape.width))
