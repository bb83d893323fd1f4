"""The draft head: a small transformer layer, or two, that guesses the target's next tokens.

It is EAGLE-3's head as its official code has it (arXiv:2503.01840, Section 3.1;
``eagle/model/cnets.py`` of SafeAILab/EAGLE), with the number of input layers left free, and that of
its own layers (``head_layers``), too.
Chapter 06 trains it, chapter 07 decodes with it. What its weights are before training belongs to
``start``, how it learns to ``ttt`` and ``training``; which layers it reads to ``selection``.

Alignment, used everywhere: at index p the head takes the target's states after tokens 0..p and
the embedding of token p+1, and predicts token p+2 (the target itself has already given p+1).
In a chain, the next step at index p takes the head's own output in place of the target's states
and the embedding of token p+2, and predicts token p+3. With ``norm_output`` that output is normed
before it is read again, as before it is turned into logits (EAGLE-3.1, arXiv:2605.09992).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from draftlayers import head_files
from draftlayers.current import read_record, write_record
from draftlayers.head_config import HeadConfig, rotary_tables
from draftlayers.head_layers import HeadCache, Layer, MidLayer
from draftlayers.project import UserError, write_atomically

if TYPE_CHECKING:
    from draftlayers.targets import Target

FORMAT = "draftlayers-head-3"
OUTPUT = "lm_head.weight"


class DraftHead(nn.Module):
    """EAGLE-3 draft head with K input layers and a reduced draft vocabulary.

    Parameter names are the official ones: ``fc``, ``midlayer.*``, ``norm``, ``lm_head``, with
    buffers ``d2t`` and ``t2d`` (and ``fc_norm.{i}`` and further layers ``upper.{i}`` when the
    configuration asks for them). The target's embedding is shared, frozen and not saved.

    Parameters
    ----------
    config
        Shape of the head.
    embedding
        The target's input embedding [V, d].
    vocabulary
        Target token ids the head can propose, int64 [D], ascending.

    Raises
    ------
    UserError
        The embedding or the vocabulary does not fit the configuration.
    """

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: HeadConfig, embedding: Tensor, vocabulary: Tensor) -> None:
        super().__init__()
        c = self.config = config
        if tuple(embedding.shape) != (c.vocab_size, c.d_model):
            raise UserError(
                f"embedding of shape {tuple(embedding.shape)}: the head was made for a target "
                f"with {(c.vocab_size, c.d_model)}"
            )
        norms = (nn.RMSNorm(c.d_model, c.rms_norm_eps) for _ in c.layers)
        self.fc_norm = nn.ModuleList(norms) if c.fc_norm else None
        self.fc = nn.Linear(c.k * c.d_model, c.d_model, bias=False)
        self.midlayer = MidLayer(c)
        self.upper = nn.ModuleList(Layer(c, c.d_model) for _ in range(c.head_layers - 1))
        self.norm = nn.RMSNorm(c.d_model, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.d_model, c.draft_vocab_size, bias=False)
        self.lm_head.requires_grad_(not c.tied_output)
        for name, ids in zip(("d2t", "t2d"), vocabulary_maps(vocabulary, c), strict=True):
            self.register_buffer(name, ids)
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(0, c.head_dim), persistent=False)

    @property
    def vocabulary(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [D], ascending."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @property
    def transformer(self) -> list[Layer]:
        """The head's own layers, in the order in which a state passes them."""
        return [self.midlayer, *cast("Iterable[Layer]", self.upper)]

    def fuse(self, states: Tensor) -> Tensor:
        """First hidden state [..., d] from the input layers' states [..., K*d], in layer order."""
        return cast(Tensor, self.fc(self.normed(states)))

    def normed(self, states: Tensor) -> Tensor:
        """States [..., K*d] as ``fc`` takes them: each layer normed if there is an ``fc_norm``."""
        if self.fc_norm is None:
            return states
        parts = states.chunk(self.config.k, dim=-1)
        return torch.cat([n(s) for n, s in zip(self.fc_norm, parts, strict=True)], dim=-1)

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        cache: HeadCache,
        mask: Tensor | None = None,
    ) -> Tensor:
        """One draft step: read q entries, store their keys and values, return their new states.

        Parameters
        ----------
        hidden
            [B, q, d]: `fuse` of the target's states at index p, or the head's own previous
            output on the path that leads here.
        tokens
            int64 [B, q]: the token one place further than what `hidden` has seen.
        positions
            int64 [B, q] or [q], each at most the cache's capacity: index p for target states, and
            one more for each step drafted from there.
        cache
            Grows by q entries.
        mask
            bool, True = may attend, broadcastable to [B, n_heads, q, cache length after this
            call]; None: everything before, and causal among the q entries.

        Returns
        -------
        [B, q, d], before the final norm: pass it to `logits`, or through `again` to the next step.
        """
        q, before = hidden.shape[1], cache.length
        embedded = F.embedding(tokens, self.embedding).to(hidden.dtype)
        rotary = self.cos[positions], self.sin[positions]
        if mask is None and q > 1 and before:
            mask = torch.ones(q, before + q, dtype=torch.bool, device=hidden.device).tril(before)
        for place, layer in enumerate(self.transformer):
            mixed = layer.mix(embedded, hidden)
            queries = layer.self_attn.queries(mixed, rotary).transpose(1, 2)
            new = (x.transpose(1, 2) for x in layer.self_attn.keys_values(mixed, rotary))
            keys, values = cache.append(place, *new)
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None and q > 1,
                enable_gqa=self.config.n_heads != self.config.n_kv_heads,
            )
            hidden = layer.finish(hidden, attended.transpose(1, 2).flatten(2))
        return hidden

    def again(self, hidden: Tensor) -> Tensor:
        """States [..., d] as the next step of a chain reads them."""
        return cast(Tensor, self.norm(hidden)) if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., D] over the draft vocabulary of states [..., d]."""
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target token ids of draft ids, int64 of any shape, each below D."""
        return draft_ids + self.d2t[draft_ids]

    def new_cache(self, capacity: int) -> HeadCache:
        """An empty cache for `capacity` entries of one sequence, where and as the head is."""
        self.ensure_positions(capacity + 1)
        w, c = self.fc.weight, self.config
        shape = (c.head_layers, 1, c.n_kv_heads, capacity, c.head_dim)
        return HeadCache(w.new_zeros(shape), w.new_zeros(shape))

    def ensure_positions(self, count: int) -> None:
        """Make the rotary tables cover positions 0 .. count-1."""
        if len(self.cos) >= count:
            return
        tables = rotary_tables(self.config, 1 << max(count - 1, 1).bit_length())
        self.cos, self.sin = (table.to(self.fc.weight.device) for table in tables)

    @torch.no_grad()
    def tie_output(self, target: Target) -> None:
        """Take the draft tokens' rows of the target's output matrix for one's own."""
        self.lm_head.weight.copy_(output_rows(target, self.vocabulary))

    def save(self, folder: Path) -> None:
        """Write ``model.safetensors`` and ``config.json``; the second comes last and seals it.

        A tied output matrix is left out.
        """
        folder = Path(folder)
        weights = {k: v.detach().contiguous().cpu() for k, v in self.state_dict().items()}
        if self.config.tied_output:
            del weights[OUTPUT]
        write_atomically(folder / "model.safetensors", save(weights))
        write_record(folder / "config.json", {"format": FORMAT, **self.config.to_dict()})

    @classmethod
    def load(cls, folder: Path, target: Target) -> DraftHead:
        """Read a head that `save` wrote, for the target it was trained on, and check it.

        Raises
        ------
        UserError
            No head there or one that cannot be read, another target's head, or weights that
            contradict the configuration (shapes, vocabulary maps, values that are not finite).
        """
        folder = Path(folder)
        values = read_record(folder / "config.json")
        if values is None:
            raise UserError(f"{folder} holds no draft head: no config.json that can be read")
        if values.pop("format", None) != FORMAT:
            raise UserError(f"{folder}/config.json is not a {FORMAT} configuration")
        weights = head_files.read_weights(folder)
        with head_files.naming(folder):
            config = HeadConfig.from_dict(values)
            if config.n_layers != target.n_layers:
                raise UserError(
                    f"head of a target with {config.n_layers} layers; "
                    f"{target.name} has {target.n_layers}"
                )
            head_files.check_trained_on(folder, target.digest)
            embedding = target.model.get_input_embeddings().weight
            vocabulary = head_files.stored_vocabulary(weights, config.draft_vocab_size)
            if vocabulary.max() >= target.vocab_size:
                raise UserError(f"the head proposes tokens that {target.name} does not have")
            if config.tied_output:
                if OUTPUT in weights:
                    raise UserError(f"{OUTPUT} is there, but the head is tied to its target's")
                if vocabulary.min() >= 0:
                    weights[OUTPUT] = output_rows(target, vocabulary)
            with torch.device("meta"):  # shapes first: a false size may need more than all memory
                head_files.check_weights(weights, cls(config, embedding, vocabulary).state_dict())
            head = cls(config, embedding, vocabulary)
            if not torch.equal(weights["t2d"], head.t2d):
                raise UserError("t2d and d2t name different draft vocabularies")
            head.load_state_dict(weights)
            head = head.to(embedding.device, embedding.dtype).eval()
            head_files.check_finite(head.state_dict())
            head_files.check_rope(lambda: rotary_tables(config, 2), config.head_dim)
        return head


