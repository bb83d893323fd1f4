"""Training: the training-time test by hand, one-position gradients, resuming, stopping."""

from __future__ import annotations

import collections
import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file

from draftlayers import training
from draftlayers.corpus import Conversation, generate_answers
from draftlayers.head import (
    DraftHead,
    HeadConfig,
    fit_start,
    start_at_random,
    start_from_target,
)
from draftlayers.spec import UserError
from draftlayers.states import collect
from draftlayers.targets import tiny_target
from draftlayers.training import (
    Conversations,
    TrainingData,
    TrainingSettings,
    draft_vocabulary,
    soft_cross_entropy,
    train_head,
    training_time_test,
    truncation_error,
    ttt_loss,
    validate,
)
from tests.test_head import naive_entry, naive_logits, naive_state

LAYERS = (2, 4, 5)
STEPS = 3


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def answered(target, n, length, seed=0):
    """Conversations of random prompts and the target's greedy answers."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(3, target.vocab_size, (5 + i % 4,), generator=generator).tolist()
        for i in range(n)
    ]
    batches = generate_answers(target, prompts, length, [0.0] * n)
    answers = dict(pair for batch in batches for pair in batch)
    return [
        Conversation(str(i), "x", tuple(prompts[i]), tuple(answers[i][: length - i % 3]))
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def store(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("states")
    conversations = answered(target, 14, 12)
    return collect(target, conversations, [1, *LAYERS, 8], folder, predict="answer", top=64)


@pytest.fixture(scope="module")
def data(store):
    return TrainingData.split(store, validation=3, draft_vocab=60)


def settings(**changes) -> TrainingSettings:
    values = {"epochs": 3.0, "batch_tokens": 30, "learning_rate": 2e-3, "ttt_steps": STEPS}
    return TrainingSettings(**{**values, **changes})


def new_head(target, data, start="random", fc_norm=False, dtype=torch.float32) -> DraftHead:
    config = HeadConfig.for_target(target, LAYERS, len(data.vocabulary), fc_norm)
    head = DraftHead(config, target.model.get_input_embeddings().weight, data.vocabulary)
    if start == "random":
        start_at_random(head, seed=0)
        with torch.no_grad():
            for weight in head.parameters():
                weight.mul_(5 if weight.ndim > 1 else 1)
    else:
        start_from_target(head, target, seed=0)
    return head.to(dtype)


def view(target, data, part) -> Conversations:
    return Conversations(data.store, LAYERS, part, data.vocabulary, target.vocab_size)


def rows_of(store, sequence):
    return (store.meta["sequence"] == sequence).nonzero()[:, 0]


def naive_loss(head, store, sequence, vocabulary, steps):
    """The loss of one conversation, chain by chain and position by position, in float64."""
    rows = rows_of(store, sequence)
    token, answer = store.meta["token"][rows].long(), store.meta["answer"][rows]
    states = torch.cat([store.load(b, rows) for b in LAYERS], -1).double()
    top_ids, top_p = store.top_ids[rows].long(), store.top_logprobs[rows].double().exp()
    place = {int(t): i for i, t in enumerate(vocabulary)}
    fused, context = [], []
    for p in range(len(rows) - 1):
        hidden = head.fuse(states[p])
        fused.append(hidden)
        context.append(naive_entry(head, hidden, token[p + 1], p))
    losses: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    for p in range(len(rows) - 1):
        hidden = fused[p]
        keys, values = [c[1] for c in context[: p + 1]], [c[2] for c in context[: p + 1]]
        queries = context[p][0]
        for i in range(steps):
            if p + 1 + i >= len(rows):
                break
            if i:
                queries, key, value = naive_entry(head, hidden, token[p + 1 + i], p + i)
                keys, values = [*keys, key], [*values, value]
            hidden = naive_state(head, hidden, queries, keys, values)
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


@pytest.mark.parametrize("fc_norm", [False, True])
def test_loss_matches_chains_by_hand(target, data, fc_norm):
    head = new_head(target, data, fc_norm=fc_norm)
    conversations = view(target, data, data.train)
    chosen = [0, 3, 7]
    counts = conversations.trained_guesses(chosen, STEPS)
    loss, report = ttt_loss(head, conversations.batch(chosen, STEPS), counts)
    loss.backward()
    with torch.no_grad():
        reference = new_head(target, data, fc_norm=fc_norm, dtype=torch.float64)
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


def test_gradient_matches_finite_differences_of_the_loss(target, data):
    """Central differences of the batch loss along random directions, weight by weight."""
    head = new_head(target, data)
    conversations = view(target, data, data.train)
    batch, counts = conversations.batch([1, 2], STEPS), conversations.trained_guesses([1, 2], STEPS)
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
def test_training_steps_equal_decoding_steps(target, data):
    """A chain drafted with the head's cache passes through the states that training saw."""
    head = new_head(target, data)
    conversations = view(target, data, data.train)
    batch = conversations.batch([5], STEPS)
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
                out = head(out, token[None, p + 1 + i, None], torch.tensor([p + i]), cache)
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
    counts = mine.trained_guesses([0], STEPS)
    batch = mine.batch([0], STEPS)
    own, report = ttt_loss(head, batch, counts)
    own.backward()

    # speculators is given, at each index, the token and the target's final state one place on.
    ids = mine.token[None]
    with torch.no_grad(), target.capture([target.n_layers]) as states:
        target.model(input_ids=ids)
    _, loss, metrics = model(
        hidden_states=mine.states[None, :-1].float(),
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
        kl = report[i, 0] - entropies[batch.labels[i, batch.trained[i]]].mean()
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
    conversations = view(target, data, data.train)
    for steps in (1, 3):
        batch = conversations.batch([0], steps)
        assert batch.trained.sum(1).tolist() == [1] * steps
        # The token at place 5 is guessed by step i from index 3 - i, and from nowhere else.
        for i in range(steps):
            assert batch.active[batch.trained[i]].tolist() == [3 - i]
    batch = conversations.batch([0], 1)
    batch.states.requires_grad_()
    ttt_loss(head, batch, [1])[0].backward()
    assert batch.states.grad[4:].abs().sum() == 0
    assert batch.states.grad[3].abs().sum() > 0


def test_vocabulary_is_what_the_target_expects_most(store, data):
    ids = torch.tensor([[9, 4, 2], [4, 7, 9]])
    log_p = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()
    # In all 0.75 for 9 and 4, 0.25 for 7 and 2; of two that tie, the lower id goes in.
    assert draft_vocabulary(ids, log_p, 1).tolist() == [4]
    assert draft_vocabulary(ids, log_p, 3).tolist() == [2, 4, 9]
    assert draft_vocabulary(ids, log_p, 50).tolist() == [2, 4, 7, 9]
    expected: collections.Counter = collections.Counter()
    for sequence in data.train.tolist():
        for row in rows_of(store, sequence).tolist():
            if store.meta["answer"][row]:
                for token, log_p in zip(store.top_ids[row], store.top_logprobs[row], strict=True):
                    expected[int(token)] += float(log_p.double().exp())
    best = sorted(expected, key=lambda t: (-expected[t], t))[:60]
    assert data.vocabulary.tolist() == sorted(best)
    assert sorted([*data.train.tolist(), *data.validation.tolist()]) == list(range(14))


def test_truncation_error_against_dense_distributions():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, 40, generator=generator)
    vocabulary = torch.arange(0, 40, 2)
    found = truncation_error(logits, vocabulary, 8)
    rest, variation, changed = [], [], []
    for row in logits.double().softmax(-1):
        order = sorted(range(40), key=lambda t: -row[t])
        whole = {t: float(row[t]) for t in vocabulary.tolist()}
        inside = {t: p if t in order[:8] else 0.0 for t, p in whole.items()}
        rest.append(1 - sum(float(row[t]) for t in order[:8]))
        variation.append(
            sum(
                abs(whole[t] / sum(whole.values()) - inside[t] / sum(inside.values()))
                for t in whole
            )
            / 2
        )
        changed.append(max(whole, key=whole.get) != max(inside, key=inside.get))
    assert found["rest"] == pytest.approx(sum(rest) / 6)
    assert found["total_variation"] == pytest.approx(sum(variation) / 6)
    assert found["top_changed"] == pytest.approx(sum(changed) / 6)
    assert truncation_error(logits, vocabulary, 40)["total_variation"] == pytest.approx(0, abs=1e-9)


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


