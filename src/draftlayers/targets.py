"""The target: the large model whose layers a draft head reads and whose output must not change.

Used by every chapter. A ``Target`` is a causal language model with its tokenizer, its prompt
format, a way to record the residual stream at any boundary, and ``unembed``, which turns a
residual state into logits exactly as the model does. Where its files come from is left to
``weights``; how hidden states are stored to ``states``; how text is generated to ``writing`` and
``decoding``.

Boundary b (0..N) is the residual stream entering layer b, which is what leaves layer b-1: b = 0
is the embedding output, b = N what leaves the last layer *before* the final norm. (Hugging Face's
``hidden_states[N]`` is after it.)
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftlayers.chat import Chat
from draftlayers.checkpoints import load_checkpoint
from draftlayers.contexts import context_of
from draftlayers.current import digest
from draftlayers.device import dtype_name
from draftlayers.project import DATA, Say, UserError, quiet
from draftlayers.runs import Run
from draftlayers.weights import TINY, absolute, fetch, find_weights, known_models

# How models scale and cap what their output matrix gives: setting, and what is done with it.
SCALES = (
    ("logit_scale", torch.mul),
    ("logits_scaling", torch.div),
    ("logits_scaling", torch.mul),
    ("lm_head_multiplier", torch.mul),
)
CAPS = ("final_logit_softcapping", "logits_soft_cap")


class Target:
    """A causal language model as the rest of the package sees it.

    Parameters
    ----------
    name
        What the user called it.
    model
        A Hugging Face causal language model.
    tokenizer
        Its tokenizer.
    licence
        Licence of the weights, by name.
    files_digest
        Digest of the files it was loaded from; without it the weights in memory are digested.
    day
        The date, as yyyy-mm-dd, that a chat template may print; default today's.

    Attributes
    ----------
    context_limit
        Longest sequence the model was made for, in tokens.

    Raises
    ------
    UserError
        When the model's layers or its way from the last layer to the logits are not understood.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        licence: str = "unknown",
        files_digest: str | None = None,
        day: str | None = None,
    ):
        self.name, self.model, self.tokenizer, self.licence = name, model.eval(), tokenizer, licence
        self.chat = Chat(tokenizer, day or datetime.date.today().isoformat())
        self._files_digest = files_digest
        model.requires_grad_(False)
        self.config = config = model.config.get_text_config()
        self.n_layers: int = config.num_hidden_layers
        self.d_model: int = config.hidden_size
        self.context_limit = context_of(config, tokenizer)
        self.decoder, self.layers = self._find_layers()
        self.output_matrix: nn.Linear = model.get_output_embeddings()
        self.vocab_size: int = self.output_matrix.weight.shape[0]
        self._probe()

    @property
    def device(self) -> torch.device:
        """Where its first weights lie, which is where token ids go."""
        first: Tensor = next(self.model.parameters())
        return first.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of its weights."""
        first: Tensor = next(self.model.parameters())
        return first.dtype

    @property
    def day(self) -> str:
        """The date that a chat template prints."""
        return self.chat.day

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts are written by a chat template, not plainly."""
        return self.chat.has_template

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer.

        Those that the generation settings and the tokenizer name, and the special token that the
        chat template writes behind an assistant's message, which some checkpoints name nowhere.
        """
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        found = set(ids if isinstance(ids, (list, tuple)) else [ids])
        found |= {self.tokenizer.eos_token_id, self.chat.end_of_turn}
        return frozenset(found - {None})

    @property
    def digest(self) -> str:
        """Changes with any weight, any setting, the tokenizer or the template; precision aside."""
        if self._files_digest:
            return self._files_digest
        weights = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            weights.update(f"{name} {tuple(tensor.shape)} ".encode())
            weights.update(tensor.detach().cpu().float().numpy().tobytes())
        settings = self.model.config.to_json_string(use_diff=False)
        tokens = getattr(self.tokenizer, "backend_tokenizer", None)
        return digest(
            type(self.model).__name__,
            settings,
            weights.hexdigest(),
            tokens.to_str() if tokens else sorted(self.tokenizer.get_vocab().items()),
            getattr(self.tokenizer, "chat_template", None),
        )

    @property
    def cache_name(self) -> str:
        """What the decoder calls its key-value cache: the name changed in transformers 5.24.

        Raises
        ------
        UserError
            When it takes none by either name.
        """
        known = inspect.signature(type(self.decoder).forward).parameters
        for name in ("cache", "past_key_values"):
            if name in known:
                return name
        raise UserError(
            f"{self.name}: {type(self.decoder).__name__} takes no key-value cache by a known name, "
            "so it cannot write answers or decode here"
        )

    def in_precision(self, dtype: torch.dtype) -> Target:
        """A copy of this target that computes in another precision."""
        model = copy.deepcopy(self.model).to(dtype)
        return Target(self.name, model, self.tokenizer, self.licence, self.digest, self.day)

    def render(self, turns: Sequence[str]) -> list[int]:
        """Token ids of a prompt up to where the answer begins.

        Only the first turn is a prompt by itself; later turns need the target's answers to the
        earlier ones. Without a chat template the plain format ``PLAIN_FORMAT`` is used.

        Raises
        ------
        UserError
            When the chat template refuses the turn, or the model does not know one of its tokens.
        """
        try:
            ids = self.chat.render(turns[0])
        except UserError as err:
            raise UserError(f"{self.name}: {err}") from err
        known = self.model.get_input_embeddings().weight.shape[0]
        if beyond := [i for i in ids if i >= known]:
            raise UserError(
                f"{self.name}: its tokenizer writes token {beyond[0]} "
                f"({self.tokenizer.convert_ids_to_tokens(beyond[0])}), but the model has "
                f"embeddings of {known} tokens only; expected the tokenizer it was trained with"
            )
        return ids

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Input embeddings ``[..., d]`` of token ids ``[...]``, scaled as the model scales them."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def unembed(self, states: Tensor) -> Tensor:
        """Logits ``[..., V]`` in float32 of boundary states ``[..., d]`` before the final norm.

        Final norm, output matrix, and logit scaling or soft-capping where the architecture has
        them. At boundary N this equals the model's own logits; at earlier boundaries it is the
        logit lens (nostalgebraist, 2020).
        """
        weight = self.output_matrix.weight
        return self.output_logits(self.final_norm(states.to(weight.device, weight.dtype)))

    def output_logits(self, normed: Tensor) -> Tensor:
        """Logits ``[..., V]`` in float32 of states ``[..., d]`` after the final norm.

        All is done in the model's own precision, as the model does it, before the last step.
        """
        return self._scaled(self.output_matrix(normed), *self._scaling).float()

    @staticmethod
    def _scaled(logits: Tensor, scale: Any, cap: float | None, precise: bool) -> Tensor:
        if scale:
            operation, value = scale
            logits = operation(logits, value)
        if cap:
            logits = logits.float() if precise else logits
            logits = cap * torch.tanh(logits / cap)
        return logits

    @contextmanager
    def capture(self, boundaries: Iterable[int]) -> Iterator[dict[int, Tensor]]:
        """Record boundaries of every call of ``model`` inside the ``with`` block.

        Yields a dictionary that each call fills with ``states[b]``, tensors ``[B, T, d]`` in the
        model's dtype.

        Raises
        ------
        UserError
            When a boundary is outside 0..N.
        """
        states: dict[int, Tensor] = {}
        hooks = []
        for b in boundaries:
            if not 0 <= b <= self.n_layers:
                raise UserError(f"boundary {b} does not exist; {self.name} has 0..{self.n_layers}")
            hooks.append(self._hook(b, states))
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, b: int, states: dict[int, Tensor]) -> Any:
        def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            state: Any = args[0] if args else kwargs.get("hidden_states")
            states[b] = state

        def leaving(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states[b] = output[0] if isinstance(output, tuple) else output

        if b < self.n_layers:
            return self.layers[b].register_forward_pre_hook(entering, with_kwargs=True)
        return self.layers[-1].register_forward_hook(leaving)

    def _find_layers(self) -> tuple[nn.Module, nn.ModuleList]:
        """The module that takes token ids and holds the list of decoder layers, and that list."""
        named = self.model.get_decoder() if hasattr(self.model, "get_decoder") else None
        embedding = self.model.get_input_embeddings()
        holders = [m for m in self.model.modules() if embedding in m.children()]
        for decoder in [named, *holders]:
            for child in decoder.children() if decoder is not None else ():
                if isinstance(child, nn.ModuleList) and len(child) == self.n_layers:
                    return decoder, child
        raise UserError(
            f"{self.name}: {type(self.model).__name__} has no list of {self.n_layers} decoder "
            "layers beside its token embedding, so its hidden states cannot be read"
        )

    @torch.inference_mode()
    def _probe(self) -> None:
        """Read a few tokens, to find the way from the last layer to the logits and to check it.

        What takes the state that leaves the last layer is the final norm, with a projection behind
        it in a few models. How logits are scaled and capped is what gives the model's own.
        """
        calls: list[tuple[nn.Module, Tensor, Any]] = []

        def called(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor):
                calls.append((module, args[0], output))

        ids = torch.arange(4, device=self.device).remainder(self.vocab_size)[None]
        beside = [m for m in self.decoder.children() if not isinstance(m, nn.ModuleList)]
        hooks = [m.register_forward_hook(called) for m in [*beside, self.output_matrix]]
        # What was called before the last layer (a rotary embedding, say) is none of that way.
        hooks.append(self.layers[-1].register_forward_hook(lambda *_: calls.clear()))
        try:
            with self.capture(range(self.n_layers + 1)) as states:
                logits = self.model(input_ids=ids, use_cache=False).logits.float()
        finally:
            for hook in hooks:
                hook.remove()
        self._check_states(states, logits)
        way, current = [], states[self.n_layers]
        for module, taken, output in calls:
            if module is not self.output_matrix and _same(taken, current):
                way.append(module)
                current = output
        self.final_norm = way[0] if len(way) == 1 else nn.Sequential(*way)
        raw = calls[-1][2]
        if calls[-1][0] is not self.output_matrix or raw.shape != logits.shape:
            raw = logits

        def error(scaling: tuple[Any, float | None, bool]) -> float:
            worst: float = (self._scaled(raw, *scaling).float() - logits).abs().max().item()
            return worst

        self._scaling = min(self._scalings(), key=error)
        found = self.unembed(states[self.n_layers]).to(logits.device)
        worst, largest = (found - logits).abs().max().item(), logits.abs().max().item()
        if not worst <= self._tolerance() * max(1.0, largest):
            raise UserError(
                f"{self.name}: final norm and output matrix do not reproduce the model's logits "
                f"(largest difference {worst:.3g}), so its layers cannot be read through them; "
                f"the architecture {type(self.model).__name__} needs its own unembedding in "
                "targets.py"
            )
        first = self.model(input_ids=ids[:, :2], use_cache=False).logits.float()
        if not (first - logits[:, :2]).abs().max() <= 10 * self._tolerance() * max(1.0, largest):
            raise UserError(
                f"{self.name}: in {type(self.model).__name__} a token sees those behind it, so it "
                "is no causal language model"
            )

    def _tolerance(self) -> float:
        """Difference of logits, in shares of the largest, that rounding explains."""
        return max(1e-3, 4 * torch.finfo(self.dtype).eps)

    def _scalings(self) -> Iterator[tuple[Any, float | None, bool]]:
        """Ways to scale and cap logits that the configuration allows, most of its words first."""
        values = [(operation, getattr(self.config, name, None)) for name, operation in SCALES]
        caps = [getattr(self.config, name, None) for name in CAPS]
        for scale in [*((do, value) for do, value in values if value), None]:
            for cap in [*filter(None, caps), None]:
                yield from ((scale, cap, precise) for precise in (False, True))

    def _check_states(self, states: dict[int, Tensor], logits: Tensor) -> None:
        kind = type(self.model).__name__
        for b in range(self.n_layers + 1):
            state = states.get(b)
            shape = None if state is None else tuple(state.shape)
            if shape != (1, logits.shape[1], self.d_model):
                raise UserError(
                    f"{self.name}: the layers of {kind} pass on states of shape {shape} at "
                    f"boundary {b}; expected one vector of width {self.d_model} for each token"
                )
        if logits.isfinite().all():
            return
        for name, weight in self.model.named_parameters():
            if not weight.isfinite().all():
                raise UserError(
                    f"{self.name}: its weights are damaged: {name} holds values that are not "
                    "finite; expected a checkpoint of a training that did not diverge"
                )
        raise UserError(
            f"{self.name}: its logits are not finite in {dtype_name(self.dtype)}, "
            "though its weights are; load it in float32 or bfloat16"
        )


def _same(a: Any, b: Any) -> bool:
    """Whether two states are one, but for precision and how its rows are arranged."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.numel() != b.numel():
        return False
    return a is b or torch.equal(a.flatten(), b.to(a.device, a.dtype).flatten())


