"""What a run is: one typed description, unchanged from the command line to the notebooks.

Used by every chapter. ``RunSpec`` has every parameter, and ``PROFILES`` what the profiles make of
them. Where a run keeps what it makes is left to ``runs``; nothing here knows what a chapter
computes.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.functional_validators import AfterValidator

from draftlayers.project import UserError
from draftlayers.weights import absolute

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
FEWEST_ROWS = 64  # statistics of fewer positions are refused
Count = Annotated[int, Field(le=10**9)]  # more is a slip of the keyboard


def _date(text: str) -> str:
    """A date of the calendar as yyyy-mm-dd, and as nothing else."""
    with contextlib.suppress(ValueError):
        if datetime.date.fromisoformat(text).isoformat() == text:
            return text
    raise ValueError("should be a date of the calendar as yyyy-mm-dd")


def _file(text: str) -> str:
    """A path is meant from where it is typed; chapters run elsewhere."""
    return str(Path(text).expanduser().absolute())


class RunSpec(BaseModel):
    """The typed description of a run; every field is a parameter of ``draftlayers run -p``.

    Fields that a profile changes have their values in ``PROFILES``; the others have the default
    given here. Build one with ``RunSpec.make``, which reports mistakes as ``UserError``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str = Field(min_length=1, description="target: a listed name, hub id, folder or GGUF")
    profile: Profile = Field("quick", description="how much work: smoke, quick or full")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of everything random")
    day: Annotated[str, AfterValidator(_date)] | None = Field(
        None, description="date that chat templates print; null = the day on which the run began"
    )
    trust_remote_code: bool = Field(False, description="run model code that comes from the hub")

    prompts: Annotated[str, AfterValidator(_file)] | None = Field(
        None, min_length=1, description="file of your own training prompts; null = those of data/"
    )
    train_conversations: Count = Field(ge=2, description="conversations the heads learn from")
    validation_conversations: Count = Field(ge=1, description="conversations that pick the epoch")
    heldout_prompts: Count = Field(ge=1, description="prompts decoded in the speed chapter")
    max_prompt_tokens: Count = Field(ge=8, description="longer prompts are left out")
    answer_tokens: Count = Field(ge=8, description="tokens the target may answer with")

    stat_tokens: Count = Field(ge=FEWEST_ROWS, description="positions collected at every boundary")
    entropy: Literal["logit_lens", "renyi2", "von_neumann", "coding_rate", "softmax"] = Field(
        "logit_lens", description="entropy definition that drives the selection"
    )
    lens_tokens: Count = Field(ge=16, description="positions used for logit-lens entropies")
    keep: float | None = Field(
        None, gt=0, le=1, description="share of positions kept by the filter; null = automatic"
    )
    cka_threshold: float = Field(
        0.9, gt=0, le=1, description="CKA under which a layer counts as different (greedy rule)"
    )
    k: int = Field(3, ge=1, le=8, description="layers the draft head reads")
    bootstrap: int = Field(ge=10, le=10**5, description="bootstrap replicates over sequences")

    head_epochs: float = Field(ge=0.001, le=1000, description="passes over the training answers")
    ttt_steps: int = Field(ge=1, le=8, description="steps of the training-time test")
    batch_tokens: Count = Field(ge=32, description="tokens of a training batch")
    learning_rate: float = Field(ge=1e-9, lt=1, description="peak learning rate of AdamW")
    draft_vocab: Count = Field(ge=16, description="size of the draft vocabulary")
    fc_norm: bool = Field(False, description="a norm for each input layer of the head")
    head_start: Literal["target", "random"] = Field(
        "target", description="start the head from the target's last layer, or at random"
    )
    train_lm_head: bool = Field(False, description="train the output matrix, or keep the target's")
    seeds: int = Field(ge=1, le=1000, description="seeds for each main contender")

    depth: int = Field(5, ge=1, le=16, description="tokens guessed in a chain")
    decode_tokens: Count = Field(ge=4, description="tokens decoded for each held-out prompt")
    speed_repeats: Count = Field(ge=1, description="timed repeats of each method")

    @classmethod
    def make(cls, model: str, profile: str = "quick", **overrides: Any) -> RunSpec:
        """Build the spec of a profile with some typed values replaced.

        Raises
        ------
        UserError
            When there is no such profile; and as ``checked`` does.
        """
        if profile not in PROFILES:
            raise UserError(f"unknown profile {profile!r}; the profiles are {', '.join(PROFILES)}")
        # A path is meant from where it is typed; chapters run elsewhere. No name is no path.
        place = absolute(model) if model.strip() else ""
        return cls.checked({"model": place, "profile": profile, **PROFILES[profile], **overrides})

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> RunSpec:
        """Build the spec of all its values, checked each by itself and together.

        Raises
        ------
        UserError
            When a field is unknown, a value has the wrong type or range, or two contradict.
        """
        try:
            spec = cls.model_validate(dict(values))
        except ValidationError as err:
            raise UserError(_explain(err)) from None
        rows = FEWEST_ROWS if spec.keep is None else round(spec.keep * spec.stat_tokens)
        if rows < FEWEST_ROWS:
            raise UserError(
                f"parameter 'keep': {spec.keep:g} of {spec.stat_tokens} positions are {rows}, and "
                f"statistics need at least {FEWEST_ROWS}; raise keep or stat_tokens (in select: "
                "--tokens)"
            )
        train, validation = spec.train_conversations, spec.validation_conversations
        if validation > train:
            raise UserError(
                f"validation_conversations={validation} exceeds train_conversations={train}; "
                "lower the one or raise the other"
            )
        return spec

    @classmethod
    def parse_overrides(cls, pairs: list[str]) -> dict[str, Any]:
        """Turn ``["k=4", "keep=0.5"]`` into typed values, checked by name and type.

        The last of several values for one name counts. Where null is allowed, ``none`` and
        ``auto`` mean it, too. Whether the values go together is checked by ``make``.

        Raises
        ------
        UserError
            When a pair has no name or value, the name is unknown, or the value has the wrong type.
        """
        texts: dict[str, str] = {}
        for pair in pairs:
            name, _, text = (part.strip() for part in pair.partition("="))
            if name in ("model", "profile"):
                raise UserError(
                    f"the {name} cannot be set with -p; --help says where a command takes it, if "
                    "it does"
                )
            if name and name not in cls.model_fields:
                raise UserError(_unknown(name))
            if not (name and text):
                lack = "value" if name else "name"
                raise UserError(f"parameter {_shown(pair)} has no {lack}; write it as name=value")
            texts[name] = text
        nulls = {
            name
            for name, text in texts.items()
            if cls.model_fields[name].default is None and text.lower() in ("null", "none", "auto")
        }
        base = {"model": "any", **{name: str(value) for name, value in PROFILES["quick"].items()}}
        strings = {name: text for name, text in (base | texts).items() if name not in nulls}
        try:
            parsed = cls.model_validate_strings(strings)
        except ValidationError as err:
            raise UserError(_explain(err)) from None
        return {name: getattr(parsed, name) for name in texts}

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields that differ from the profile's defaults."""
        values = self.model_dump()
        plain = RunSpec.make(values["model"], values["profile"]).model_dump()
        return {name: value for name, value in values.items() if value != plain[name]}


