"""What a run is: one typed description, and the folder that holds everything it makes.

Used by every chapter. A ``RunSpec`` travels unchanged from the command line to the notebooks;
a ``Run`` is that description together with its folder ``runs/<model>/<profile>/``. Nothing here
knows what a chapter computes.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PROJECT = Path(__file__).resolve().parents[2]
DATA = PROJECT / "data"
CHAPTERS = (
    "01-hidden-states",
    "02-entropy",
    "03-token-filtering",
    "04-cka",
    "05-selection",
    "06-draft-head",
    "07-speedup",
)
Profile = Literal["smoke", "quick", "full"]


class UserError(ValueError):
    """A request that cannot be served, explained in a sentence a person can act on."""


class RunSpec(BaseModel):
    """The typed description of a run; every field is a parameter of ``draftlayers run -p``.

    Fields that a profile changes have their values in ``PROFILES``; the others have the default
    given here. Build one with ``RunSpec.make``, which reports mistakes as ``UserError``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str = Field(min_length=1, description="target: a listed name, hub id, folder or GGUF")
    profile: Profile = Field("quick", description="how much work: smoke, quick or full")
    seed: int = Field(0, ge=0, description="seed of everything random")
    trust_remote_code: bool = Field(False, description="run model code that comes from the hub")

    train_conversations: int = Field(ge=2, description="conversations the heads learn from")
    validation_conversations: int = Field(ge=1, description="conversations that pick the epoch")
    generated_conversations: int = Field(
        ge=4, description="most conversations a target without shipped answers writes itself"
    )
    heldout_prompts: int = Field(ge=1, description="prompts decoded in the speed chapter")
    max_prompt_tokens: int = Field(ge=8, description="longer prompts are left out")
    answer_tokens: int = Field(ge=8, description="tokens the target may answer with")

    stat_tokens: int = Field(ge=64, description="positions collected at every boundary")
    entropy: Literal["logit_lens", "renyi2", "von_neumann", "coding_rate", "softmax"] = Field(
        "logit_lens", description="entropy definition that drives the selection"
    )
    lens_tokens: int = Field(ge=16, description="positions used for logit-lens entropies")
    keep: float | None = Field(
        None, gt=0, le=1, description="share of positions kept by the filter; null = automatic"
    )
    cka_threshold: float = Field(
        0.9, gt=0, le=1, description="CKA under which a layer counts as different (greedy rule)"
    )
    k: int = Field(3, ge=1, le=8, description="layers the draft head reads")
    bootstrap: int = Field(ge=10, description="bootstrap replicates over sequences")

    head_epochs: float = Field(gt=0, description="passes over the training answers")
    ttt_steps: int = Field(ge=1, le=8, description="steps of the training-time test")
    batch_tokens: int = Field(ge=32, description="tokens of a training batch")
    learning_rate: float = Field(gt=0, lt=1, description="peak learning rate of AdamW")
    draft_vocab: int = Field(ge=16, description="size of the draft vocabulary")
    fc_norm: bool = Field(False, description="a norm for each input layer of the head")
    head_start: Literal["target", "random"] = Field(
        "target", description="start the head from the target's last layer, or at random"
    )
    train_lm_head: bool = Field(True, description="train the head's output matrix")
    seeds: int = Field(ge=1, description="seeds for each main contender")

    depth: int = Field(5, ge=1, le=16, description="tokens guessed in a chain")
    decode_tokens: int = Field(ge=4, description="tokens decoded for each held-out prompt")
    speed_repeats: int = Field(ge=1, description="timed repeats of each method")

    @classmethod
    def make(cls, model: str, profile: str = "quick", **overrides: Any) -> RunSpec:
        """Build the spec of a profile with some fields replaced by typed values.

        Raises
        ------
        UserError
            When the profile or a field is unknown, or a value has the wrong type or range.
        """
        if profile not in PROFILES:
            raise UserError(f"unknown profile {profile!r}; the profiles are {', '.join(PROFILES)}")
        values = {"model": model, "profile": profile, **PROFILES[profile], **overrides}
        try:
            return cls.model_validate(values)
        except ValidationError as err:
            raise UserError(_explain(err)) from None

    @classmethod
    def parse_overrides(cls, pairs: list[str]) -> dict[str, Any]:
        """Turn ``["k=4", "keep=0.5"]`` into typed values, checked by name and type.

        Raises
        ------
        UserError
            When a pair has no ``=``, the name is unknown, or the value has the wrong type.
        """
        texts: dict[str, str] = {}
        for pair in pairs:
            name, sign, text = pair.partition("=")
            if not sign:
                raise UserError(f"parameter {pair!r} has no value; write it as name=value")
            if name in ("model", "profile"):
                raise UserError(f"set the {name} with --{name}, not with -p")
            texts[name.strip()] = text.strip()
        base = {"model": "any", **PROFILES["quick"]}
        strings = {name: str(value) for name, value in base.items() if name not in texts}
        nulls = {n for n, t in texts.items() if t.lower() in ("null", "none", "auto")}
        strings |= {name: text for name, text in texts.items() if name not in nulls}
        try:
            parsed = cls.model_validate_strings(strings)
            cls.model_validate({**base, **{name: None for name in nulls}})
        except ValidationError as err:
            raise UserError(_explain(err)) from None
        return {name: None if name in nulls else getattr(parsed, name) for name in texts}

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields that differ from the profile's defaults."""
        plain = RunSpec.make(self.model, self.profile).model_dump()
        return {name: value for name, value in self.model_dump().items() if value != plain[name]}


