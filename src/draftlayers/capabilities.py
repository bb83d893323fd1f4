"""What a target can do here, and why not: one table, filled before any work starts.

Used by the command line and by the jobs of a run, which refuse by name and reason what would only
fail in a later chapter. ``check`` reads a model's configuration and tokenizer and loads no weights;
``check_target`` completes the table with what only an open target shows, by trying it. How each of
these things is done belongs to ``targets``, ``writing``, ``head`` and ``engine``.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftlayers.chat import Chat
from draftlayers.checkpoints import read_config
from draftlayers.contexts import context_of, own_windows, turning_points
from draftlayers.engine import REACH, Engine, decodable
from draftlayers.head_config import HeadConfig, rotary_tables
from draftlayers.project import Say, UserError, quiet
from draftlayers.selection import default_rule
from draftlayers.targets import Target, tiny_target
from draftlayers.weights import absolute, fetch, find_weights
from draftlayers.writing import Request, Writer

ABILITIES = {
    "write": "write answers (draftlayers answer)",
    "select": "choose layers (chapters 1 to 5)",
    "train": "train draft heads (chapter 6)",
    "decode": "decode speculatively (chapter 7)",
    "trees": "verify drafts that are trees",
}
SMALLEST_VOCABULARY = 8  # tokens, so that there is something to be uncertain about
# Generation settings that change greedy decoding, and the value at which they change nothing.
GENERATION = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "guidance_scale": 1.0,
    "num_beams": 1, "num_beam_groups": 1, "min_length": 0, "min_new_tokens": 0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "penalty_alpha": 0,
    "diversity_penalty": 0.0, "suppress_tokens": [], "begin_suppress_tokens": [],
    "bad_words_ids": [], "sequence_bias": {}, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "watermarking_config": None, "dola_layers": None, "stop_strings": None,
}  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_STREAMS = ("altup_num_inputs", "hc_mult")  # residual streams that run beside each other
_OTHER_HEAD = re.compile(r"For(?!CausalLM|ConditionalGeneration)\w+$")


@dataclass(frozen=True)
class Capabilities:
    """What can be done with one target.

    Attributes
    ----------
    name
        What the user called it.
    n_layers, context_limit
        Decoder layers, and the longest sequence in tokens.
    write, select, train, decode, trees
        None where it can be done, else the reason why not, as a sentence without a full stop.
    notes
        What a person should know all the same.
    """

    name: str
    n_layers: int
    context_limit: int
    write: str | None = None
    select: str | None = None
    train: str | None = None
    decode: str | None = None
    trees: str | None = None
    notes: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str, str]]:
        """The table: what, ``"yes"`` or ``"no"``, and why not; notes come last."""
        table = [
            (title, "no" if (why := getattr(self, ability)) else "yes", why or "")
            for ability, title in ABILITIES.items()
        ]
        return table + [("note", "", note) for note in self.notes]

    def require(self, *abilities: str) -> None:
        """Refuse what this target cannot do.

        Raises
        ------
        UserError
            Names the first of the abilities that is missing, and the reason.
        """
        for ability in abilities:
            if why := getattr(self, ability):
                raise UserError(f"{self.name} cannot be used to {ABILITIES[ability]}: {why}")

    def require_room(self, prompt: int, answer: int) -> None:
        """Refuse prompts and answers that together are longer than the model's context.

        Parameters
        ----------
        prompt, answer
            Their largest numbers of tokens.

        Raises
        ------
        UserError
            When they do not fit.
        """
        if prompt + answer > self.context_limit:
            raise UserError(
                f"{self.name} was made for sequences of {self.context_limit} tokens; prompts of "
                f"{prompt} and answers of {answer} need {prompt + answer}: lower "
                "max_prompt_tokens or answer_tokens"
            )


def check(name: str, trust_remote_code: bool = False, say: Say = quiet) -> Capabilities:
    """What a target can do, as far as its files tell without its weights.

    Raises
    ------
    UserError
        When there is no such model, or its files cannot be read.
    """
    from transformers import GenerationConfig

    weights = find_weights(absolute(name))
    if weights.kind == "tiny":
        target = tiny_target()
        return capabilities_of(target.model.config, target.tokenizer, name=name)
    where: dict[str, Any] = fetch(weights, say)
    config, tokenizer = read_config(where, name, trust_remote_code)
    try:
        place = where.pop("pretrained_model_name_or_path")
        generation = GenerationConfig.from_pretrained(place, **where)
    except (OSError, ValueError):  # many models have none
        generation = None
    return capabilities_of(config, tokenizer, generation, name)


def check_target(target: Target) -> Capabilities:
    """What an open target can do: the same table, completed by trying.

    It writes two short answers, makes the settings of a head, and starts an engine.
    """
    found = capabilities_of(
        target.model.config, target.tokenizer, target.model.generation_config, target.name
    )
    train, decode, trees, notes = found.train, found.decode, found.trees, list(found.notes)
    wrong = _wrong_answers(target)
    write, select = found.write or wrong, found.select or wrong
    train = train or _without_head(target)
    if decode is None:
        try:
            engine = Engine(target, packed=False)
        except UserError as err:
            decode = trees = str(err).removeprefix(f"{target.name}: ")
        else:
            trees = _plain(engine.check_trees, target.name)
            if engine.limit < target.context_limit:
                notes.append(f"decoding ends at {engine.bound}")
    return replace(
        found,
        write=write,
        select=select,
        train=train,
        decode=decode,
        trees=trees,
        notes=tuple(notes),
    )


def capabilities_of(
    config: Any, tokenizer: Any, generation: Any = None, name: str = "the model"
) -> Capabilities:
    """The table of a configuration, a tokenizer and generation settings.

    Parameters
    ----------
    config, generation
        Of transformers: the model's configuration, and its ``GenerationConfig`` if it has one.
    tokenizer
        A Hugging Face tokenizer.
    name
        What the user called the model.
    """
    if why := _unreadable(config):
        return Capabilities(name, 0, 0, why, why, why, why, why)
    text = config.get_text_config()
    chat = Chat(tokenizer, datetime.date.today().isoformat())
    notes = list(_notes(text, tokenizer, generation))
    prompts = _plain(lambda: notes.extend(chat.notes()), name)
    n_layers = text.num_hidden_layers
    few = _plain(lambda: default_rule(n_layers), name)
    decode, write = decodable(config), prompts
    if decode and setting(text, "num_attention_heads", "num_heads") is None:
        write = write or (
            "it has no attention but a state that each token changes, and answers written here, "
            "many at a time, would not be its own"
        )
    select = write or few or _small(text)  # layers are chosen by answers of the target's own
    return Capabilities(
        name,
        n_layers,
        context_of(text, tokenizer),
        write=write,
        select=select,
        train=select or _narrow(text),
        decode=decode,
        trees=decode or _own_masks(text),
        notes=tuple(notes),
    )


def setting(config: Any, *names: str) -> Any:
    """The first of some settings that a configuration has, and has for all layers alike."""
    for name in names:
        try:
            if (found := getattr(config, name, None)) is not None:
                return found
        except RuntimeError:  # transformers' word for one that differs from layer to layer
            continue
    return None


# --- What the configuration tells ---------------------------------------------------------------


def _unreadable(config: Any) -> str | None:
    """Why nothing at all can be done, or None."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type or type(config).__name__
    expected = "expected a causal language model, which is a decoder alone"
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind} is an encoder with a decoder; {expected}"
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not remote:
        return f"transformers knows no causal language model of type {kind}; {expected}"
    made = getattr(config, "architectures", None) or []
    if made and all(map(_OTHER_HEAD.search, made)):
        return f"the checkpoint is a {made[0]}; {expected}"
    try:
        text = config.get_text_config()
    except ValueError:
        return f"{kind} holds several language models, so it is not clear which one is meant"
    for part in (config, text):
        if how := getattr(part, "quantization_config", None):
            how = how if isinstance(how, dict) else how.to_dict()
            method = how.get("quant_method") or "a method without a name"
            method = getattr(method, "value", method)
            return (
                f"its weights are quantised ({method}), and only plain ones are read here; give "
                "the model they were made from, or a GGUF file of it"
            )
    for name, what in (("num_hidden_layers", "decoder layers"), ("hidden_size", "numbers a state")):
        if not isinstance(setting(text, name), int):
            return f"its configuration does not say how many {what} it has ({name})"
    for name in _STREAMS:
        if (streams := setting(text, name) or 1) > 1:
            return (
                f"{kind} carries {streams} residual streams ({name}); expected one state for each "
                "token and layer"
            )
    return None