def test_every_conversation_once_an_epoch(target, data):
    conversations = view(target, data, data.train)
    plan = conversations.plan(30, seed=1)
    assert sorted(c for batch in plan for c in batch) == list(range(len(data.train)))
    assert plan == conversations.plan(30, seed=1) != conversations.plan(30, seed=2)


def greedy(target, ids):
    return int(target.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())


@torch.no_grad()
def test_tau_estimate_equals_decoding_of_greedy_answers(target, tmp_path):
    """Draft, verify and jump by hand with full recomputation; count tokens and passes."""
    conversations = answered(target, 6, 30, seed=4)
    store = collect(target, conversations, [*LAYERS, 8], tmp_path / "s", predict="answer", top=64)
    data = TrainingData(
        store, torch.arange(6), torch.arange(6), 1 + torch.arange(target.vocab_size - 1)
    )
    with torch.enable_grad():
        trained = train_head(
            data,
            LAYERS,
            target,
            settings(epochs=50.0, learning_rate=5e-3, depth=3),
            0,
            tmp_path / "h",
        )
    produced = passes = 0
    for conversation in conversations:
        ids = [*conversation.prompt_ids, conversation.answer_ids[0]]
        while len(ids) < len(conversation.tokens):
            with target.capture(LAYERS) as states:
                target.model(input_ids=torch.tensor([ids[:-1]]))
            hidden = torch.cat([states[b] for b in LAYERS], -1).bfloat16().float()
            cache = trained.head.new_cache(len(ids) + 3)
            n = len(ids) - 1
            out = trained.head(
                trained.head.fuse(hidden), torch.tensor([ids[1:]]), torch.arange(n), cache
            )[:, -1:]
            accepted = 0
            for i in range(min(3, len(conversation.tokens) - len(ids))):
                guess = int(trained.head.to_target(trained.head.logits(out).argmax(-1)))
                if guess != greedy(target, ids):
                    break
                ids.append(guess)
                accepted += 1
                out = trained.head(out, torch.tensor([[guess]]), torch.tensor([n + i]), cache)
            produced += accepted + 1
            passes += 1
            ids.append(greedy(target, ids))
    assert trained.best["tau"] > 1.3  # otherwise there was nothing to compare
    assert trained.best["tau"] == pytest.approx(produced / passes)