def output_rows(target: Target, vocabulary: Tensor) -> Tensor:
    """The rows ``[D, d]`` of the target's output matrix that score the tokens of a vocabulary."""
    matrix = target.output_matrix.weight.detach()
    return matrix[vocabulary.to(matrix.device)]


def vocabulary_maps(vocabulary: Tensor, config: HeadConfig) -> tuple[Tensor, Tensor]:
    """The official maps of a draft vocabulary of target ids, int64 [D], strictly ascending.

    Returns
    -------
    ``d2t`` int64 [D], the *offset* from draft id to target id, and ``t2d`` bool [V], true for
    tokens the head can propose.

    Raises
    ------
    UserError
        The wrong number of ids, ids out of range, or not ascending. A map of zeros with D < V
        is the mark of a map that was never filled in: no count of tokens gives the first D ids.
    """
    d, v = config.draft_vocab_size, config.vocab_size
    ids = vocabulary.to(torch.int64)
    # All ids and not the ends: a difference of far ids may overflow and look like a step up.
    if ids.shape != (d,) or (ids.diff() <= 0).any() or ((ids < 0) | (ids >= v)).any():
        raise UserError(
            f"draft vocabulary: expected {d} ascending, distinct token ids below {v}, "
            f"got {list(ids.shape)}"
            + (f" from {int(ids.min())} to {int(ids.max())}" if ids.numel() else "")
        )
    d2t = ids - torch.arange(d, device=ids.device)
    if d < v and not d2t.any():
        raise UserError(
            f"draft vocabulary: d2t is all zeros though only {d} of {v} tokens are in it; "
            "the map was never filled in"
        )
    t2d = torch.zeros(v, dtype=torch.bool, device=ids.device)
    t2d[ids] = True
    return d2t, t2d