def open_target(run: Run, say: Say | None = None) -> Target:
    """The target of a run, with the run's own day."""
    spec = run.spec
    return load_target(
        spec.model, trust_remote_code=spec.trust_remote_code, say=say or run.say, day=run.day
    )


def load_target(
    name: str,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    say: Say = quiet,
    day: str | None = None,
) -> Target:
    """Load a target by listed name, local folder, GGUF file or Hugging Face hub id.

    Weights are read from safetensors or GGUF only; nothing is unpickled. On CUDA the default
    dtype is bfloat16 and a model too large for one device is spread over all of them; on a CPU
    it is float32.

    Raises
    ------
    UserError
        When the name is unknown, weights cannot be fetched or read, or a checksum differs.
    """
    weights = find_weights(absolute(name))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    if weights.kind == "tiny":
        target = tiny_target()
        target.model.to(device, dtype)
        target.chat.day = day or target.day
        return target
    licence = known_models().get(name, {}).get("licence", "see the model's page")
    where = fetch(weights, say)
    model, tokenizer = load_checkpoint(where, name, device, dtype, trust_remote_code, say)
    return Target(name, model, tokenizer, licence, weights.digest, day)


TINY_VOCABULARY = 512  # tokens: all bytes, and some merges
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer with a chat template, trained in memory on the shipped prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (DATA / "prompts" / "heldout.jsonl").read_text()
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def tiny_target(
    seed: int = 0, architecture: str = "llama", n_layers: int = 8, **config: Any
) -> Target:
    """A random-weight target built in memory, for tests and the ``smoke`` profile.

    ``architecture`` is any ``model_type`` of transformers whose configuration takes the usual
    names (llama, qwen2, qwen3, gemma2, gemma3_text, mistral, phi3, gpt2, ...); ``config``
    replaces single values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,  # large enough that layers differ and tokens are preferred
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture == "gpt2":
        values = {key: values[key] for key in ("vocab_size", "initializer_range")} | {
            "n_embd": 64, "n_layer": n_layers, "n_head": 4, "n_positions": 1024,
            "bos_token_id": values["bos_token_id"], "eos_token_id": values["eos_token_id"],
        }  # fmt: skip
    torch_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(architecture, **(values | config))
    )
    torch.set_rng_state(torch_state)
    return Target(TINY, model.float(), tokenizer, "Apache-2.0")