@pytest.mark.parametrize("start", ["target", "random"])
def test_two_conversations_are_learned_by_heart(target, tmp_path, start):
    conversations = answered(target, 2, 24, seed=2)
    store = collect(target, conversations, [*LAYERS, 8], tmp_path / "s", predict="answer", top=64)
    data = TrainingData(
        store, torch.arange(2), torch.arange(2), 1 + torch.arange(target.vocab_size - 1)
    )
    thorough = settings(epochs=150.0, batch_tokens=48, start=start, learning_rate=5e-3)
    trained = train_head(data, LAYERS, target, thorough, 0, tmp_path / "h")
    assert min(trained.best["agreement"][:STEPS]) > 0.9
    assert trained.best["tau"] > 3
    records = trained.history
    # The loss cannot fall below the entropy of its targets, which is large for a random model.
    assert records[-1]["train_loss"] < 0.9 * records[0]["train_loss"]


def same_head(a, b) -> bool:
    one, two = (load_file(folder / "model.safetensors") for folder in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_killed_training_resumes_to_the_same_numbers(target, data, tmp_path, monkeypatch):
    whole = train_head(data, LAYERS, target, settings(), 0, tmp_path / "whole")
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    plain_step = training.Trainer.step
    for last in (2, 7):

        def dying_step(self, last=last):
            if self.update == last:
                raise KeyboardInterrupt
            plain_step(self)

        monkeypatch.setattr(training.Trainer, "step", dying_step)
        with pytest.raises(KeyboardInterrupt):
            train_head(data, LAYERS, target, settings(), 0, tmp_path / "killed")
        assert not (tmp_path / "killed" / "training.json").exists()
    monkeypatch.setattr(training.Trainer, "step", plain_step)
    said: list[str] = []
    again = train_head(data, LAYERS, target, settings(), 0, tmp_path / "killed", said.append)
    assert said[0].startswith("continuing at update 7 of")
    assert again.history == whole.history
    assert same_head(tmp_path / "whole", tmp_path / "killed")
    assert {p.name for p in (tmp_path / "killed").iterdir()} == {
        "config.json", "model.safetensors", "training.json",
    }  # fmt: skip


def test_finished_head_is_loaded_and_another_is_not(target, data, tmp_path, monkeypatch):
    short = settings(epochs=1.0)
    first = train_head(data, LAYERS, target, short, 0, tmp_path)
    monkeypatch.setattr(training.Trainer, "run", lambda *args: pytest.fail("trained again"))
    again = train_head(data, LAYERS, target, short, 0, tmp_path)
    assert again.history == first.history
    monkeypatch.undo()
    other_seed = train_head(data, LAYERS, target, short, 1, tmp_path)
    assert other_seed.history != first.history
    fewer = replace(data, vocabulary=data.vocabulary[1:])
    assert len(train_head(fewer, LAYERS, target, short, 1, tmp_path).head.vocabulary) == 59


@pytest.mark.filterwarnings("error")
def test_mixed_precision_learns_the_same(target, data, monkeypatch):
    """bfloat16 products give about the gradient of float32, and exact states between layers."""
    conversations = view(target, data, data.train)
    batch, counts = conversations.batch([0, 1], STEPS), conversations.trained_guesses([0, 1], STEPS)
    gradients = []
    for mixed in (False, True):
        monkeypatch.setattr(training, "multiplies_bfloat16", lambda mixed=mixed: mixed)
        head = new_head(target, data, start="target")
        with training.autocast(head):
            loss, _ = ttt_loss(head, batch, counts)
            hidden = next(training.training_time_test(head, batch, STEPS))
            assert head.fc(batch.states).dtype == (torch.bfloat16 if mixed else torch.float32)
        assert hidden.dtype == torch.float32
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in head.parameters()]))
    cosine = torch.nn.functional.cosine_similarity(*gradients, dim=0)
    assert 0.99 < cosine < 1 - 1e-9
    assert gradients[1].dtype == torch.float32


