"""The training-time test by hand, one-position gradients, and estimates against decoding."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from draftlayers import ttt
from draftlayers.decoding import Decoded, acceptance_length, decode
from draftlayers.drafting import HeadDrafter
from draftlayers.engine import Engine
from draftlayers.examples import TrainingData
from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.prompts import Conversation
from draftlayers.start import start_from_target
from draftlayers.states import collect
from draftlayers.targets import tiny_target
from draftlayers.training import train_head
from draftlayers.ttt import soft_cross_entropy, training_time_test, ttt_loss, validate, walk
from tests.helpers import (
    LAYERS,
    STEPS,
    answered,
    by_heart,
    new_head,
    rows_of,
    settings,
    view,
)
from tests.reference import naive_logits, naive_rms, naive_step


def naive_loss(head, store, sequence, vocabulary, steps):
    """The loss of one conversation, chain by chain and position by position, in float64."""
    rows = rows_of(store, sequence)
    token, answer = store.meta["token"][rows].long(), store.meta["answer"][rows]
    states = torch.cat([store.load(b, rows) for b in LAYERS], -1).double()
    top_ids, top_p = store.top_ids[rows].long(), store.top_logprobs[rows].double().exp()
    place = {int(t): i for i, t in enumerate(vocabulary)}
    text = [[] for _ in range(head.config.head_layers)]
    first = [naive_step(head, text, head.fuse(states[p]), token[p + 1], p)
             for p in range(len(rows) - 1)]  # fmt: skip
    losses: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    for p in range(len(rows) - 1):
        hidden, memory = first[p], [layer[: p + 1] for layer in text]
        for i in range(steps):
            if p + 1 + i >= len(rows):
                break
            if i:
                if head.config.norm_output:
                    hidden = naive_rms(hidden, head.norm.weight, head.config.rms_norm_eps)
                hidden = naive_step(head, memory, hidden, token[p + 1 + i], p + i)
            said = p + 1 + i  # the row whose next token this step guesses
            if not answer[said] or int(top_ids[said, 0]) not in place:
                continue
            wanted = torch.zeros(len(vocabulary), dtype=torch.float64)
            for t, probability in zip(top_ids[said], top_p[said], strict=True):
                if int(t) in place:
                    wanted[place[int(t)]] += probability
            log_q = naive_logits(head, hidden).log_softmax(0)
            losses[i].append(-(wanted / wanted.sum() * log_q).sum())
    return losses


SHAPES = [
    {},
    {"fc_norm": True},
    {"head_layers": 2},
    {"head_layers": 3, "fc_norm": True, "norm_output": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_matches_chains_by_hand(target, data, shape):
    head = new_head(target, data, **shape)
    examples = view(target, data, data.train)
    chosen = [0, 3, 7]
    counts = examples.loss_counts(chosen, STEPS)
    loss, report = ttt_loss(head, examples.batch(chosen, STEPS), counts)
    loss.backward()
    with torch.no_grad():
        reference = new_head(target, data, dtype=torch.float64, **shape)
        by_step: list[list[torch.Tensor]] = [[] for _ in range(STEPS)]
        for c in chosen:
            found = naive_loss(reference, data.store, int(data.train[c]), data.vocabulary, STEPS)
            for step, values in zip(by_step, found, strict=True):
                step.extend(values)
    assert [len(step) for step in by_step] == counts and min(counts) > 5
    means = torch.stack([torch.stack(step).mean() for step in by_step])
    torch.testing.assert_close(report[:, 0].double(), means, rtol=1e-4, atol=1e-4)
    expected = (0.8 ** torch.arange(STEPS) * means).sum()
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [{}, {"head_layers": 2, "norm_output": True}], ids=str)
def test_gradient_matches_finite_differences_of_the_loss(target, data, shape):
    """Central differences of the batch loss along random directions, weight by weight."""
    head = new_head(target, data, **shape)
    examples = view(target, data, data.train)
    batch, counts = examples.batch([1, 2], STEPS), examples.loss_counts([1, 2], STEPS)
    ttt_loss(head, batch, counts)[0].backward()
    generator = torch.Generator().manual_seed(0)
    for name, weight in head.named_parameters():
        direction = torch.randn(weight.shape, generator=generator)
        direction /= direction.norm()
        slope = float((weight.grad * direction).sum())
        sides = []
        with torch.no_grad():
            for sign in (1, -1):
                weight.add_(direction, alpha=sign * 3e-2)
                sides.append(float(ttt_loss(head, batch, counts)[0]))
                weight.sub_(direction, alpha=sign * 3e-2)
        assert (sides[0] - sides[1]) / 6e-2 == pytest.approx(slope, rel=0.05, abs=2e-3), name


@torch.no_grad()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_steps_equal_decoding_steps(target, data, shape):
    """A chain drafted with the head's cache passes through the states that training saw."""
    head = new_head(target, data, **shape)
    examples = view(target, data, data.train)
    batch = examples.batch([5], STEPS)
    trained = list(training_time_test(head, batch, STEPS))
    rows = rows_of(data.store, int(data.train[5]))
    token = data.store.meta["token"][rows].long()
    states = torch.cat([data.store.load(b, rows) for b in LAYERS], -1).float()
    for a, p in enumerate(batch.active.tolist()):
        cache = head.new_cache(len(rows) + STEPS)
        hidden = head.fuse(states[None, : p + 1])
        out = head(hidden, token[None, 1 : p + 2], torch.arange(p + 1), cache)[:, -1:]
        for i in range(STEPS):
            if i and p + 1 + i < len(rows):
                after = token[None, p + 1 + i, None]
                out = head(head.again(out), after, torch.tensor([p + i]), cache)
            elif i:
                break
            torch.testing.assert_close(out[0, 0], trained[i][a], rtol=1e-4, atol=1e-4)


