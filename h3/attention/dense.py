"""Dense attention: the one door to torch's scaled dot product."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, is_causal: bool = False) -> Tensor:
    """softmax(q k^T * scale) v over the row axis.

    q is [..., H, S, D]; k and v are [..., G, S, D] with H a multiple of G (grouped queries); returns [..., H, S, D].
    ``scale`` defaults to D ** -0.5. Strided views are fine, as long as D is contiguous.
    """
    if q.dim() == 3:  # torch's kernels want a batch axis: without it the CPU materialises the S x S scores
        return attention(q[None], k[None], v[None], scale=scale, is_causal=is_causal)[0]
    return scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal, enable_gqa=q.shape[-3] != k.shape[-3])