def test_linear_start_is_the_ridge_solution(target, data):
    """fc and the self-attending heads together are the regression, solved here another way."""
    conversations = view(target, data, data.train)
    final = data.store.load(8, conversations.rows)
    states, tokens, wanted = conversations.first_guesses(final, 10**6)
    # Pairs by hand: index p and the row after it, where that row predicts an answer token.
    places = [
        f + p
        for f, n in zip(conversations.first, conversations.length, strict=True)
        for p in range(n - 1)
        if conversations.answer[f + p + 1]
    ]
    assert torch.equal(states, conversations.states[places])
    assert torch.equal(wanted, final[[p + 1 for p in places]])
    assert len(conversations.first_guesses(final, 20)[0]) == 20

    head = new_head(target, data, start="target")
    fit_start(head, states, tokens, wanted, seed=0, block=50)
    e = head.embedding[tokens].double()
    e = e / (e.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps).sqrt()
    x = torch.cat([states.double(), e], 1)
    scale = x.pow(2).mean(0).sqrt()
    # Ridge regression as plain least squares with rows for the penalty.
    penalty = (0.03 * len(x)) ** 0.5 * torch.eye(x.shape[1], dtype=torch.float64)
    rows = torch.cat([x / scale, penalty])
    y = torch.cat([wanted.double(), torch.zeros(len(penalty), 64, dtype=torch.float64)])
    solution = torch.linalg.lstsq(rows, y).solution / scale[:, None]
    a, b = solution[:-64], solution[-64:]
    torch.testing.assert_close(head.fc.weight.T.double(), a, rtol=1e-3, atol=1e-4)
    # One position alone attends to itself, so its attention is the embedding's linear map, cut to
    # rank 16: one key-value head of two.
    u, s, v = torch.linalg.svd(e @ b, full_matrices=False)
    best = (u[:, :16] * s[:16]) @ v[:16]
    mixed = head.midlayer.mix(head.embedding[tokens], head.fuse(states.float()))
    values = head.midlayer.self_attn.v_proj(mixed).unflatten(-1, (2, 16))
    out = (
        values[:, :1].repeat_interleave(2, 1).flatten(1)
        @ head.midlayer.self_attn.o_proj.weight[:, :32].T
    )
    torch.testing.assert_close(out.double(), best, rtol=1e-2, atol=1e-2)


