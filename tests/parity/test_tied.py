"""One weight on two stages: both copies get both gradients, and clipping counts them once."""

from __future__ import annotations

import numpy as np
import pytest

from executor.parallelize import check
from planner.errors import LayoutError
from tests.parity.compare import reference
from tests.parity.models import dense_model
from tests.parity.ranks import run_ranks
from tests.parity.training import plan_of, train

TIED = dense_model(vocab_size=96, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("gpus", "layout"),
    [
        (2, "pp=2"),
        (2, "pp=2 vpp=2 schedule=interleaved"),
        (4, "pp=2 dp=2 zero=2"),
        (4, "pp=2 tp=2"),
    ],
)
def test_tied_embeddings_over_stages(gpus: int, layout: str) -> None:
    plan = plan_of(TIED, layout, gpus)
    expected = reference(plan)
    results = run_ranks(train, gpus, plan)
    copies = 0
    for result in results:
        assert result.missing == []
        np.testing.assert_allclose(result.losses, expected.losses, atol=1e-5, rtol=0)
        np.testing.assert_allclose(result.norms, expected.norms, atol=1e-5, rtol=1e-5)
        for found, wanted in ((result.grads, expected.grads), (result.params, expected.params)):
            for name, value in found.items():
                whole = "embedding.weight" if name == "head.weight" else name
                np.testing.assert_allclose(value, wanted[whole], atol=1e-5, rtol=0, err_msg=name)
        copies += len({"embedding.weight", "head.weight"} & result.params.keys())
    assert copies == gpus


def test_a_v_of_stages_is_refused() -> None:
    with pytest.raises(LayoutError, match="dualpipe does not run with tied embeddings"):
        check(plan_of(TIED, "pp=2 vpp=2 schedule=dualpipe", 2))
