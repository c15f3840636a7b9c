"""What is kept of a site's value: all positions, some, the last, the mean, or a projection of features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import torch

from forge_core.contracts.observation import Site
from forge_core.errors import ConfigError
from forge_plugins_interp.principal_components import PrincipalComponents
from forge_plugins_interp.token_pattern import TokenPattern

_FP16_MAX = torch.finfo(torch.float16).max


@attrs.frozen(kw_only=True)
class Reduction:
    """From the values of a batch to rows of a store. All of it is optional."""

    tokens: TokenPattern | None = None
    """Go by these tokens of a sample alone: ``last`` is the last of them."""
    over: Literal["none", "last", "mean"] = "none"
    """Keep each position, the last one of a sample, or the mean over a sample."""
    positions: Sequence[int] = ()
    """Keep these positions of each sample, negative ones from its end."""
    features: int = 0
    """Project the last dimension on so many directions; 0 keeps all."""
    directions: Literal["random", "principal"] = "random"
    """Random ones keep distances (Johnson and Lindenstrauss 1984); principal components keep variance (Pearson 1901),
    and are fitted before."""
    fit_samples: int = 256
    """The first so many, on which principal components are fitted."""
    dtype: torch.dtype | None = None
    """What is written; by default as the model computes."""

    def words(self) -> str:
        """For the manifest."""
        found = [] if self.tokens is None else [f"tokens that match {self.tokens.text!r}"]
        found += [f"positions {list(self.positions)}"] if self.positions else []
        found += [] if self.over == "none" else [self.over]
        fitted = f"principal components of the first {self.fit_samples} samples"
        named = "random features" if self.directions == "random" else fitted
        found += [f"{self.features} {named}"] if self.features else []
        return ", ".join(found)

    def dims(self, site: Site) -> tuple[str, ...]:
        """The dimensions of what is stored."""
        rest = [dim for dim in site.dims if dim not in ("sample", "tile", "position")]
        if "position" in site.dims and self.positions:
            return ("sample", "position", *rest)
        keeps_tokens = "position" in site.dims and self.over == "none"
        return ("token" if keeps_tokens else "sample", *rest)

    def tokens_needed(self) -> int:
        """How many tokens of a sample there must be for its rows; 0 where any number will do."""
        if self.positions:
            return max(one + 1 if one >= 0 else -one for one in self.positions)
        return 0 if self.over == "none" or self.tokens is None else 1

    def lack(self, sample: str, length: int, others: int) -> str:
        """The sentence about samples that have fewer tokens than are needed.

        Args:
            sample: the first of them, which has ``length`` tokens that count.
            others: how many more there are.
        """
        more = f" ({others:,} more {'has' if others == 1 else 'have'} too few)" if others else ""
        if self.tokens is None:
            given = ",".join(map(str, self.positions))
            return f"--positions {given}: {sample} has {_number(length)}{more}; leave it out, or keep other positions"
        has = "no such token" if length == 0 else f"{_number(length)} that match, of {self.tokens_needed()} needed"
        return (
            f"--match {self.tokens.text!r}: {sample} has {has}{more}, and rows for each sample are asked for; leave it "
            "out, or leave out --reduce and --positions"
        )

    def rows(
        self,
        site: Site,
        value: torch.Tensor,
        is_kept: torch.Tensor,
        seed: int,
        components: PrincipalComponents | None = None,
    ) -> torch.Tensor:
        """The rows of a batch.

        Args:
            value: the whole value, as the site has it, of the samples to keep.
            is_kept: ``(B, T)`` bool, from ``kept_tokens``. Where a sample gets one row, it has one such position.
            seed: of random features.
            components: of this site, for ``directions = "principal"``.

        Raises:
            ConfigError: a position lies beyond a sample; or values are numbers of experts, or scores that a mask hides,
                and are to be averaged or projected.
        """
        if not value.is_floating_point():
            return self._of_numbers(site, value, is_kept)
        value = self.kept(site, value, is_kept)
        if self.over == "mean" or self.features:
            _refuse_hidden(site, value)
        if components is not None:
            value = components.project(value)
        elif self.features:
            value = value.float() @ _directions(value.shape[-1], self.features, seed).to(value.device)
        return value

    def cast(self, rows: torch.Tensor) -> tuple[torch.Tensor, str]:
        """The rows in the dtype that is written, and a sentence if finite values have become infinite: fp16 has none
        beyond 65,504. Numbers that name experts stay as they are."""
        if self.dtype is None or not rows.is_floating_point():
            return rows, ""
        narrow = rows.to(self.dtype)
        lost = int((narrow.isinf() & rows.isfinite()).sum()) if self.dtype == torch.float16 else 0
        return narrow, f"values beyond {_FP16_MAX:,.0f}, the largest of float16 ({lost:,} in a batch)" if lost else ""

    def _of_numbers(self, site: Site, value: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
        """Rows of a site whose values are numbers of something, with all their digits."""
        if self.over == "mean" or self.features:
            what = "mean" if self.over == "mean" else "projection"
            raise ConfigError(
                f"a {what} of numbers that name experts says nothing; leave out the site with the dimensions "
                f"{', '.join(site.dims)}, such as routing_expert"
            )
        return self.kept(site, value, is_kept)

    def kept(self, site: Site, value: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
        """The rows of a batch with all their features, as the model computes them."""
        if "position" in site.dims:
            return self._positions(value.movedim(site.dims.index("position"), 1), is_kept)
        return value

    def kept_tokens(self, batch: Mapping[str, torch.Tensor], is_token: torch.Tensor) -> torch.Tensor:
        """The positions of a batch that rows come from, ``(B, T)`` bool: its tokens, or the chosen ones of them.

        Raises:
            ConfigError: some are to be chosen, and the batch has none.
        """
        if self.tokens is None:
            return is_token
        if "tokens" not in batch:
            raise ConfigError(f"--match {self.tokens.text!r}: the model reads {', '.join(batch)}, and no tokens")
        return is_token & self.tokens.matches(batch["tokens"])

    def _positions(self, value: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
        if self.over == "none" and not self.positions:
            return _tokens(value, is_kept)
        is_kept = is_kept.to(value.device)
        lengths, samples = is_kept.sum(1), torch.arange(len(value), device=value.device)
        in_order = is_kept.int().argsort(dim=1, descending=True, stable=True)  # the ones that are kept come first
        if self.positions:
            wanted = torch.tensor(self.positions, device=value.device)
            index = torch.where(wanted < 0, lengths[:, None] + wanted, wanted)
            if bool(((index < 0) | (index >= lengths[:, None])).any()):
                raise ConfigError(
                    f"--positions {','.join(map(str, self.positions))}: a sample has {int(lengths.min())} tokens"
                )
            return value[samples[:, None], in_order.gather(1, index)]
        if self.over == "last":
            return value[samples, in_order[samples, lengths - 1]]
        weights = is_kept.view(*is_kept.shape, *[1] * (value.ndim - 2))
        mean = value.float().where(weights, 0.0).sum(1) / lengths.view(-1, *[1] * (value.ndim - 2))
        return mean.to(value.dtype)


def _refuse_hidden(site: Site, value: torch.Tensor) -> None:
    if "key" in site.dims and bool(value.isneginf().any()):
        raise ConfigError(
            "a mean or a projection of scores that a mask hides, which are -inf, says nothing; take attn_pattern or "
            "attn_scores_scaled in place of attn_scores"
        )


def _number(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens:,} tokens"


def _tokens(value: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
    """A copy of the positions of ``value``, ``(B, T, …)``, that are kept: ``(n, …)``. The device is not waited for, if
    ``is_kept`` is on the host."""
    flat = value.flatten(0, 1)
    if bool(is_kept.all()):
        return flat.clone() if flat.data_ptr() == value.data_ptr() else flat
    return flat[is_kept.flatten().nonzero().squeeze(1).to(value.device, non_blocking=True)]


def token_mask(batch: Mapping[str, torch.Tensor], n_samples: int, n_positions: int) -> torch.Tensor:
    """The positions of each sample that are tokens, ``(B, T)`` bool, and not padding at its end."""
    if "positions" in batch:
        return batch["positions"] >= 0
    return torch.ones(n_samples, n_positions, dtype=torch.bool)


def _directions(width: int, features: int, seed: int) -> torch.Tensor:
    """``(width, features)`` fp32, normal with variance 1 / features; equal on all ranks, for all sites of a width."""
    generator = torch.Generator().manual_seed(seed)
    directions: torch.Tensor = torch.randn(width, features, generator=generator)
    return directions / math.sqrt(features)
