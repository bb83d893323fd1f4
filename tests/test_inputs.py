"""Whatever is put in gives the right result or one clear sentence.

Parameters, prompt files, saved heads, and the scores that layers are chosen by.

Hypothesis draws the inputs, and the same ones each time.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from draftlayers import selection as sel
from draftlayers.head import DraftHead
from draftlayers.head_config import HeadConfig
from draftlayers.project import UserError
from draftlayers.prompts import Prompt, read_prompts
from draftlayers.spec import PROFILES, RunSpec
from draftlayers.start import start_at_random


def drawn(examples: int):
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def assert_said_well(error: UserError, lines: int = 1, longest: int = 1000) -> None:
    """Few lines for a person, without the words of the library that found the mistake."""
    said = str(error)
    assert said.strip() and len(said.splitlines()) <= lines, said
    assert max(map(len, said.splitlines())) <= longest, said
    for word in ("Traceback", "pydantic", "validation error", "type=", "For further information"):
        assert word not in said


# --- Parameters ----------------------------------------------------------------------------------

NAMES = sorted(set(RunSpec.model_fields) - {"model", "profile"})
NUMBERS = st.one_of(
    st.integers(), st.floats(), st.integers(-10, 2000), st.floats(0, 1), st.integers(10**20, 10**22)
).map(str)
WORDS = """
none None NULL null auto true True TRUE yes on off 0 1 nan NaN inf -inf Infinity 1e-300 1e400
-0 -1 +3 1_000 1,000 0x10 ٣ ² 3.0 3e0 softmax Softmax target random 2026-01-31 2026-02-30
2026-1-1 20260131 2026-W05-6 0001-01-01 {} [] '' =3 3=4 --
"""
LONG = ["9" * 5000, "x" * 10_000, "\udcff", "\u2028", "a\nb", "3\x00"]
TEXTS = st.one_of(NUMBERS, st.sampled_from([*WORDS.split(), *LONG]), st.text(max_size=20))


def parsed(pairs: list[str], profile: str = "quick") -> RunSpec:
    return RunSpec.make("tiny", profile, **RunSpec.parse_overrides(pairs))


@drawn(150)
@given(st.dictionaries(st.sampled_from(NAMES), TEXTS, min_size=1, max_size=3))
def test_any_text_of_a_parameter_is_read_or_refused_in_a_line_for_each(texts):
    try:
        spec = parsed([f"{name}={text}" for name, text in texts.items()])
    except UserError as err:
        assert_said_well(err, len(texts))
    else:
        stored = json.loads(json.dumps(spec.model_dump(), allow_nan=False))
        assert RunSpec.checked(stored) == spec
        assert RunSpec.make("tiny", "quick", **spec.overrides) == spec


@drawn(100)
@given(st.lists(st.one_of(st.text(max_size=30), st.text("ks=el rn", max_size=8)), max_size=3))
def test_any_words_for_parameters_are_read_or_refused(pairs):
    try:
        values = RunSpec.parse_overrides(pairs)
    except UserError as err:
        assert_said_well(err, max(1, len(pairs)))
    else:
        assert set(values) <= set(NAMES)


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@drawn(100)
@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, min_size=1, max_size=2))
def test_any_value_in_a_notebook_is_taken_or_refused(values):
    try:
        spec = RunSpec.make("tiny", "smoke", **values)
    except UserError as err:
        assert_said_well(err, len(values))
    else:
        assert RunSpec.checked(json.loads(json.dumps(spec.model_dump(), allow_nan=False))) == spec


@drawn(100)
@given(st.sampled_from(sorted(PROFILES)), st.data())
def test_what_a_parameter_says_of_itself_is_what_it_takes(profile, data):
    """The value of every parameter of a valid run, written as a person would, comes back."""
    spec = RunSpec.make("tiny", profile)
    names = data.draw(st.lists(st.sampled_from(NAMES), unique=True))
    case = data.draw(st.sampled_from([str, str.upper, str.title]))
    written = {n: getattr(spec, n) for n in names}
    pairs = [
        f" {n} = {case(str(v)) if v is None or isinstance(v, bool) else v} "
        for n, v in written.items()
    ]
    assert parsed(pairs, profile) == spec


# --- Prompts -------------------------------------------------------------------------------------

# Texts as people write them, and what programs trip over: separators that end no line in JSON.
TEXT = st.text(
    st.one_of(
        st.characters(codec="utf-8"), st.sampled_from('\u2028\u2029\u0085\ufeff\x00\x1c\r\n"\\')
    ),
    min_size=1,
    max_size=12,
).filter(str.strip)
TURNS = st.lists(TEXT, min_size=1, max_size=3)
LABEL = st.one_of(TEXT, st.integers())


@st.composite
def rows(draw) -> tuple[dict, Prompt]:
    """An object of one of the shapes, and the prompt that it stands for."""
    turns, identity, kind = draw(TURNS), draw(LABEL), draw(LABEL)
    prompt = Prompt(str(identity), str(kind), tuple(turns))
    shape = draw(st.sampled_from(["ours", "spec-bench", "sharegpt", "messages"]))
    if shape == "ours":
        return {"id": identity, "kind": kind, "turns": turns}, prompt
    if shape == "spec-bench":
        return {"question_id": identity, "category": kind, "turns": turns, "reference": []}, prompt
    who, what, user, other = {
        "sharegpt": ("from", "value", "human", "gpt"),
        "messages": ("role", "content", "user", "assistant"),
    }[shape]
    said = [{who: "system", what: ""}] if draw(st.booleans()) else []
    for turn in turns:
        said += [{who: user, what: turn}, {who: other, what: None}]
    key = "conversations" if shape == "sharegpt" else "messages"
    return {"id": identity, "kind": kind, key: said}, prompt


@st.composite
def files(draw) -> tuple[bytes, list[Prompt]]:
    """A prompt file in one of the ways that programs write it."""
    found = draw(st.lists(rows(), min_size=1, max_size=4, unique_by=lambda row: row[1].id))
    objects, ascii_only = [row for row, _ in found], draw(st.booleans())
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    if draw(st.booleans()):
        text = json.dumps(objects, ensure_ascii=ascii_only, indent=draw(st.sampled_from([None, 1])))
    else:
        text = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in objects)
    text = draw(st.sampled_from(["", "\n", " \n\n"])) + text + draw(st.sampled_from(["", "\n\n"]))
    mark = draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    return mark + text.replace("\n", end).encode(), [prompt for _, prompt in found]


def read(data: bytes) -> list[Prompt]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "p.jsonl")
        path.write_bytes(data)
        return read_prompts(path)


@drawn(100)
@given(files())
def test_prompt_files_of_all_shapes_are_read(file):
    data, prompts = file
    assert read(data) == prompts


@drawn(120)
@given(files(), st.data())
def test_a_damaged_prompt_file_is_refused_or_read_as_it_stands(file, data):
    whole, _ = file
    place = data.draw(st.integers(0, len(whole)))
    put = data.draw(
        st.sampled_from([b"", b"\x00", b"\xff", b"\xc3", b"\n", b'"', b"[", b"]", b"{", b",", b"1"])
    )
    cut = data.draw(st.sampled_from([0, 1, 5, len(whole)]))
    try:
        found = read(whole[:place] + put + whole[place + cut :])
    except UserError as err:
        assert_said_well(err)
        assert "line" in str(err) or "no prompts" in str(err)
    else:
        assert found and all(turn.strip() for prompt in found for turn in prompt.turns)
        assert len({prompt.id for prompt in found}) == len(found)


@drawn(100)
@given(st.one_of(st.binary(max_size=40), ANYTHING.map(lambda v: json.dumps(v).encode())))
def test_any_other_file_is_refused(data):
    with pytest.raises(UserError) as error:
        read(data)
    assert_said_well(error.value)


FIELDS = ("id", "kind", "question_id", "category", "turns", "conversations", "messages")


@drawn(120)
@given(rows(), st.sampled_from(FIELDS), ANYTHING)
def test_a_field_of_another_type_is_refused_or_read(row, field, value):
    values, _ = row
    try:
        (prompt,) = read(json.dumps({**values, field: value}).encode())
    except UserError as err:
        assert_said_well(err)
        assert "line 1: " in str(err)
    else:
        assert all(isinstance(part, str) and part.strip() for part in (prompt.id, *prompt.turns))


# --- Heads ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> tuple[dict, dict]:
    """Configuration and weights of a good head for the tiny target."""
    folder = tmp_path_factory.mktemp("head")
    config = HeadConfig.for_target(tiny, (2, 4, 5), 20)
    head = DraftHead(config, tiny.model.get_input_embeddings().weight, 3 + 7 * torch.arange(20))
    start_at_random(head, seed=0)
    head.save(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def load(target, config: bytes, weights: bytes, record: object = None) -> DraftHead | None:
    """The head of two files; None when it is refused, in one sentence."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(weights)
        if record is not None:
            (folder / "training.json").write_text(json.dumps(record))
        try:
            head = DraftHead.load(folder, target)
        except UserError as err:
            assert_said_well(err)
            return None
    check(head, target)
    return head