def test_linear_start_attends_to_itself_and_learns_faster(target, data, tmp_path):
    conversations = view(target, data, data.train)
    final = data.store.load(8, conversations.rows)
    losses = {}
    for fitted in (False, True):
        head = new_head(target, data, start="target")
        if fitted:
            fit_start(head, *conversations.first_guesses(final, 10**6), seed=0)
        counts = conversations.trained_guesses(range(11), 1)
        with torch.no_grad():
            losses[fitted] = ttt_loss(head, conversations.batch(range(11), 1), counts)[0]
    assert losses[True] < losses[False]
    batch = conversations.batch([0], 1)
    mixed = head.midlayer.mix(head.embedding[batch.tokens], head.fuse(batch.states))
    head.ensure_positions(64)
    rotary = head.cos[batch.positions], head.sin[batch.positions]
    q = head.midlayer.self_attn.queries(mixed, rotary)[:, 0]
    k = head.midlayer.self_attn.keys_values(mixed, rotary)[0][:, 0]
    # Among different tokens every position prefers itself.
    scores = q @ k.T / 16**0.5
    other = batch.tokens[:, None] != batch.tokens
    assert (scores.diagonal()[:, None] > scores)[other].all()


def test_starts_and_frozen_output_matrix(target, data, tmp_path):
    frozen = settings(epochs=1.0, train_lm_head=False)
    head = train_head(data, LAYERS, target, frozen, 0, tmp_path / "a").head
    assert torch.equal(head.lm_head.weight, target.output_matrix.weight[data.vocabulary])
    assert not torch.equal(head.norm.weight, target.final_norm.weight)
    learned = train_head(data, LAYERS, target, settings(epochs=1.0), 0, tmp_path / "b").head
    assert not torch.equal(learned.lm_head.weight, target.output_matrix.weight[data.vocabulary])
    random = train_head(
        data, LAYERS, target, settings(epochs=1.0, start="random"), 0, tmp_path / "c"
    )
    assert random.history[0]["loss"] != pytest.approx(
        json.loads((tmp_path / "b" / "training.json").read_text())["history"][0]["loss"], rel=1e-3
    )


def test_training_stops_when_the_loss_is_not_finite(target, data, tmp_path, monkeypatch):
    plain = training.Conversations.batch

    def spoiled(self, chosen, steps):
        batch = plain(self, chosen, steps)
        batch.states[0] = float("nan")
        return batch

    monkeypatch.setattr(training.Conversations, "batch", spoiled)
    with pytest.raises(UserError, match=r"stopped at update 1 of \d+.*not finite.*learning_rate"):
        train_head(data, LAYERS, target, settings(), 0, tmp_path)
    assert not (tmp_path / "training.json").exists()


def test_missing_boundary_is_named(target, data, tmp_path):
    with pytest.raises(UserError, match=r"no states were collected at boundaries \[3\]"):
        train_head(data, (2, 3, 5), target, settings(), 0, tmp_path)


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


TWO_PROCESSES = """
import sys, torch
from pathlib import Path
from draftlayers import training
from draftlayers.states import StateStore
from draftlayers.targets import tiny_target
from draftlayers.training import TrainingData, TrainingSettings, train_head
training.multiplies_bfloat16 = lambda: False  # AdamW magnifies its rounding
store = StateStore(Path(sys.argv[1]))
data = TrainingData.split(store, validation=3, draft_vocab=60)
settings = TrainingSettings(epochs=1.0, batch_tokens=30, learning_rate=2e-3, ttt_steps=3)
train_head(data, (2, 4, 5), tiny_target(), settings, 0, Path(sys.argv[2]))
"""


def test_two_processes_train_the_same_head(target, data, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "multiplies_bfloat16", lambda: False)
    script = tmp_path / "train.py"
    script.write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(data.store.folder), str(tmp_path / "two")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    train_head(data, LAYERS, target, settings(epochs=1.0), 0, tmp_path / "one")
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)