# speculators imports these for making data; a head needs none, so stand-ins will do.
DATA_TOOLS = (
    *("datasets", "hs_connectors"),
    *("openai.types.completion", "openai.types.chat", "openai.types", "openai"),
)


def test_loss_matches_speculators(target, data, tmp_path, monkeypatch):
    """One forward and one training-time-test loss of speculators' Eagle3DraftModel.

    Faithful to EAGLE-3 are: norm_before_residual, norm_before_fc, fc_norm and norm_output all
    off, no sliding window, a step decay of 0.8, and the KL loss, which is the soft cross-entropy
    minus the entropy of its targets and so has the same gradient.
    """
    for tool in DATA_TOOLS:
        if importlib.util.find_spec(tool.partition(".")[0]) is None:
            monkeypatch.setitem(sys.modules, tool, MagicMock(__spec__=None, __path__=[]))
    eagle3 = pytest.importorskip("speculators.models.eagle3")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    head = new_head(target, data)
    c = head.config
    layer = LlamaConfig(
        hidden_size=c.d_model, intermediate_size=c.intermediate_size, num_hidden_layers=1,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, head_dim=c.head_dim,
        vocab_size=c.vocab_size, rms_norm_eps=c.rms_norm_eps, rope_parameters=dict(c.rope),
        max_position_embeddings=c.max_positions, attn_implementation="eager",
    )  # fmt: skip
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=c.draft_vocab_size,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        eagle_aux_hidden_state_layer_ids=list(c.layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = eagle3.Eagle3DraftModel(config)
    weights = {k.replace("midlayer.", "layers.0."): v for k, v in head.state_dict().items()}
    weights["embed_tokens.weight"] = head.embedding
    weights["verifier_norm.weight"] = target.final_norm.weight
    weights["verifier_lm_head.weight"] = target.output_matrix.weight[data.vocabulary]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not missing and not unexpected

    # All tokens of the distribution this time, so that only float16 separates the targets.
    conversations = answered(target, 3, 16, seed=6)
    store = collect(target, conversations, LAYERS, tmp_path, predict="answer", top=512)
    whole = replace(data, store=store, train=torch.tensor([1]))
    mine = view(target, whole, whole.train)
    counts = mine.loss_counts([0], STEPS)
    batch = mine.batch([0], STEPS)
    own, report = ttt_loss(head, batch, counts)
    own.backward()

    # speculators is given, at each index, the token and the target's final state one place on.
    ids = mine.token[None]
    with torch.no_grad(), target.capture([target.n_layers]) as states:
        target.model(input_ids=ids)
    _, loss, metrics = model(
        hidden_states=mine.states(torch.arange(ids.shape[1] - 1))[None].float(),
        input_ids=ids[:, 1:],
        document_ids=torch.zeros(1, ids.shape[1] - 1, dtype=torch.long),
        loss_mask=mine.trainable[None, 1:],
        verifier_last_hidden_states=states[target.n_layers][:, 1:],
        ttt_steps=STEPS,
        ttt_step_loss_decay=0.8,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    loss.backward()
    entropies = torch.special.entr(batch.probabilities).sum(-1)
    for i in range(STEPS):
        kl = report[i, 0] - entropies[batch.labels[i, batch.loss_mask[i]]].mean()
        theirs = metrics[f"loss_{i}_sum"] / 0.8**i
        assert float(kl) == pytest.approx(float(theirs), rel=2e-3)
    theirs = dict(model.named_parameters())
    for name, weight in head.named_parameters():
        other = theirs[name.replace("midlayer.", "layers.0.")]
        if other.requires_grad:  # speculators freezes the output matrix
            scale = float(weight.grad.abs().max())
            torch.testing.assert_close(other.grad, weight.grad, rtol=0, atol=5e-3 * scale)


def test_one_answer_token_trains_one_position(target, tmp_path):
    """Only the index that guesses the answer's one token gets a gradient at step 0."""
    conversation = Conversation("one", "x", (5, 6, 7, 8, 9), (10,))
    filler = [Conversation(str(i), "x", (5, 6, i), (11, 12)) for i in range(3, 5)]
    store = collect(target, [conversation, *filler], LAYERS, tmp_path, predict="answer", top=64)
    data = TrainingData(
        store, torch.tensor([0]), torch.tensor([1, 2]), torch.arange(target.vocab_size)
    )
    head = new_head(target, data)
    examples = view(target, data, data.train)
    for steps in (1, 3):
        batch = examples.batch([0], steps)
        assert batch.loss_mask.sum(1).tolist() == [1] * steps
        # The token at place 5 is guessed by step i from index 3 - i, and from nowhere else.
        for i in range(steps):
            assert batch.active[batch.loss_mask[i]].tolist() == [3 - i]
    batch = examples.batch([0], 1)
    batch.states.requires_grad_()
    ttt_loss(head, batch, [1])[0].backward()
    assert batch.states.grad[4:].abs().sum() == 0
    assert batch.states.grad[3].abs().sum() > 0


def test_soft_cross_entropy_against_autograd():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 30, generator=generator)
    ids = torch.stack([torch.randperm(30, generator=generator)[:6] for _ in range(5)])
    p = torch.rand(5, 6, generator=generator).softmax(-1)
    plain, ours = values.clone().requires_grad_(), values.clone().requires_grad_()
    dense = torch.zeros(5, 30).scatter(1, ids, p)
    expected = torch.nn.functional.cross_entropy(plain, dense, reduction="sum")
    found = soft_cross_entropy(ours * 1.0, ids, p)
    (2 * expected).backward()
    (2 * found).backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.filterwarnings("error")
def test_mixed_precision_learns_the_same(target, data, monkeypatch):
    """bfloat16 products give about the gradient of float32, and exact states between layers."""
    examples = view(target, data, data.train)
    batch, counts = examples.batch([0, 1], STEPS), examples.loss_counts([0, 1], STEPS)
    gradients = []
    for mixed in (False, True):
        monkeypatch.setattr(ttt, "multiplies_bfloat16", lambda mixed=mixed: mixed)
        head = new_head(target, data, start="target")
        with ttt.autocast(head.fc.weight.device):
            loss, _ = ttt_loss(head, batch, counts)
            hidden = next(training_time_test(head, batch, STEPS))
            assert head.fc(batch.states).dtype == (torch.bfloat16 if mixed else torch.float32)
        assert hidden.dtype == torch.float32
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in head.parameters()]))
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert 0.99 < cosine < 1 - 1e-9
    assert gradients[1].dtype == torch.float32


