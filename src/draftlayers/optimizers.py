"""What turns the gradients of a draft head into updates.

Used by ``training`` in chapter 06. When updates are made, and how large they are, is decided there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlayers.head import DraftHead
from draftlayers.project import UserError


def make_optimizers(
    head: DraftHead, kind: str, rate: float, betas: tuple[float, float], decay: float
) -> list[torch.optim.Optimizer]:
    """Optimizers that together update each parameter of a head which is to learn.

    Parameters
    ----------
    kind
        ``"adamw"`` for all of them; ``"muon"`` (Jordan et al., 2024) for the matrices inside the
        head, whose steps are scaled to AdamW's size (arXiv:2502.16982, Section 2.2) so that one
        rate serves both, and AdamW for the output matrix and the norms.
    rate, betas, decay
        Learning rate, AdamW's betas, and weight decay.
    """
    learning = [p for p in head.parameters() if p.requires_grad]
    inside: list[Tensor] = []
    if kind == "muon":
        inside = [p for p in learning if p.ndim == 2 and p is not head.lm_head.weight]
    elif kind != "adamw":
        raise UserError(f"optimizer {kind!r}: expected adamw or muon")
    others = [p for p in learning if all(p is not q for q in inside)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=rate, betas=betas, weight_decay=decay, fused=True)
    ]
    if inside:
        optimizers.append(
            torch.optim.Muon(inside, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]
