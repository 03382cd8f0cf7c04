"""The CUDA kernels below ring attention against products written out."""

import pytest

torch = pytest.importorskip("torch")

from executor.parallel.attention_kernels import (  # noqa: E402
    block_backward,
    block_forward,
    plain_backward,
    uses_flash_cuda,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_block_of_attention(dtype: "torch.dtype", causal: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v, grad = (
        torch.randn(2, 8, 128, 64, generator=generator, device="cuda", dtype=dtype)
        for _ in range(4)
    )
    assert uses_flash_cuda(q, v) == (dtype == torch.bfloat16)
    out, lse = block_forward(q, k, v, causal=causal)
    wide = [x.float() for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(out, wanted, atol=tolerance, rtol=tolerance)
    found = block_backward(grad, q, k, v, out.to(dtype), lse, causal=causal)
    for value, exact in zip(found, plain_backward(grad, *wide, wanted, lse, causal), strict=True):
        torch.testing.assert_close(value.float(), exact, atol=4 * tolerance, rtol=4 * tolerance)
