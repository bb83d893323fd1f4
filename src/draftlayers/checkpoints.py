"""Loading a checkpoint with transformers, and saying in one sentence why it cannot be loaded.

Used by ``weights``, which converts with the same care, and by ``targets``. What can be seen in the
files is checked before anything is loaded: pointers of Git LFS, damaged or missing files, weights
that are quantised. What shows only while loading is checked behind it: every weight of the model
came from the files, in its shape, and is a number. Weights are read from safetensors only; nothing
is unpickled and nothing is filled in. Where the files come from is left to ``weights``, what the
model can do to ``targets``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from draftlayers.project import Say, UserError, first_line, quiet

if TYPE_CHECKING:
    import torch

# What transformers reads of a model's folder; training states and notes beside them do not count.
MODEL_FILES = (
    *("*.safetensors", "*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py"),
    "additional_chat_templates/*.jinja",
)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Read as JSON by transformers, which passes over some of them without a word when they are damaged.
JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json"),
)
# Notes of quantisers that older files keep beside config.json.
QUANTISERS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
POINTER = b"version https://git-lfs.github.com/spec/"
# Types of a ``.weight`` that is what it says; any other means something only with its scales.
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
# What older versions of transformers saved beside the weights, and models compute by themselves.
MASKS = re.compile(r"(attn|attention)\.(masked_)?bias$|\.inv_freq$|\.position_ids$")
SHOWN = 4  # names in one sentence


def model_files(folder: Path) -> list[Path]:
    """The files of a folder that decide what the model is, in order."""
    return sorted(
        path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()
    )


def listing(names: Iterable[str]) -> str:
    """The first few of some names, and how many more there are.

    >>> listing(["b", "a"])
    'a, b'
    """
    names = sorted(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# --- Before loading ------------------------------------------------------------------------------


def check_file(path: Path) -> None:
    """Refuse a file that is empty or only the pointer that Git LFS keeps in its place.

    Raises
    ------
    UserError
        When it is, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(POINTER))
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror or err}") from None
    if start == POINTER:
        raise UserError(
            f"{path.name} in {path.parent} is a Git LFS pointer, not the file itself; "
            "run git lfs pull there"
        )
    if not start and path.suffix.lower() in (".safetensors", ".gguf", ".model"):
        raise UserError(f"{path.name} in {path.parent} is empty; fetch it again")


def check_folder(folder: Path, whole: bool = True) -> None:
    """Refuse a folder whose files cannot be loaded as a model, as far as they tell by themselves.

    Parameters
    ----------
    folder
        Holds ``config.json``.
    whole
        Whether all weights must be there; those of a hub model come later.

    Raises
    ------
    UserError
        When files are missing, damaged, pointers, quantised, pickled or in other folders.
    """
    for path in model_files(folder):
        check_file(path)
    settings = read_json(folder / "config.json")
    for name in JSON_FILES[1:]:
        if (folder / name).is_file():
            read_json(folder / name)
    _refuse_quantised(folder, settings)
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds an adapter (adapter_config.json), whose weights would be left out; "
            "merge it into its model (merge_and_unload of peft) and save that"
        )
    for path in _weight_files(folder, settings, whole):
        if path.is_file():
            _check_header(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds one object.

    Raises
    ------
    UserError
        When it cannot be read or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"cannot read {path}: {err.strerror or err}") from None
    except (ValueError, RecursionError) as err:
        raise UserError(
            f"{path.name} in {path.parent} is damaged ({err}); expected JSON, so fetch it again"
        ) from None
    if not isinstance(found, dict):
        raise UserError(
            f"{path.name} in {path.parent} holds no JSON object but {type(found).__name__}; "
            "fetch it again"
        )
    return found


def _refuse_quantised(folder: Path, settings: Mapping[str, Any]) -> None:
    inner = [part for part in settings.values() if isinstance(part, dict)]
    method = None
    for part in (settings, *inner):
        how = part.get("quantization_config", part.get("compression_config"))
        if isinstance(how, dict):
            bits = any(how.get(name) for name in ("load_in_8bit", "load_in_4bit"))
            unnamed = "bitsandbytes" if bits else "a method without a name"
            method = how.get("quant_method") or how.get("quant_algo") or unnamed
    for name, quantiser in QUANTISERS.items():
        if (folder / name).is_file():
            method = method or quantiser
    if method is not None:
        raise UserError(
            f"the weights in {folder} are quantised ({method}), and only plain ones are read "
            "here; give the model they were made from, or a GGUF file of it"
        )


