"""Matrices made nearly orthogonal by products alone."""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan et al. (2024, https://kellerjordan.github.io/posts/muon): steep at zero, so that few iterations suffice, and
singular values end between 0.7 and 1.2, not at 1."""
_EPS = 1e-7


def orthogonalise(matrices_kmn: torch.Tensor, iterations: int) -> torch.Tensor:
    """Nearly ``U Vᵀ`` of each ``U S Vᵀ``: ``X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X``, from ``X / ‖X‖``.

    Args:
        matrices_kmn: ``(k, m, n)``; iterated in its dtype, products summed in fp32. Tall ones are transposed meanwhile,
            as ``X Xᵀ`` is then the smaller product.
        iterations: of the polynomial.
    """
    is_tall = matrices_kmn.shape[-2] > matrices_kmn.shape[-1]
    x = matrices_kmn.mT if is_tall else matrices_kmn
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
    a, b, c = COEFFICIENTS
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x