@torch.no_grad()
def check(head: DraftHead, target) -> None:
    """A head that was loaded can draft, and only tokens that the target has."""
    c = head.config
    assert head.vocabulary.min() >= 0 and head.vocabulary.max() < target.vocab_size
    assert torch.equal(head.t2d.nonzero()[:, 0], head.vocabulary)
    states = torch.randn(1, 3, c.k * c.d_model, generator=torch.Generator().manual_seed(0))
    out = head(head.fuse(states), torch.tensor([[1, 2, 3]]), torch.arange(3), head.new_cache(4))
    scores = head.logits(out)
    assert scores.shape == (1, 3, c.draft_vocab_size) and scores.isfinite().all()


SIZE = st.one_of(
    st.integers(-2, 130), st.sampled_from([10**4, 2**24, 2**40, 2**63, 10**30]), st.floats(-2, 70)
)
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "rope_theta", "factor", "short_factor", "partial_rotary_factor"]),
    st.one_of(
        ANYTHING, st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "longrope"])
    ),
)


@drawn(150)
@given(st.data())
def test_a_changed_configuration_is_refused_or_can_draft(tiny, saved, data):
    config, weights = saved
    name = data.draw(st.sampled_from([*sorted(config), "more"]))
    old = config.get(name)
    if data.draw(st.integers(0, 9)) == 0:
        changed = {key: value for key, value in config.items() if key != name}
    else:
        new = {"rope": ROPE, "layers": st.lists(SIZE, max_size=4)}.get(name, SIZE)
        changed = {**config, name: data.draw(st.one_of(new, ANYTHING))}
    head = load(tiny, json.dumps(changed).encode(), save(weights))
    # Sizes are fixed by the target or the weights, so nothing but the same value passes.
    free = {"target", "rope", "rms_norm_eps", "max_positions", "layers", "n_heads", "n_kv_heads"}
    if head is not None and name not in {*free, "head_dim", "more"}:
        assert changed[name] == old


