"""The engine: runs the target's passes for decoding, fast, with a cache that can forget.

Used by chapter 07, by ``writing`` in chapter 01 for its passes, and by ``capabilities``, which
tries one out. An ``Engine`` takes some new tokens, shaped as a chain or as a tree, and gives the
target's logits and the residual stream at chosen boundaries; afterwards it keeps the keys and
values of the accepted tokens and drops the others. What to draft and what to accept is left to
``decoding``; the ways to run a pass to ``passes``; how long things take to ``speed``.

An engine takes the first way that gives the model's own logits, which it tries out before anything
is decoded: the lean pass for decoders of Llama's shape on a CPU, then Hugging Face's code with
masks of ours, then the same code with its own masks, which knows chains only. Decoders whose states
cannot forget a token are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from draftlayers.contexts import cached_limit, turning_points
from draftlayers.packing import can_pack
from draftlayers.passes import (
    ChainPass,
    HuggingFacePass,
    KVCache,
    LlamaPass,
)
from draftlayers.project import UserError
from draftlayers.targets import Target

PREFILL = 256  # prompt tokens of one pass, which bounds the memory of its attention mask
REACH = 600  # tokens of the longest check that a new engine makes

# Kinds of layers whose masks are known. Others carry states from token to token.
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def decodable(config: Any) -> str | None:
    """Why a target cannot be decoded speculatively, as far as its configuration tells; or None."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if unknown := sorted(kinds - ATTENTION):
        what = f"layers of kind {', '.join(unknown)}"
    elif not kinds and getattr(model, "_is_stateful", False):
        what = f"layers of {model.__name__}"
    else:
        return None
    return (
        f"{what} cannot be decoded: their states depend on all earlier tokens and rejected ones "
        "cannot be taken back"
    )


