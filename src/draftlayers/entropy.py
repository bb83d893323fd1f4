"""Entropies of arrays, one plain function for each definition.

Used in chapter 02, where the definitions stand beside each other, and by ``states`` for predictive
entropies. Nothing here knows what a layer, a target or a store is: ``layer_entropy`` samples the
states of layers and puts these functions together for sets of them.

All entropies are in nats. Those of a spectrum are functions of a symmetric operator of trace 1:
the covariance of states divided by its trace, or their Gram matrix, which has the same eigenvalues
(``trace_gram``).
"""

from __future__ import annotations

import torch
from torch import Tensor

CACHE_VALUES = 1 << 19  # logits worked on at once: 2 MB in float32
CODING_PRECISION = 0.5


def entropy_of_logits(logits: Tensor) -> Tensor:
    r"""Entropy of the distributions that logits stand for, :math:`-\sum_v p_v \log p_v`.

    Of the logits of a hidden state this is the logit lens (nostalgebraist 2020).

    Parameters
    ----------
    logits
        ``[n, V]``; minus infinity forbids a token.

    Returns
    -------
    Tensor
        ``[n]`` in nats, float32; at most log V.

    Examples
    --------
    >>> entropy_of_logits(torch.tensor([[0.0, 0.0, -torch.inf]]))
    tensor([0.6931])
    """
    return torch.cat(
        [entropy_of_log_probs(torch.log_softmax(x.float(), -1)) for x in in_cache(logits)]
    )


def entropy_of_log_probs(log_p: Tensor) -> Tensor:
    """Entropy ``[n]`` in nats of distributions given by log probabilities ``[n, V]``, float32.

    >>> entropy_of_log_probs(torch.tensor([[0.25, 0.25, 0.5, 0.0]]).log())
    tensor([1.0397])
    """
    # A forbidden token has minus infinity; clamped, its share is 0 times a number and not NaN.
    found: Tensor = torch.linalg.vecdot(log_p.exp(), log_p.clamp_min(-1e4))
    return -found


def in_cache(logits: Tensor) -> tuple[Tensor, ...]:
    """Parts of ``[n, V]`` small enough to stay in a processor's cache while they are worked on.

    >>> [len(part) for part in in_cache(torch.empty(10, 1 << 17))]
    [4, 4, 2]
    """
    if logits.device.type != "cpu":
        return (logits,)  # a GPU would spend the time on launching small kernels
    parts: tuple[Tensor, ...] = logits.split(max(1, CACHE_VALUES // logits.shape[-1]))
    return parts


def feature_softmax(states: Tensor) -> tuple[Tensor, Tensor]:
    r"""Entropy of softmax over the features of each state, and the log of its normaliser.

    The normaliser, :math:`\log\sum_i e^{h_i}`, is what the softmax of concatenated states needs.

    Parameters
    ----------
    states
        ``[m, d]``; computed in float64, because states of a massive activation reach 7e4.

    Returns
    -------
    entropy, log_mass
        Each ``[m]``, float32, in nats.

    Examples
    --------
    >>> feature_softmax(torch.zeros(1, 4))
    (tensor([1.3863]), tensor([1.3863]))
    """
    states = states.double()
    mass = states.logsumexp(-1)
    log_p = states - mass[:, None]
    return -(log_p.exp() * log_p).sum(-1).float(), mass.float()


def trace_gram(states: Tensor) -> Tensor:
    r"""Gram matrix of centred states, divided by its trace: :math:`XX^\top/\mathrm{tr}\,XX^\top`.

    Parameters
    ----------
    states
        ``[m, d]``.

    Returns
    -------
    Tensor
        ``[m, m]`` float64 with the eigenvalues of the trace-1 covariance.

    Raises
    ------
    ValueError
        When the rows are all equal.

    Examples
    --------
    >>> trace_gram(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    tensor([[ 0.5000, -0.5000],
            [-0.5000,  0.5000]], dtype=torch.float64)
    """
    x = states.double()
    x = x - x.mean(0)
    trace = x.square().sum()
    if not trace > 0:
        raise ValueError("all rows of states are equal, so they have no spectrum")
    return x @ x.T / trace


def renyi2_entropy(operators: Tensor) -> Tensor:
    r"""Rényi-2 entropy of a spectrum, :math:`-\log\mathrm{tr}\,\hat\Sigma^2`.

    Its exponential is an effective number of directions. Of a Gram matrix of n rows it is the
    plug-in value, too small because the trace is too large by about 1/n; ``cka_sums`` removes
    that bias. Skean et al. 2025, with alpha = 2.

    Parameters
    ----------
    operators
        ``[..., g, g]`` symmetric, of trace 1.

    Returns
    -------
    Tensor
        ``[...]`` in nats; at most log g.

    Examples
    --------
    >>> renyi2_entropy(torch.eye(4) / 4).exp()
    tensor(4.)
    """
    return -operators.square().sum((-2, -1)).log()


def spectrum_entropy(operators: Tensor) -> Tensor:
    r"""Von Neumann entropy, :math:`-\sum_i \lambda_i\log\lambda_i` over the eigenvalues.

    It grows with the number of rows of a Gram matrix, so compare equal numbers only.
    Skean et al. 2025, with alpha = 1.

    Parameters
    ----------
    operators
        ``[..., g, g]`` symmetric, of trace 1.

    Returns
    -------
    Tensor
        ``[...]`` in nats; at most log g.

    Examples
    --------
    >>> spectrum_entropy(torch.diag(torch.tensor([0.5, 0.5, 0.0])))
    tensor(0.6931)
    """
    values: Tensor = torch.linalg.eigvalsh(operators)
    shares: Tensor = torch.special.entr(values.clamp_min(0))
    return shares.sum(-1)


def coding_rate(operators: Tensor, width: int, precision: float = CODING_PRECISION) -> Tensor:
    r"""Coding rate, :math:`\frac12\log\det(I + \frac{d}{\varepsilon^2}\hat\Sigma)`.

    Nats that store a state up to the error :math:`\varepsilon`, for states scaled to unit mean
    square. Ma et al. 2007, equation 7.

    Parameters
    ----------
    operators
        ``[..., g, g]`` symmetric; of trace 1 for a layer, the sum of its members' for a set.
    width
        Width d of a state.
    precision
        The error.

    Returns
    -------
    Tensor
        ``[...]`` in nats.

    Examples
    --------
    >>> coding_rate(torch.eye(2) / 2, width=2, precision=1.0)  # log 2
    tensor(0.6931)
    """
    eye = torch.eye(operators.shape[-1], dtype=operators.dtype)
    factor: Tensor = torch.linalg.cholesky(eye + operators * (width / precision**2))
    return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
