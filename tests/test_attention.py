import pytest
import torch
from lazy_h3.h3.attention import attention


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for x in (k, v))
    return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v


@pytest.mark.parametrize("groups", [6, 2], ids=["own keys", "grouped keys"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["no batch", "batch"])
def test_attention_equals_the_formula(batch: tuple[int, ...], groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(*batch, 6, 63, 20, generator=generator)
    k, v = torch.randn(2, *batch, groups, 63, 20, generator=generator)
    torch.testing.assert_close(attention(q, k, v), naive(q, k, v, 20**-0.5))
    torch.testing.assert_close(attention(q, k, v, scale=0.3), naive(q, k, v, 0.3))


def test_strided_views_of_one_buffer_are_taken_as_they_are() -> None:
    q, k, v = torch.randn(63, 3, 6, 20, generator=torch.Generator().manual_seed(1)).unbind(1)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    torch.testing.assert_close(attention(q, k, v), attention(q.contiguous(), k.contiguous(), v.contiguous()))