@drawn(100)
@given(st.data())
def test_changed_weights_are_refused(tiny, saved, data):
    config, weights = saved
    name = data.draw(st.sampled_from(sorted(weights)))
    old = weights[name]
    flat = old.flatten()
    place = data.draw(st.integers(0, len(flat) - 1))
    if old.is_floating_point():
        kinds, bad = [torch.int8, torch.int32, torch.complex64], [float("nan"), float("inf")]
    else:  # another token, one that is out of range, ones that overflow
        kinds, last = [torch.int8, torch.uint8, torch.float64], int(flat[place])
        bad = [last + 1, last - 1, -(10**6), 10**6, 2**63 - 1, -(2**63)]
    if old.dtype == torch.bool:
        bad = [not flat[place]]
    value = flat.clone()
    value[place] = data.draw(st.sampled_from(bad))
    kind = data.draw(st.sampled_from(kinds))
    shapes = [old[1:], torch.cat((old, old[:1])), old[None], flat[0], flat[:0]]
    new = data.draw(st.sampled_from([None, *shapes, old.to(kind), *[value.view(old.shape)] * 3]))
    changed = {key: value for key, value in weights.items() if key != name}
    if new is not None:
        changed[name] = new.contiguous()
    assert load(tiny, json.dumps(config).encode(), save(changed)) is None