# What "smoke", "quick" and "full" mean. "quick" is sized for 15 minutes on two CPU cores.
PROFILES: dict[str, dict[str, Any]] = {
    "smoke": {
        "train_conversations": 24,
        "validation_conversations": 6,
        "generated_conversations": 30,
        "heldout_prompts": 7,
        "max_prompt_tokens": 480,
        "answer_tokens": 24,
        "stat_tokens": 1500,
        "lens_tokens": 256,
        "bootstrap": 50,
        "head_epochs": 1.0,
        "ttt_steps": 2,
        "batch_tokens": 2048,
        "learning_rate": 1e-3,
        "draft_vocab": 256,
        "seeds": 1,
        "decode_tokens": 16,
        "speed_repeats": 1,
    },
    "quick": {
        "train_conversations": 240,
        "validation_conversations": 21,
        "generated_conversations": 96,
        "heldout_prompts": 21,
        "max_prompt_tokens": 320,
        "answer_tokens": 128,
        "stat_tokens": 8000,
        "lens_tokens": 1024,
        "bootstrap": 200,
        "head_epochs": 3.0,
        "ttt_steps": 3,
        "batch_tokens": 256,
        "learning_rate": 1e-3,
        "draft_vocab": 4000,
        "seeds": 1,
        "decode_tokens": 48,
        "speed_repeats": 1,
    },
    "full": {
        "train_conversations": 3200,
        "validation_conversations": 70,
        "generated_conversations": 3270,
        "heldout_prompts": 84,
        "max_prompt_tokens": 320,
        "answer_tokens": 128,
        "stat_tokens": 32000,
        "lens_tokens": 4096,
        "bootstrap": 1000,
        "head_epochs": 3.0,
        "ttt_steps": 4,
        "batch_tokens": 256,
        "learning_rate": 1e-3,
        "draft_vocab": 8000,
        "seeds": 3,
        "decode_tokens": 96,
        "speed_repeats": 3,
    },
}


def _explain(err: ValidationError) -> str:
    """Say in words what pydantic found wrong."""
    lines = []
    for problem in err.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = ", ".join(sorted(set(RunSpec.model_fields) - {"model", "profile"}))
            lines.append(f"unknown parameter {name!r}; the parameters are {known}")
        else:
            lines.append(f"parameter {name!r}: {problem['msg']}, got {problem['input']!r}")
    return "\n".join(lines)


def slug(text: str) -> str:
    """A folder name for a model name, path or hub id: its last part, plain characters only."""
    last = re.split(r"[/\\]", text.rstrip("/\\"))[-1] if Path(text).exists() else text
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.").lower() or "model"