def _weight_files(folder: Path, settings: Mapping[str, Any], whole: bool) -> list[Path]:
    """The files that transformers would load weights from."""
    name = settings.get("transformers_weights")
    if name is not None:
        _plain_name(folder, "config.json", name)
        if not name.endswith(".index.json"):
            return _there(folder, [name], "config.json", whole)
    elif (folder / SINGLE).is_file():
        return [folder / SINGLE]
    name = name or INDEX
    if (folder / name).is_file():
        shards = read_json(folder / name).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise UserError(f"{name} in {folder} names no weights; fetch it again")
        for shard in shards.values():
            _plain_name(folder, name, shard)
        return _there(folder, sorted(set(shards.values())), name, whole)
    if not whole:
        return []
    pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if pickled:
        raise UserError(
            f"{folder} has only pickled weights ({listing(path.name for path in pickled)}), which "
            f"could run any code and are not read; save the model as safetensors"
        )
    others = [*folder.glob("*.gguf"), *folder.glob("*.safetensors")]
    if lost := [path.name for path in others if not path.exists()]:
        raise UserError(
            f"{listing(lost)} in {folder} leads to a file that is not there; fetch it again"
        )
    if others:
        raise UserError(
            f"{folder} has no {SINGLE} and no {INDEX}, but {listing(p.name for p in others)}; "
            "give a GGUF file by its own path, or rename the weights"
        )
    raise UserError(f"{folder} has no weights; expected {SINGLE}, or {INDEX} and its shards")


def _plain_name(folder: Path, whose: str, name: Any) -> None:
    """Refuse a file that lies elsewhere or is not safetensors."""
    plain = isinstance(name, str) and "/" not in name and "\\" not in name
    if not plain or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise UserError(
            f"{whose} in {folder} names {name!r} as a file of weights; expected a .safetensors "
            "file in the same folder"
        )


def _there(folder: Path, names: list[str], whose: str, whole: bool) -> list[Path]:
    lost = [name for name in names if not (folder / name).is_file()]
    if lost and whole:
        raise UserError(
            f"{len(lost)} of {len(names)} files that {whose} names are not in {folder} "
            f"({listing(lost)}); fetch them"
        )
    return [folder / name for name in names]


def _check_header(path: Path) -> None:
    """Refuse a safetensors file that is not whole, or that holds quantised weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:  # checks sizes, reads no weights
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as err:
        raise UserError(
            f"{path.name} in {path.parent} is damaged or not whole ({err}); fetch it again"
        ) from None
    if not types:
        raise UserError(f"{path.name} in {path.parent} holds no weights; fetch it again")
    odd = [
        name for name, kind in types.items() if name.endswith(".weight") and kind not in PLAIN_TYPES
    ]
    if odd:
        raise UserError(
            f"{path.name} in {path.parent} holds quantised weights ({listing(odd)}: "
            f"{types[odd[0]]}), and only plain ones are read here; give the model they were made "
            "from, or a GGUF file of it"
        )


# --- Loading -------------------------------------------------------------------------------------


def read_config(where: Mapping[str, str], name: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Configuration and tokenizer of a model, without its weights.

    Raises
    ------
    UserError
        When they cannot be read, or the files beside them cannot be loaded.
    """
    from transformers import AutoConfig

    _check_files(where)
    with _explained(name):
        config = AutoConfig.from_pretrained(**where, trust_remote_code=trust_remote_code)
    return config, _read_tokenizer(where, name, trust_remote_code)


def _check_files(where: Mapping[str, str]) -> None:
    place = where["pretrained_model_name_or_path"]
    if "revision" not in where:
        check_folder(Path(place))
        return
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(place, "config.json", revision=where["revision"])
    if isinstance(found, str):
        check_folder(Path(found).parent, whole=False)


def _read_tokenizer(where: Mapping[str, str], name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    with _explained(name):
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
    # Without its files transformers makes some tokenizers that know no text at all.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise UserError(
            f"cannot load {name!r}: its tokenizer has no tokens; expected tokenizer.json or the "
            "files that its class reads"
        )
    return tokenizer


def load_checkpoint(
    where: Mapping[str, str],
    name: str,
    device: str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    say: Say = quiet,
) -> tuple[Any, Any]:
    """Model and tokenizer, on a device and in a precision.

    Raises
    ------
    UserError
        When they cannot be loaded whole, from the files alone.
    """
    import torch
    from transformers import AutoModelForCausalLM

    _check_files(where)
    tokenizer = _read_tokenizer(where, name, trust_remote_code)
    spread = device == "cuda" and torch.cuda.device_count() > 1
    with _explained(name), calm():
        # Its annotation knows nothing of the pair that it gives with ``output_loading_info``.
        model, loaded = cast(Any, AutoModelForCausalLM).from_pretrained(
            **where,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            device_map="auto" if spread else None,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told and refused below
        )
        model = model if spread else model.to(device)
    check_loaded(name, model, loaded, say)
    return model, tokenizer