def test_validation_counts_guesses_outside_the_vocabulary_as_wrong(target, data):
    head = new_head(target, data, start="target")
    few = replace(data, vocabulary=data.vocabulary[:2])
    config = HeadConfig.for_target(target, LAYERS, 2)
    small = DraftHead(config, head.embedding, few.vocabulary)
    start_from_target(small, target, seed=0)
    result = validate(small, view(target, few, few.validation), STEPS, STEPS)
    firsts = data.store.top_ids[:, 0][data.store.meta["answer"]]
    share = torch.isin(firsts.long(), few.vocabulary).float().mean()
    assert share < 0.5 and max(result.agreement) <= 0.6


# --- The estimate of τ -------------------------------------------------------------------------


def passes_by_hand(right: torch.Tensor, depth: int, ended: bool) -> list[int]:
    """Tokens added by each pass: draft, accept, add the target's token, stop, as decoding does.

    right ``[places, depth]``: whether each guess of a chain is, that starts in front of each of
    the tokens after the first; ``ended`` tells an end token from the most tokens allowed.
    """
    tokens = len(right)
    room = 10**6 if ended else tokens
    added: list[int] = []
    while room and sum(added) < tokens:
        place, accepted = sum(added), 0
        while accepted < min(depth, room - 1) and place + accepted < tokens:
            if not right[place, accepted]:
                break
            accepted += 1
        # The target's own token follows, unless the end token was among the guesses.
        new = accepted if place + accepted == tokens else accepted + 1
        added.append(new)
        room -= new
    return added


