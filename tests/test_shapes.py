"""What a smaller tree would accept is read from a whole one as if it had been drafted itself."""

from __future__ import annotations

import pytest
from oracle import PROMPT, build, random_head

from draftlayers.decoding import GREEDY, Chance, Decoded, Draft, accept_greedy, decode
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.project import UserError
from draftlayers.shapes import Shape, best_shape, likeliest, tree_length, trees_within
from draftlayers.start import start_from_target


@pytest.fixture(scope="module")
def llama() -> Engine:
    return build("llama")


def texts(draft: Draft, nodes=None) -> set[tuple[int, ...]]:
    """The runs of tokens that lead to each guess of a tree, or to some of them."""
    runs: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        runs.append((*(runs[parent] if parent >= 0 else ()), token))
    return {runs[i] for i in (range(len(runs)) if nodes is None else nodes)}


class Twice(HeadDrafter):
    """Drafts a whole tree, and from the same state the smaller ones that are asked for."""

    def also(self, shapes: list[Shape], answer: list[int]) -> Twice:
        self.smaller = {shape: shape.drafter(self.head) for shape in shapes}
        self.answer, self.place = answer, 0
        self.lengths: dict[Shape, list[int]] = {shape: [] for shape in shapes}
        return self

    def observe(self, tokens, states) -> None:
        super().observe(tokens, states)
        self.place = self.cache.length + 1 - len(PROMPT)  # tokens of the answer that are there

    def propose(self, depth, sampling, chance) -> Draft:
        whole = super().propose(depth, sampling, chance)
        for shape, drafter in self.smaller.items():
            drafter.cache, drafter.hidden = self.cache, self.hidden
            draft = drafter.propose(min(shape.depth, depth), GREEDY, Chance(0))
            assert texts(draft) == texts(whole, likeliest(whole, shape))
            if depth >= self.depth:
                ahead = self.answer[self.place :]
                best = [ahead[d] if d < len(ahead) else -1 for d in (0, *draft.depths)]
                path, _ = accept_greedy(draft, best)
                self.lengths[shape].append(min(len(path) + 1, len(ahead)))
        return whole


@pytest.mark.parametrize("started", [False, True])
def test_a_smaller_tree_is_cut_from_a_whole_one(llama: Engine, started: bool) -> None:
    head = random_head(llama)
    if started:
        start_from_target(head, llama.target, 0)
    answer = decode(llama, PROMPT, 30).tokens
    whole, shapes = Shape.whole_tree(3), trees_within(3, [2, 3, 5, 9, 16])
    drafter = Twice(head, whole.depth, whole.width, whole.size).also(shapes, answer)
    run = decode(llama, PROMPT, 30, drafter)
    assert run.tokens == answer and max(len(d.tokens) for d in run.drafts) == whole.size
    for shape in shapes:
        expected = drafter.lengths[shape]
        assert tree_length([run], shape) == sum(expected) / len(expected), shape


def test_more_guesses_are_never_accepted_less(llama: Engine) -> None:
    head = random_head(llama)
    start_from_target(head, llama.target, 0)
    runs = [decode(llama, PROMPT[i:], 30, Shape.whole_tree(3).drafter(head)) for i in range(3)]
    for levels in (1, 2, 3):
        lengths = [tree_length(runs, t) for t in trees_within(3, range(2, 20)) if t.depth == levels]
        assert lengths == sorted(lengths) and lengths[0] >= 1


def test_what_cannot_be_told_is_refused(llama: Engine) -> None:
    with pytest.raises(UserError, match=r"no pass had room.*decode_tokens"):
        tree_length([Decoded()], Shape(2, 4, 4))
    chain = decode(llama, PROMPT, 10, Shape.chain(2).drafter(random_head(llama)))
    with pytest.raises(UserError, match="without scores"):
        tree_length([chain], Shape(2, 4, 4))


def test_the_choice_ignores_what_measurements_disagree_about() -> None:
    one = {Shape(2, 4, 5): 1.50, Shape(3, 4, 7): 1.51, Shape(4, 4, 11): 1.52, Shape.chain(2): 1.2}
    other = {**one, Shape(3, 4, 7): 1.52, Shape(4, 4, 11): 1.50}
    assert best_shape(one) == best_shape(other) == Shape(2, 4, 5)
    assert best_shape({**one, Shape(4, 4, 11): 1.7}) == Shape(4, 4, 11)