def _small(text: Any) -> str | None:
    size = setting(text, "vocab_size") or SMALLEST_VOCABULARY
    if size >= SMALLEST_VOCABULARY:
        return None
    return (
        f"its vocabulary has {size} tokens; expected at least {SMALLEST_VOCABULARY}, since the "
        "choice of layers and the draft vocabulary need more than a few"
    )


def _narrow(text: Any) -> str | None:
    """Why no head can be trained, or None: a head shares the embedding and has the same width."""
    width = setting(text, "word_embed_proj_dim", "embedding_size")
    if width is not None and width != text.hidden_size:
        return _width(width, text.hidden_size)
    if setting(text, "num_attention_heads") is None:
        return (
            "its configuration gives no number of attention heads for all layers "
            "(num_attention_heads), which a head takes over"
        )
    return None


def _width(embedding: int, layers: int) -> str:
    return (
        f"its embeddings have {embedding} numbers and its layers {layers}; a head shares the "
        "embedding, so both must be alike"
    )


def _own_masks(text: Any) -> str | None:
    kinds = getattr(text, "layer_types", None) or ()
    own = [f"{name}={value}" for name, value in own_windows(text).items()]
    if "chunked_attention" in kinds:
        own.append("chunked_attention")
    attention = getattr(text, "attn_config", None)  # MPT's
    if text.model_type == "bloom" or any(getattr(x, "alibi", False) for x in (text, attention)):
        own.append("ALiBi")
    if own:
        return (
            f"its layers mask or place tokens by themselves ({', '.join(own)}), so drafts must be "
            "chains, not trees"
        )
    return None