# What "smoke", "quick" and "full" mean. "quick" is sized for 15 minutes on two CPU cores.
_SIZES: dict[str, tuple[float, float, float]] = {
    "train_conversations": (24, 240, 24300),
    "validation_conversations": (6, 21, 84),
    "heldout_prompts": (7, 21, 84),
    "max_prompt_tokens": (480, 320, 320),
    "answer_tokens": (24, 128, 128),
    "stat_tokens": (1500, 8000, 32000),
    "lens_tokens": (256, 1024, 4096),
    "bootstrap": (50, 200, 1000),
    "head_epochs": (1.0, 3.0, 2.0),
    "ttt_steps": (2, 3, 4),
    "batch_tokens": (2048, 256, 256),
    "learning_rate": (1e-3, 1e-3, 1e-3),
    "draft_vocab": (256, 4000, 8000),
    "seeds": (1, 1, 3),
    "decode_tokens": (16, 48, 96),
    "speed_repeats": (1, 1, 3),
}
PROFILES: dict[str, dict[str, Any]] = {
    profile: {name: sizes[place] for name, sizes in _SIZES.items()}
    for place, profile in enumerate(get_args(Profile))
}


def _explain(err: ValidationError) -> str:
    """Say in words what pydantic found wrong, in one line for each parameter."""
    lines = {}
    for problem in err.errors():
        name, said = str(problem["loc"][0]), problem.get("ctx", {}).get("error") or problem["msg"]
        said = str(said).removeprefix("Input ").removeprefix("String ")
        wrong = f"parameter {_shown(name)}: {said}, got {_shown(problem['input'])}"
        lines[name] = _unknown(name) if problem["type"] == "extra_forbidden" else wrong
    return "\n".join(lines.values())


def _unknown(name: str) -> str:
    known = sorted(set(RunSpec.model_fields) - {"model", "profile"})
    near = difflib.get_close_matches(name[:40], known, n=1)
    hint = f"did you mean {near[0]!r}? The" if near else "the"
    return f"unknown parameter {_shown(name)}; {hint} parameters are {', '.join(known)}"


def _shown(value: Any) -> str:
    """A value as a person typed it, on one line and not longer than can be read."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    try:
        return " ".join(short.repr(value).split())
    except ValueError:  # Python writes no number of more than some thousand digits
        return "a number of thousands of digits"