def fingerprint(*parts: Any) -> str:
    """Twelve hexadecimal digits that change when any part (JSON-serialisable) changes."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or nothing: a killed process leaves the old file in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as f:
        f.write(data)
    # NamedTemporaryFile makes private files; a run folder is meant to be read by others.
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)


def _plain(value: Any, where: str) -> Any:
    """Turn a result into plain JSON values; refuse what JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"result {where} is {value}; write null where a number does not exist")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise TypeError(f"result {where} is a {type(value).__name__}, which JSON cannot hold")


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"python": platform.python_version()}
    for name in ("draftlayers", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def device_name() -> str:
    """The device that torch would compute on, in words."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux; platform's name is all there is
    return f"{name}, {torch.get_num_threads()} threads"


def multiplies_bfloat16() -> bool:
    """Whether this processor has bfloat16 products of its own (AVX512-BF16 or AMX)."""
    import torch

    # Older releases of torch do not tell.
    tell = getattr(torch.cpu, "get_capabilities", dict)
    return any(tell().get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def run_folder(spec: RunSpec, root: Path | None = None) -> Path:
    """Where a run lives, whether it exists or not; see ``Run``."""
    root = root or Path(os.environ.get("DRAFTLAYERS_RUNS", PROJECT / "runs"))
    return root.resolve() / slug(spec.model) / spec.profile


class Run:
    """A spec and its folder ``<root>/<model>/<profile>/``.

    Parameters
    ----------
    spec
        What to run.
    root
        Folder of all runs; default the environment variable ``DRAFTLAYERS_RUNS``, else
        ``runs/`` in the project.

    Raises
    ------
    UserError
        When the run folder cannot be made or written.
    """

    def __init__(self, spec: RunSpec, root: Path | None = None):
        self.spec = spec
        self.folder = run_folder(spec, root)
        self._opened = time.monotonic()
        try:
            text = json.dumps(spec.model_dump(), indent=1) + "\n"
            stored = self.folder / "spec.json"
            if not stored.exists() or stored.read_text() != text:
                write_atomically(stored, text.encode())
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as err:
            raise UserError(
                f"the run folder {self.folder} cannot be written ({err.strerror or err}); "
                "choose another one with --runs or the variable DRAFTLAYERS_RUNS"
            ) from None

    def say(self, text: str) -> None:
        """Report progress: to the terminal that runs the chapters, else to standard output.

        Executed by papermill, a chapter's own output becomes part of the book, so progress takes
        another way: lines in the file that ``DRAFTLAYERS_PROGRESS`` names.
        """
        if to := os.environ.get("DRAFTLAYERS_PROGRESS"):
            with open(to, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        else:
            print(text, flush=True)

    def path(self, *parts: str) -> Path:
        """A path inside the run folder; its parent folder exists afterwards."""
        path = self.folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def results(self, chapter: str) -> dict[str, Any]:
        """The numbers a chapter wrote.

        Raises
        ------
        UserError
            When the chapter has not been run.
        """
        path = self.folder / "results" / f"{chapter}.json"
        if not path.exists():
            raise UserError(
                f"chapter {chapter} has no results in {self.folder} yet; run it first, for example "
                f"with: draftlayers run --model {self.spec.model} --profile {self.spec.profile}"
            )
        return json.loads(path.read_text())

    def write_results(self, chapter: str, results: Mapping[str, Any]) -> None:
        """Write a chapter's numbers as ``results/<chapter>.json``, with where they come from."""
        record = {
            **_plain(results, chapter),
            "_run": {
                "model": self.spec.model,
                "profile": self.spec.profile,
                "device": device_name(),
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "versions": versions(),
                "seconds": round(time.monotonic() - self._opened, 1),
            },
        }
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self.path("results", f"{chapter}.json"), text.encode())

    def arrays(self, chapter: str) -> dict[str, Any]:
        """The tensors a chapter wrote with ``write_arrays``."""
        from safetensors.torch import load_file

        return load_file(self.folder / "results" / f"{chapter}.safetensors")

    def write_arrays(self, chapter: str, arrays: Mapping[str, Any]) -> None:
        """Write a chapter's tensors as ``results/<chapter>.safetensors``."""
        from safetensors.torch import save

        tensors = {name: array.contiguous() for name, array in arrays.items()}
        write_atomically(self.path("results", f"{chapter}.safetensors"), save(tensors))

    def save_figure(self, figure: Any, name: str) -> None:
        """Write a figure as ``figures/<name>.svg`` and ``.png``, the same bytes every time.

        The figure is closed for pyplot, so that a notebook shows it only where it is displayed.
        """
        import matplotlib
        import matplotlib.pyplot as plt

        for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            path = self.path("figures", f".{name}.partial.{kind}")
            with matplotlib.rc_context({"svg.hashsalt": "draftlayers"}):
                figure.savefig(path, format=kind, metadata=metadata)
            os.replace(path, self.path("figures", f"{name}.{kind}"))
        plt.close(figure)