@contextmanager
def calm() -> Iterator[None]:
    """Keep the tables that transformers logs about weights; what they say is said in a sentence.

    Raises
    ------
    UserError
        When the files' weights could not be joined to the model's, with their names.
    """
    kept: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Keep(logging.WARNING)
    was = logger.handlers[:]
    logger.handlers[:] = [handler]
    try:
        yield
    except RuntimeError as err:
        names = set(re.findall(r"(?m)^(\S+) *\|[^|\n]*CONVERSION", "\n".join(kept)))
        if not names:
            raise
        raise UserError(
            f"the files do not hold all parts of {listing(names)}, or in other shapes; nothing is "
            "filled in, so fetch the model's files again"
        ) from err
    finally:
        logger.handlers[:] = was


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what transformers raises for a model it cannot load into one sentence.

    Its errors have no common type: what is wrong with a file shows as any error of the code that
    reads it.
    """
    import torch

    try:
        yield
    except UserError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as err:
        raise UserError(
            f"cannot load {name!r}: it does not fit into memory; give a smaller model"
        ) from err
    except Exception as err:
        first = first_line(err)
        if first.endswith(":"):  # what follows is the reason
            first = " ".join(str(err).split())[:200]
        if str(err).strip() and not isinstance(err, (OSError, ValueError, ImportError)):
            first = f"{type(err).__name__}: {first}"
        if "trust_remote_code" in str(err):
            hint = "if you trust its author's code, add -p trust_remote_code=true"
        elif Path(name).exists():
            hint = "expected a folder with config.json, tokenizer files and *.safetensors"
        else:
            hint = "check the name, and that you may read it (huggingface-cli login)"
        raise UserError(f"cannot load {name!r}: {first} ({hint})") from err


# --- Behind loading ------------------------------------------------------------------------------


def check_loaded(name: str, model: Any, loaded: Mapping[str, Any], say: Say = quiet) -> None:
    """Refuse a model that is not, weight for weight, what its files hold.

    Weights in the files that are no part of the model, such as an image encoder's, are said.

    Parameters
    ----------
    loaded
        ``output_loading_info`` of transformers. Tied weights and those that a model computes by
        itself are not missing there.

    Raises
    ------
    UserError
        When weights are missing, have other shapes, are left out although they belong to a layer,
        or are not finite.
    """
    if lost := loaded["missing_keys"]:
        raise UserError(
            f"cannot load {name!r}: {len(lost)} of its weights are missing ({listing(lost)}); "
            "nothing is filled in, so fetch the model's files again"
        )
    if other := sorted(loaded["mismatched_keys"]):
        key, has, expected = other[0]
        differs = _mismatch(model, key, has, expected, len(other))
        raise UserError(f"cannot load {name!r}: {differs}")
    extra = loaded["unexpected_keys"]
    if harmful := [key for key in extra if _belongs(model, key)]:
        raise UserError(
            f"cannot load {name!r}: {len(harmful)} weights of its layers have no place in the "
            f"model that config.json describes ({listing(harmful)}); expected the configuration "
            "they were saved with"
        )
    if extra:
        say(f"{name}: left out {len(extra)} weights that are no part of it ({listing(extra)})")
    odd = [
        key
        for key, weight in model.named_parameters()
        if weight.device.type != "meta" and not weight.isfinite().all()
    ]
    if odd:
        from draftlayers.device import dtype_name  # needs torch, which naming files does not

        dtype = dtype_name(next(model.parameters()).dtype)
        raise UserError(
            f"cannot load {name!r}: {len(odd)} of its weights have values that are NaN or "
            f"infinite in {dtype} ({listing(odd)}); expected numbers, so give another checkpoint"
        )


def _mismatch(model: Any, key: str, has: Any, expected: Any, n: int) -> str:
    """What differs between the shape of a weight in the files and in the model."""
    has, expected = tuple(has), tuple(expected)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    if has[1:] == expected[1:] and expected[:1] == (vocabulary,):
        return (
            f"config.json says {expected[0]} tokens, the weights have {has[0]} ({key}); "
            "correct vocab_size, or give the files that belong together"
        )
    more = f", and {n - 1} more differ" if n > 1 else ""
    return (
        f"{key} has shape {has}, expected {expected} by config.json{more}; give the files that "
        "belong together"
    )


def _belongs(model: Any, key: str) -> bool:
    """Whether a weight that found no place belongs to a layer, so that leaving it out is wrong.

    Such are a bias that the configuration switches off, the scales of a quantised matrix, and
    layers beyond the number that the configuration names.
    """
    from torch import nn

    if MASKS.search(key):
        return False
    names = {key, f"{model.base_model_prefix}.{key}"}
    places = [
        f"{place}."
        for place, module in model.named_modules()
        if place and (isinstance(module, nn.ModuleList) or _holds(module))
    ]
    return any(name.startswith(tuple(places)) for name in names)


def _holds(module: Any) -> bool:
    """Whether a module has weights of its own, not only in modules inside it."""
    return next(module.parameters(recurse=False), None) is not None
