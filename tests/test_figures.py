"""Every figure draws what the chapters may give it; a saved call is drawn again as it was."""

from __future__ import annotations

import base64
import contextlib
import importlib
import inspect
import math
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat.v4 as v4
import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from draftlayers import current
from draftlayers.figures import (
    calls,
    cka,
    draft_head,
    drawing,
    entropy,
    filtering,
    hidden_states,
    selection,
    speedup,
    style,
)
from draftlayers.figures.calls import Call
from draftlayers.figures.drawing import draw, figure_of, redraw_stale
from draftlayers.project import UserError

RNG = np.random.default_rng(0)
DIAGRAMS = ("boundary_diagram", "head_diagram")


@dataclass
class Folder:
    """What drawing needs of a run."""

    folder: Path
    held: int = field(default=0)

    def path(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    @contextlib.contextmanager
    def hold(self):
        self.held += 1
        yield

    def files(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted(self.path("figures").iterdir())}


@pytest.fixture
def run(tmp_path) -> Folder:
    return Folder(tmp_path / "run")


# --- Every figure --------------------------------------------------------------------------------

NAN = math.nan
RATES = [0.6, 0.4, None]
HISTORY = [
    {"tokens": 1000 * n, "train_loss": 5.0 - n, "loss": None if n == 1 else 5.2 - n, "tau": 1 + n}
    for n in (1, 2, 3)
]


def curve(n: int) -> np.ndarray:
    return RNG.random(n + 1) + 0.5


def named(n: int) -> list[str]:
    return [f"head {i}" for i in range(n)]


def stability(n_shares: int, n: int, k: int) -> tuple:
    shares = np.linspace(0.1, 1.0, n_shares) if n_shares > 1 else np.array([1.0])
    chosen = [tuple(range(1, k + 1))] * (n_shares - 1) + [()]
    inclusion = RNG.random((n_shares, n + 1))
    return shares, RNG.random(n_shares), RNG.random(n_shares), inclusion, chosen, 0.5


def plane(sets: int, names: int) -> tuple:
    marked = {name: (0.5 + 0.01 * i, 0.2) for i, name in enumerate(named(names))}
    return RNG.random(sets), RNG.random(sets), {**marked, "same": (0.5, 0.2)}, [0.1, 0.2, 0.1]


def sized(n: int) -> list[tuple]:
    """Calls for a target of n layers."""
    return [
        (hidden_states.boundary_diagram, n, (2, n // 2, n - 3)),
        (hidden_states.layer_norms, curve(n), curve(n) / 2, 2 * curve(n), 9 * curve(n)),
        (hidden_states.sink_map, np.vstack([curve(23)] * n + [[0.0] * 12 + [NAN] * 12])),
        (entropy.layer_entropies, np.stack([curve(n)] * 5), named(5), 2, (2, n // 2, n - 3)),
        (entropy.spectrum_with_sinks, curve(n), np.append(curve(n - 1), NAN), -curve(n)),
        (filtering.stability_curve, *stability(10, n, 3)),
        (filtering.entropy_by_share, np.stack([curve(n)] * 3), np.array([0.1, 0.5, 1.0])),
        (cka.cka_maps, [RNG.random((n + 1, n + 1))] * 2, ["before", "after"]),
        (selection.inclusion_bars, curve(n) / 2, (1, 4), (2, n // 2, n - 3)),
    ]


def heads(n: int) -> list[tuple]:
    """Calls for n heads."""
    return [
        (draft_head.learning_curves, {name: HISTORY for name in named(n)}),
        (speedup.acceptance_rates, {name: RATES for name in named(n)}),
        (speedup.speedups, named(n), [1.2] * n, [1.1] * n, [1.4] * n, [1.9] * n),
        (speedup.speed_by_kind, ["code", "math"], {name: [1.3, None] for name in named(n)}, "τ"),
    ]


CALLS: list[tuple] = [
    *sized(7),
    *sized(80),
    *heads(1),
    *heads(9),
    *((hidden_states.boundary_diagram, 80, range(5, 5 * k + 5, 5)) for k in range(1, 9)),
    (entropy.layer_entropies, np.stack([curve(9)]), ["one"], -1),
    (entropy.agreement, np.array([[1, -0.3, NAN], [-0.3, 1, 0.9], [NAN, 0.9, 1]]), named(3)),
    (entropy.spectrum_with_sinks, *np.full((3, 8), NAN)),
    (filtering.predictive_entropies, RNG.random(200) ** 8, 0.2),
    (filtering.predictive_entropies, np.zeros(5), 0.0),
    (filtering.predictive_entropies, np.array([]), None),
    (filtering.stability_curve, *stability(1, 9, 1)),
    (filtering.stability_curve, *stability(3, 9, 8)),
    (cka.cka_maps, [np.full((9, 9), NAN)], ["one"]),
    (cka.bias_curve, [32, 64, 128], RNG.random((3, 6)), RNG.random((3, 6))),
    (cka.bias_curve, [32], np.full((1, 6), NAN), RNG.random((1, 6))),
    (cka.bias_curve, [], np.array([]), np.array([])),
    (selection.entropy_cka_plane, *plane(100, 12)),
    (selection.entropy_cka_plane, *plane(6000, 1)),
    (selection.entropy_cka_plane, np.array([0.5]), np.array([0.1]), {}, []),
    (selection.inclusion_bars, curve(5), (), ()),
    (selection.score_distribution, RNG.random(99), {"a": 0.2, "b": 0.2, "c": 0.9}, 99),
    (selection.score_distribution, np.full(3, 0.1), {}, 3),
    *((draft_head.head_diagram, tuple(range(2, 2 + k))) for k in range(1, 9)),
    (draft_head.attention_blocks, np.eye(4, 12, dtype=bool), 3),
    (draft_head.attention_blocks, np.eye(6, 48, dtype=bool), 8),
    (draft_head.learning_curves, {}),
    (speedup.pass_costs, range(1, 5), {name: [1.0, 2.0, 3.0, 4.0] for name in named(4)}),
    (speedup.acceptance_rates, {}),
    (speedup.speedups, ["one"], [0.8], [None], [NAN], [None]),
    (speedup.predicted_speedups, [1.0, 1.2, 0.9], [1.1, 1.2, 1.0], ["code", "math", "code"]),
    (speedup.predicted_speedups, [], [], []),
    (speedup.depth_sweep, [1, 2, 3], [1.1, 1.2, 1.2], [2.0, 3.0, 4.0], {3: 1.1, 1: 1.0}),
    (speedup.depth_sweep, range(1, 3), [1.1, 1.2], [2.0, 3.0], {}),
    (speedup.device_speedups, [1, 2], {name: [1.0, 1.1] for name in named(5)}),
]


@pytest.fixture(autouse=True)
def own_settings():
    with mpl.rc_context():
        style.use_style()
        yield


@pytest.mark.parametrize("call", CALLS, ids=[c[0].__name__ for c in CALLS])
def test_draws_without_a_warning_and_names_its_axes(call):
    function, *args = call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = function(*args)
        style.render(figure)
    labels = [axes.get_xlabel() for axes in figure.axes]
    sides = [axes.get_ylabel() for axes in figure.axes]
    if function.__name__ not in DIAGRAMS:
        assert any(labels) and (any(sides) or figure.get_supylabel() or axes_are_named(figure))
    assert plt.get_fignums() == []


def axes_are_named(figure) -> bool:
    """Rows that bear names need no label."""
    return any(label.get_text().isidentifier() or " " in label.get_text()
               for label in figure.axes[0].get_yticklabels())  # fmt: skip


def functions() -> set:
    modules = [importlib.import_module(f"draftlayers.figures.{name}") for name in calls.MODULES]
    return {
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def test_no_figure_is_left_out_here():
    assert {call[0] for call in CALLS} == functions()
    found = {p.stem for p in Path(style.__file__).parent.glob("*.py")}
    assert found == {*calls.MODULES, "__init__", "style", "calls", "drawing"}


def test_lines_that_coincide_share_a_label():
    marked = {"default rule": 0.5, "evenly spaced": 0.5001, "best set": 0.9}
    figure = selection.score_distribution(np.linspace(0, 1, 50), marked, 50)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["default rule, evenly spaced", "best set"]


def test_the_cut_is_drawn_when_there_is_one():
    values = np.linspace(0.1, 2, 50)
    with_cut = filtering.predictive_entropies(values, 0.5)
    without = filtering.predictive_entropies(values, None)
    for i in range(2):
        assert len(with_cut.axes[i].lines) == len(without.axes[i].lines) + 1


def test_each_of_many_heads_has_a_line():
    figure = speedup.acceptance_rates({name: RATES for name in named(12)})
    lines = figure.axes[0].lines
    assert len(lines) == 12
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 12


# --- Calls ---------------------------------------------------------------------------------------


def same(a, b) -> bool:
    """Equal in type and value, NaN included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        equal = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        return a.dtype == b.dtype and a.shape == b.shape and equal
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


VALUES = [
    None, True, 3, 10**30, 0.1, NAN, math.inf, "a | ü", "", [], (), {}, range(1, 9, 2),
    [1, (2.5, None, [NAN])], {1: "a", "1": "b", (2, 3): [4], None: {"deep": {0.5: ()}}},
    {"array": "no array"}, {"tuple": [1]}, np.float64(0.1), np.int64(3), np.bool_(True),
    np.float32(NAN), np.array([True, False]), np.array(2.0), np.zeros((0, 3)), np.arange(6)[::2],
    np.arange(6, dtype=np.uint8).reshape(2, 3).T, [np.ones(2, np.float16), {"x": np.ones((1, 1))}],
    {np.int64(1): np.arange(2)}, {"x": 1, "x (key)": np.ones(1), "x.0": np.zeros(1)},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_a_saved_value_is_read_as_it_was(value):
    call = Call.of(speedup.acceptance_rates, value)
    read, record = Call.read(call.packed({"said": 1}))
    assert record == {"said": 1}
    assert read.digest() == call.digest()
    assert same(read.bound().keywords["rates"], value)


def test_tensors_arrive_as_arrays():
    values = [torch.arange(3), torch.ones(2, dtype=torch.bfloat16, requires_grad=True)]
    read, _ = Call.read(Call.of(speedup.acceptance_rates, values).packed({}))
    assert same(read.bound().keywords["rates"], [np.arange(3), np.ones(2, np.float32)])


def test_the_digest_follows_every_part_of_a_call():
    different = [
        {"a": [1.0]},
        {"a": [1]},
        {"b": [1.0]},
        {"a": (1.0,)},
        {"a": np.ones(1)},
        {"a": np.ones(1, np.float32)},
        {"a": np.zeros(1)},
        {"a": np.ones((1, 1))},
    ]
    digests = {Call.of(speedup.acceptance_rates, value).digest() for value in different}
    digests.add(Call.of(draft_head.learning_curves, {"a": [1.0]}).digest())
    assert len(digests) == len(different) + 1


@pytest.mark.parametrize(
    ("value", "named_so"),
    [
        ({1, 2}, "argument rates is a set"),
        ({"a": [1, object()]}, r"argument rates\['a'\]\[1\] is a object"),
        ({"a": (x for x in [1])}, r"argument rates\['a'\] is a generator"),
        (np.array(["a"]), "argument rates is an array of <U1"),
        (np.array([1j]), "argument rates is an array of complex128"),
        (np.array([None]), "argument rates is an array of object"),
    ],
)
def test_what_cannot_be_saved_is_named(run, value, named_so):
    with pytest.raises(TypeError, match=f"^figure 06-rates: {named_so}"):
        draw(run, "06-rates", speedup.acceptance_rates, value)
    assert not run.folder.exists()


@pytest.mark.parametrize("function", [len, np.mean, style.subplots, test_tensors_arrive_as_arrays])
def test_only_functions_of_a_chapter_are_drawn(run, function):
    with pytest.raises(TypeError, match="is no function of a chapter's module"):
        draw(run, "06-rates", function, [1])


def test_a_call_that_does_not_fit_or_a_strange_name_is_refused(run):
    with pytest.raises(TypeError, match=r"06-rates: .*unexpected keyword"):
        draw(run, "06-rates", speedup.acceptance_rates, {}, colour="red")
    with pytest.raises(ValueError, match="names no figure"):
        draw(run, "../rates", speedup.acceptance_rates, {})


# --- Drawing -------------------------------------------------------------------------------------


def three(run: Folder) -> None:
    draw(run, "04-cka", cka.cka_maps, [np.eye(8)], ["one"])
    draw(run, "06-rates", speedup.acceptance_rates, {"a": [0.6, None]})
    draw(run, "07-passes", speedup.pass_costs, range(1, 3), {"a": [1.0, np.float64(2)]})


def test_a_drawing_is_a_picture_and_three_files(run):
    settings = {name: mpl.rcParams[name] for name in mpl.rcParams if name != "backend"}
    picture = draw(run, "06-rates", speedup.acceptance_rates, rates={"a": [0.6, None]})
    files = run.files()
    assert list(files) == ["06-rates.png", "06-rates.safetensors", "06-rates.svg"]
    assert picture.png == files["06-rates.png"] and picture.png.startswith(b"\x89PNG")
    assert b"<svg" in files["06-rates.svg"]
    assert run.held and plt.get_fignums() == []
    assert {name: mpl.rcParams[name] for name in settings} == settings


def test_drawn_twice_the_bytes_are_the_same_whatever_was_set(run, tmp_path):
    three(run)
    mpl.rcParams.update({"font.size": 30, "figure.dpi": 10, "svg.hashsalt": None})
    other = Folder(tmp_path / "other")
    three(other)
    assert run.files() == other.files()


def test_a_notebook_output_tells_its_figure(run):
    picture = draw(run, "06-rates", speedup.acceptance_rates, {"a": [0.6]})
    data, metadata = InteractiveShell.instance().display_formatter.format(picture)
    output = v4.new_output("execute_result", data, metadata=metadata, execution_count=1)
    assert output.data["text/plain"] == "figure 06-rates"
    assert base64.b64decode(output.data["image/png"]) == run.files()["06-rates.png"]
    assert figure_of(output) == "06-rates"
    assert figure_of(v4.new_output("display_data", {"text/plain": "figure 06-rates"})) is None
    assert figure_of(v4.new_output("stream", text="figure 06-rates")) is None


# --- Again ---------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    """A copy of the package that code digests are taken of."""
    copy = tmp_path / "draftlayers"
    shutil.copytree(current.SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(current, "SOURCE", copy)
    return copy


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_nothing_is_drawn_again_without_a_reason(run, source):
    assert not redraw_stale(run)
    three(run)
    edit(source / "figures" / "cka.py", "CKA of all pairs", "CKA of each pair")  # a docstring
    edit(source / "figures" / "filtering.py", "FLOOR = 1e-4", "FLOOR = 1e-5")
    before, run.held = run.files(), 0
    assert not redraw_stale(run)
    assert run.files() == before and run.held == 0


@pytest.mark.parametrize(
    ("module", "old", "new", "stale"),
    [
        ("cka", '"debiased CKA"', '"CKA"', ["04-cka"]),
        ("speedup", '"time of the pass (ms)"', '"time (ms)"', ["06-rates", "07-passes"]),
        ("style", '"#0072B2"', '"#0000FF"', ["04-cka", "06-rates", "07-passes"]),
    ],
)
def test_changed_code_draws_exactly_its_chapter_again(run, source, module, old, new, stale):
    three(run)
    edit(source / "figures" / f"{module}.py", old, new)
    before = run.files()
    assert redraw_stale(run, dry=True).drawn == stale
    assert run.files() == before
    assert redraw_stale(run).drawn == stale
    assert not redraw_stale(run)


def test_an_edit_while_a_chapter_runs_is_drawn_later(run, source):
    edit(source / "figures" / "cka.py", '"debiased CKA"', '"CKA"')
    three(run)  # with the modules as they were when this process began
    assert redraw_stale(run).drawn == ["04-cka"]


def test_a_new_library_draws_all_again(run, monkeypatch):
    three(run)
    monkeypatch.setattr(drawing, "version", lambda name: f"99 of {name}")
    assert redraw_stale(run).drawn == ["04-cka", "06-rates", "07-passes"]
    assert not redraw_stale(run)


@pytest.mark.parametrize("kind", ["svg", "png"])
@pytest.mark.parametrize("harm", ["missing", "truncated"])
def test_a_harmed_picture_is_drawn_again_as_it_was(run, kind, harm):
    three(run)
    before = run.files()
    path = run.path("figures", f"04-cka.{kind}")
    path.unlink() if harm == "missing" else path.write_bytes(path.read_bytes()[:-9])
    assert redraw_stale(run).drawn == ["04-cka"]
    assert run.files() == before


def test_what_cannot_be_drawn_again_is_told_and_left(run, monkeypatch):
    three(run)
    draw(run, "08-extra", cka.cka_maps, [np.eye(8)], ["one"])
    monkeypatch.delattr(cka, "cka_maps")
    monkeypatch.setattr(calls, "MODULES", tuple(m for m in calls.MODULES if m != "speedup"))
    path = run.path("figures", "07-passes.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    run.path("figures", "04-cka.png").unlink()
    before = run.files()
    found = redraw_stale(run)
    assert found and found.drawn == []
    assert {name: why.split(" ")[-3:] for name, why in found.lost.items() if name < "07"} == {
        "04-cka": ["cka_maps", "any", "more"],
        "06-rates": ["speedup", "any", "more"],
    }
    assert "cannot be read" in found.lost["07-passes"]
    assert found.chapters == ["04-cka", "06-draft-head", "07-speedup"]
    assert run.files() == before


def test_changed_arguments_are_told(run, monkeypatch):
    three(run)
    run.path("figures", "04-cka.png").unlink()

    def cka_maps(maps, titles):
        raise AssertionError

    cka_maps.__module__ = cka.__name__
    monkeypatch.setattr(cka, "cka_maps", cka_maps)
    assert "was changed: missing a required argument: 'maps'" in redraw_stale(run).lost["04-cka"]


def test_a_drawing_that_fails_says_what_to_mend(run, monkeypatch):
    three(run)
    run.path("figures", "06-rates.svg").unlink()
    monkeypatch.setattr(speedup, "numbers", lambda values: 1 / 0)
    with pytest.raises(UserError, match=r"06-rates .*ZeroDivisionError.*mend .*acceptance_rates"):
        redraw_stale(run)


def test_the_code_of_a_figure_is_its_module_and_the_style():
    assert len({current.code_digest(f"figures.{name}") for name in calls.MODULES}) == len(
        calls.MODULES
    )
    for name in calls.MODULES:
        module = current.SOURCE / "figures" / f"{name}.py"
        text = module.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if "draftlayers" in line and "import" in line]
        assert [line.split(" import")[0] for line in lines] == ["from draftlayers.figures.style"]
