"""Attention by explicit matrix products, in place of fused kernels.

Fused attention kernels cannot be differentiated twice, draw dropout masks of their own, and `torch.func.vmap` has no
rule for some of them. Inside `ExplicitAttention` the same attention is computed by products and a softmax. While it is
on, torch's transformer layers do not take their fused path either: they call their linear layers, so that hooks see
them. That path also returns zeros at padded positions of `nn.TransformerEncoder`; the layers themselves do not. The
mode is that of the calling thread alone, unlike torch's own switches, which are those of the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class ExplicitAttention(TorchFunctionMode):
    """Compute attention by explicit matrix products in this thread; a context manager."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, or the explicit form of an attention function."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            # asked for its weights, torch's own function computes them explicitly
            return func(*args, **{**kwargs, "need_weights": True})[0], None
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    explicit = torch.ops.aten._scaled_dot_product_attention_math
    attended: Tensor = explicit(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return attended