class Engine:
    """Runs a target over new tokens and keeps its key-value cache in step with what is accepted.

    Parameters
    ----------
    target
        The model to run.
    packed
        Use packed weights where they can be: on a CPU that multiplies the target's precision,
        when memory allows.

    Attributes
    ----------
    limit
        Longest sequence, in tokens, and ``bound`` says in words what sets it: the context that
        the model was made for, or the length beyond which its rotary embedding changes.
    length
        Accepted tokens whose keys and values are in the cache.
    passes
        What runs them, and ``way`` says in words how.
    trees
        Whether drafts may fork.

    Raises
    ------
    UserError
        When the architecture cannot forget rejected tokens, or its logits come out differently
        from its own forward pass.
    """

    def __init__(self, target: Target, packed: bool = True):
        if why := decodable(target.config):
            raise UserError(f"{target.name}: {why}")
        self.target, self.device, self.eos_ids = target, target.device, target.eos_ids
        self.limit, self.bound = cached_limit(target.config, target.context_limit)
        self.packed = packed and can_pack(target.model)
        for way in (LlamaPass, HuggingFacePass, ChainPass):
            error = self._try(way)
            if error is None:
                break
        else:
            raise UserError(
                f"{target.name}: {type(target.model).__name__} does not give the same logits with "
                f"a cache as without ({error}), so it cannot be decoded here"
            )
        self.way = self.passes.way
        if self.limit < target.context_limit:
            self.way += f", up to {self.limit} tokens"

    @property
    def length(self) -> int:
        """Accepted tokens in the cache."""
        return self.kv.length

    @property
    def trees(self) -> bool:
        """Whether drafts may fork."""
        return self.passes.trees

    @contextmanager
    def session(
        self, capacity: int, boundaries: Sequence[int] = (), new: int = 1
    ) -> Iterator[None]:
        """Start an empty sequence; the model is only changed inside the ``with`` block.

        Parameters
        ----------
        capacity
            Accepted tokens it will have at most.
        boundaries
            Where passes give the residual stream.
        new
            Tokens of a pass at most, once the prompt is read.
        """
        capacity += 2 * new  # passes of fixed size are filled up to the next power of two
        self.kv.start(capacity)
        with torch.no_grad(), self.passes.session(boundaries):
            yield

    def reserve(self, capacity: int, new: int = 1) -> None:
        """Make room for such sequences now, so that none has to while it is timed."""
        with self.session(capacity, new=new):
            pass

    def prefill(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Read a prompt: logits ``[V]`` after its last token, states ``[T, K*d]`` or None."""
        parts: list[Tensor] = []
        ids = torch.tensor(tokens, device=self.device)
        for chunk in ids.split(PREFILL):
            logits, states = self.forward(chunk, rows=1)
            self.keep(range(len(chunk)))
            if states is not None:
                parts.append(states)
        return logits[0], torch.cat(parts) if parts else None

    def forward(
        self,
        tokens: Tensor,
        depths: Tensor | None = None,
        sees: Tensor | None = None,
        rows: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One target pass over new tokens; every one of them sees all accepted tokens.

        Parameters
        ----------
        tokens
            int64 ``[n]``.
        depths
            int64 ``[n]``: place of each token after the accepted ones; default 0..n-1, a chain.
        sees
            bool ``[n, n]``: row i is true at token i's ancestors and itself; default a chain.
        rows
            Give logits of the last `rows` tokens only.

        Returns
        -------
        logits
            float32 ``[rows or n, V]``.
        states
            ``[n, K*d]``, the session's boundaries side by side in ascending order; None if none.

        Raises
        ------
        UserError
            When the tokens fork and this engine runs chains only.
        """
        if sees is not None:
            self.check_trees()
        n, before = len(tokens), self.length
        if depths is None:
            depths = torch.arange(n, device=self.device)
        if sees is None:
            sees = torch.ones(n, n, dtype=torch.bool, device=self.device).tril()
        columns = self.kv.capacity if self.kv.fixed else before + n
        visible = torch.zeros(n, columns, dtype=torch.bool, device=self.device)
        visible[:, :before] = True
        visible[:, before : before + n] = sees
        return self.passes(tokens, before + depths, visible, self.kv, rows or n)

    def keep(self, rows: Sequence[int]) -> None:
        """Accept these tokens of the last pass (ascending indices); forget the others."""
        rows, first = list(rows), self.kv.length
        if rows != list(range(len(rows))):
            self.kv.move([first + row for row in rows], first)
        self.kv.length = first + len(rows)

    def check_trees(self) -> None:
        """Refuse drafts that fork where only chains are run right.

        Raises
        ------
        UserError
            When ``trees`` is false.
        """
        if not self.trees:
            raise UserError(
                f"{self.target.name}: {type(self.target.model).__name__} masks or places tokens by "
                "itself, so drafts must be chains, not trees"
            )

    def _try(self, way: type[LlamaPass | HuggingFacePass | ChainPass]) -> str | None:
        """Take a way to run passes if it gives the model's own logits; else say what is wrong."""
        try:
            if not way.fits(self.target, self.packed):
                return "it is built otherwise"
            self.passes = way(self.target, self.packed)
            self.kv = KVCache(fixed=self.passes.graphed)
            with torch.no_grad():
                worst = max(self._errors())
        except UserError:
            raise
        except Exception as err:  # whatever this way stumbles over, the next may do without
            return f"{type(err).__name__}: {err}"
        allowed = 1e-4 if self.target.dtype == torch.float32 else 0.1
        return None if worst <= allowed else f"largest difference {worst:.3g} of the largest logit"

    def _errors(self) -> Iterator[float]:
        """Compare passes with the model's own: a share of the largest logit for each comparison.

        A draft of which most is rejected, then one whose branches are told apart by depth and not
        by slot, behind a prefix that reaches past the windows and lengths the configuration names.
        """
        target, n = self.target, max(1, min(self._reach(), self.limit - 12))
        ids = torch.arange(1, n + 15, device=self.device) * 7 % target.vocab_size
        prefix, tokens, rejected = ids[: n + 1], ids[n + 1 : n + 11], ids[n + 11 :]
        # The root and, under it, eight guesses of which the last has one of its own; or a chain.
        depths, paths = torch.arange(10), [list(range(10))]
        if self.trees:
            depths, paths = torch.tensor([0] + 8 * [1] + [2]), [[0, 1], [0, 8, 9]]
        sees = torch.ones(10, 10, dtype=torch.bool).tril()
        if self.trees:
            sees = torch.eye(10, dtype=torch.bool)
            sees[:, 0] = sees[9, 8] = True
        with self.session(n + 1, new=10):
            for part in prefix[:n].split(n // 2 + 1):
                self.prefill(part.tolist())
            self.forward(torch.cat((prefix[n:], rejected)))
            self.keep([0])
            place = (depths.to(self.device), sees.to(self.device)) if self.trees else ()
            found = self.forward(tokens, *place)[0]
        for path in paths:
            own = target.model(torch.cat((prefix, tokens[path]))[None], use_cache=False).logits[0]
            yield _share(found[path], own[n + 1 :])
        if isinstance(self.passes, LlamaPass):
            # Some models treat queries otherwise from some position on.
            places = torch.arange(self.limit - 4, self.limit)
            with self.session(4, new=4):
                visible = torch.ones(4, 4, dtype=torch.bool).tril()
                found = self.passes(tokens[:4], places, visible, self.kv, 4)[0]
                inputs = {"input_ids": tokens[None, :4], "position_ids": places[None]}
                own = target.model(**inputs, use_cache=False).logits[0]
            yield _share(found, own)

    def _reach(self) -> int:
        """Tokens that take the check past what the configuration says happens at some length."""
        near = [n for n in turning_points(self.target.config) if n <= REACH - 16]
        return min(REACH, 2 * max(near, default=3))


def _share(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in shares of the largest expected value or of one."""
    expected = expected.float().to(found.device)
    worst = (found - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    return float("inf") if worst.isnan() else worst.item()