@drawn(100)
@given(
    st.lists(st.integers(-3, 520), min_size=20, max_size=20),
    st.sampled_from([None, 2**62, 2**63 - 1, -(2**63)]),
    st.integers(0, 19),
    st.booleans(),
)
def test_maps_of_other_vocabularies_are_refused_unless_they_fit(tiny, saved, ids, far, at, order):
    config, weights = saved
    chosen = torch.tensor(sorted(ids) if order else ids)
    if far is not None:
        chosen[at] = far
    t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
    t2d[chosen[(chosen >= 0) & (chosen < len(t2d))]] = True
    maps = {"d2t": chosen - torch.arange(20), "t2d": t2d}
    head = load(tiny, json.dumps(config).encode(), save({**weights, **maps}))
    fits = (chosen.diff() > 0).all() and chosen.min() >= 0 and chosen.max() < len(t2d)
    if far is not None or not fits:
        assert head is None
    elif head is not None:
        assert torch.equal(head.vocabulary, chosen)


def test_ids_so_far_apart_that_their_difference_overflows_are_refused(tiny, saved):
    config, weights = saved
    ids = torch.tensor([0, 2**63 - 1, -5, *range(3, 20)])
    assert (ids.diff() > 0).all() and 0 <= ids[0] < ids[-1] < 512  # as if in order and in range
    t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
    maps = {"d2t": ids - torch.arange(20), "t2d": t2d}
    assert load(tiny, json.dumps(config).encode(), save({**weights, **maps})) is None


@drawn(100)
@given(st.data())
def test_files_that_are_cut_or_overwritten_are_refused_or_can_draft(tiny, saved, data):
    config, weights = saved
    parts = {"config": json.dumps(config).encode(), "weights": save(weights)}
    which = data.draw(st.sampled_from(sorted(parts)))
    whole = parts[which]
    head = len(whole) if which == "config" else 2500  # the header is where a byte matters
    place = data.draw(st.integers(0, min(head, len(whole)) - 1))
    damage = data.draw(st.sampled_from(["cut", "byte", "drop", "junk"]))
    parts[which] = {
        "cut": whole[:place],
        "byte": whole[:place] + data.draw(st.binary(min_size=1, max_size=1)) + whole[place + 1 :],
        "drop": whole[:place] + whole[place + 1 :],
        "junk": data.draw(st.one_of(st.binary(max_size=30), st.sampled_from([b"null", b"[]"]))),
    }[damage]
    loaded = load(tiny, parts["config"], parts["weights"])
    if damage in ("cut", "junk"):
        assert loaded is None


@pytest.mark.parametrize("layers", [(1,), (3, 4), (1, 2, 3, 4), (0, 8)])
def test_a_head_of_another_number_of_layers_needs_weights_of_it(tiny, saved, layers):
    config, weights = saved
    changed = json.dumps({**config, "layers": layers}).encode()
    assert load(tiny, changed, save(weights)) is None
    width = config["d_model"]
    fitting = {**weights, "fc.weight": torch.ones(width, len(layers) * width)}
    assert load(tiny, changed, save(fitting)).config.layers == layers


def test_a_head_that_was_trained_on_other_weights_is_refused(tiny, saved):
    config, weights = json.dumps(saved[0]).encode(), save(saved[1])
    record = {"causes": {"target": tiny.digest}}
    assert load(tiny, config, weights, record) is not None
    assert load(tiny, config, weights, {"causes": {"target": "0" * 16}}) is None
    for other in ({}, {"causes": None}, {"causes": {}}, []):  # says nothing of the target
        assert load(tiny, config, weights, other) is not None


def test_a_head_of_sizes_beyond_all_memory_is_refused_without_taking_it(tiny, saved):
    config, weights = saved
    for name in ("intermediate_size", "n_heads", "n_kv_heads", "head_dim"):
        for size in (2**20, 2**24, 2**62):
            assert load(tiny, json.dumps({**config, name: size}).encode(), save(weights)) is None


def test_files_in_the_place_of_folders_and_folders_in_that_of_files(tiny, saved, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(saved[0]))
    (tmp_path / "model.safetensors").mkdir()
    for place in (tmp_path, tmp_path / "config.json", tmp_path / "none"):
        with pytest.raises(UserError, match="holds no draft head"):
            DraftHead.load(place, tiny)