def _notes(text: Any, tokenizer: Any, generation: Any) -> Iterator[str]:
    asked = [
        f"{name}={value}"
        for name, nothing in GENERATION.items()
        if (value := getattr(generation, name, None)) not in (None, nothing)
    ]
    if asked:
        yield (
            f"its generation settings ask for {', '.join(asked)}: nothing here honours them, so "
            "neither side of a comparison does"
        )
    known = setting(text, "vocab_size")
    if known and len(tokenizer) > known:
        yield (
            f"its tokenizer has {len(tokenizer)} tokens and its embedding {known}: prompts with "
            "one of the others are refused"
        )
    if (experts := setting(text, *_EXPERTS) or 1) > 1:
        yield (
            f"a mixture of {experts} experts: in bfloat16 ties of its router may fall otherwise "
            "in passes of another size, and outputs part there"
        )


# --- What an open target shows ------------------------------------------------------------------


def _plain(act: Callable[[], Any], name: str) -> str | None:
    """What an action refuses, without the target's name; None when it does not."""
    try:
        act()
    except UserError as err:
        return str(err).removeprefix(f"{name}: ")
    return None


def _without_head(target: Target) -> str | None:
    width = target.model.get_input_embeddings().weight.shape[1]
    if width != target.d_model:
        return _width(width, target.d_model)
    try:
        rotary_tables(HeadConfig.for_target(target, (target.n_layers,), 1), 2)
    except (UserError, AttributeError, RuntimeError, KeyError, ValueError) as err:
        return f"a head cannot take over its settings ({type(err).__name__}: {err})"
    return None


@torch.inference_mode()
def _wrong_answers(target: Target) -> str | None:
    """Why its answers are not its own, or None: two of them, of prompts of different lengths.

    They end behind what the configuration says of windows and rotations, where that is near.
    """
    near = [n for n in turning_points(target.config) if n <= REACH // 2]
    longest = max(9, min(max(near, default=0) + 4, target.context_limit - 8))
    prompts = [[(7 * i + 3) % target.vocab_size for i in range(n)] for n in (longest, longest // 2)]
    try:
        worst = 0.0
        for number, answer in Writer(target).write([Request(ids, 5) for ids in prompts]):
            whole = torch.tensor([prompts[number] + answer], device=target.device)
            logits = target.model(input_ids=whole, use_cache=False).logits[0].float()
            logits = logits[len(prompts[number]) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
            short = (logits.max(-1).values - chosen) / logits.abs().max().clamp(min=1.0)
            worst = max(worst, short.max().item())
    except Exception as err:  # whatever a decoder stumbles over
        return f"it cannot write answers with a cache ({type(err).__name__}: {err})"
    # In low precision likeliest tokens differ by rounding; wrong states are far off.
    if worst <= (1e-3 if target.dtype == torch.float32 else 0.25):
        return None
    return (
        f"{type(target.model).__name__} does not write with a cache what it writes without, so "
        "its answers are not its own"
    )