@pytest.mark.parametrize("ended", [False, True])
def test_walk_against_passes_by_hand(ended):
    generator = torch.Generator().manual_seed(0)
    for case in range(300):
        tokens, depth = case % 12, 1 + case % 5
        right = torch.rand(tokens, depth, generator=generator) < 0.7
        runs = [
            int(right[p, : tokens - p].int().cumprod(0).sum()) for p in range(tokens)
        ]  # no guess lies behind the end
        assert walk(runs) == passes_by_hand(right, depth, ended)
        assert sum(walk(runs)) == tokens


class RoundedStates(HeadDrafter):
    """Reads states in the precision in which a store keeps them."""

    def observe(self, tokens, states):
        super().observe(tokens, states.bfloat16().float())


@pytest.fixture(scope="module")
def greedy_study(tmp_path_factory):
    """A target, its greedy answers, some of which end by themselves, and a head that knows them."""
    target = tiny_target()
    plain = answered(target, 6, 30, seed=4)
    # A token that some answers come to in their middle becomes an end token.
    often = torch.tensor([t for c in plain for t in c.answer_ids[8:20]]).bincount()
    target.model.generation_config.eos_token_id = int(often.argmax())
    conversations = answered(target, 6, 30, seed=4)
    ended = [c.answer_ids[-1] in target.eos_ids for c in conversations]
    assert 0 < sum(ended) < 6
    folder = tmp_path_factory.mktemp("greedy")
    data = by_heart(target, folder / "states", conversations)
    slow = settings(epochs=50.0, learning_rate=5e-3)
    head = train_head(data, LAYERS, target, slow, 0, folder / "head").head
    return target, conversations, ended, data, head


def decoded_answers(greedy_study, depth: int) -> list[Decoded]:
    target, conversations, ended, _, head = greedy_study
    engine = Engine(target)
    drafter = RoundedStates(head, depth, precision=torch.float32)
    return [
        decode(engine, c.prompt_ids, len(c.answer_ids) + 20 * end, drafter)
        for c, end in zip(conversations, ended, strict=True)
    ]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_tau_estimate_equals_real_decoding(greedy_study, depth):
    """On greedy answers, cut short or ended, with chains shorter and longer than training's."""
    target, conversations, _, data, head = greedy_study
    decoded = decoded_answers(greedy_study, depth)
    for answer, conversation in zip(decoded, conversations, strict=True):
        assert tuple(answer.tokens) == conversation.answer_ids
    found = validate(head, view(target, data, data.train), depth, STEPS)
    assert found.tau > 1.2  # otherwise there was nothing to compare
    assert found.tau == pytest.approx(acceptance_length(decoded))
    produced = [n for answer in decoded for n in answer.produced]
    share = [sum(n > j for n in produced) for j in range(depth + 1)]
    expected = [b / a if a else None for a, b in itertools.pairwise(share)]
    assert found.acceptance == pytest.approx(expected)
    # The rates say what τ is.
    reached, tau = 1.0, 1.0
    for rate in found.acceptance:
        reached *= rate or 0.0
        tau += reached
    assert tau == pytest.approx(found.tau)
    assert len(found.agreement) == max(depth, STEPS) and len(found.acceptance) == depth


def test_answers_of_one_token_have_no_pass(target, tmp_path):
    conversations = [Conversation(str(i), "x", (5, 6, i), (11,)) for i in range(3, 6)]
    data = by_heart(target, tmp_path, conversations)
    found = validate(new_head(target, data), view(target, data, data.train), 2, STEPS)
    assert found.tau == 1.0 and found.acceptance == [None, None]