# --- Selection -----------------------------------------------------------------------------------


@st.composite
def problems(draw) -> tuple[np.ndarray, np.ndarray, int]:
    """Entropies and CKA of a target of 7 to 20 layers, and k; with ties, zeros and copies."""
    n, k = draw(st.integers(7, 20)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = draw(st.sampled_from([2, 5, 10**6]))  # few values make ties
    entropy = np.round(generator.uniform(0, 1, n + 1) * steps) / steps
    cka = np.round(generator.uniform(draw(st.sampled_from([-0.2, 0.0, 0.9])), 1, (n + 1, n + 1)), 6)
    cka = np.round(cka * steps) / steps
    cka = np.triu(cka, 1) + np.triu(cka, 1).T + np.eye(n + 1)
    assume(entropy[1:n].max() > 0)
    if draw(st.booleans()):
        entropy *= draw(st.sampled_from([1e-12, 1e9]))
    return entropy, cka, k


def naive_score(layers, entropy, cka) -> float:
    largest = max((cka[a, b] for a, b in itertools.combinations(layers, 2)), default=0.0)
    return float(np.mean([entropy[b] for b in layers]) * (1 - largest))


@drawn(60)
@given(problems())
def test_exhaustive_search_equals_brute_force(problem):
    entropy, cka, k = problem
    found = sel.exhaustive(entropy, cka, k)
    scores = [
        naive_score(layers, entropy, cka)
        for layers in itertools.combinations(range(1, len(entropy) - 1), k)
    ]
    close = 1e-12 * max(1.0, float(entropy.max()))
    assert found.score == pytest.approx(max(scores), rel=1e-12, abs=close)
    assert naive_score(found.layers, entropy, cka) == pytest.approx(found.score, abs=close)
    top = [row["score"] for row in found.trace]
    assert np.allclose(top, sorted(scores, reverse=True)[: len(top)], rtol=1e-12, atol=close)


@drawn(60)
@given(problems(), st.data())
def test_ranks_are_consistent(problem, data):
    entropy, cka, k = problem
    layers = range(1, len(entropy) - 1)
    one, two = (tuple(sorted(data.draw(st.permutations(layers))[:k])) for _ in range(2))
    first, second = (sel.rank_of(s, entropy, cka) for s in (one, two))
    best = sel.rank_of(sel.exhaustive(entropy, cka, k).layers, entropy, cka)
    assert best.rank == 1
    for rank in (first, second):
        assert 1 <= rank.rank <= rank.total == best.total
        assert 0 <= rank.percentile < 100
        assert rank.rank - 1 + rank.percentile / 100 * rank.total <= rank.total - 1 + 1e-6
        assert rank.score <= best.score * (1 + 1e-12) or rank.score <= best.score + 1e-300
    if first.score > second.score * (1 + 1e-9) and first.score > 0:
        assert first.rank < second.rank


@drawn(60)
@given(problems(), st.floats(0.01, 1))
def test_every_rule_gives_layers_that_exist(problem, threshold):
    entropy, cka, k = problem
    n = len(entropy) - 1
    rules = sel.all_rules(entropy, cka, k, threshold)
    for name, found in rules.items():
        assert list(found.layers) == sorted(set(found.layers)), name
        assert found.layers and set(found.layers) <= set(range(1, n)), name
        assert found.score == pytest.approx(naive_score(found.layers, entropy, cka), rel=1e-9)
        short = name in ("greedy_threshold", "log_det", "beam")  # where CKA leaves no k layers
        assert len(found.layers) == (3 if name == "default" else k) or (short and found.note), name
    best = rules["exhaustive"].score
    same = [r.score for r in rules.values() if len(r.layers) == k]
    assert max(same) <= best + 1e-9 * abs(best)


@pytest.mark.parametrize(
    ("n_layers", "k"), [(n, k) for n in (*range(7, 21), 30, 61, 126) for k in range(1, min(n, 9))]
)
def test_spread_and_last_layers_exist_for_every_k(n_layers, k):
    assert len(sel.evenly_spaced(n_layers, k)) == len(sel.last_layers(n_layers, k)) == k
