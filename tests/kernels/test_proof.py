"""A proof counts what it compares, keeps what differs, and refuses to prove nothing."""

import pytest
import torch

from skyrl_isoexec.kernels.numeric.inputs import count_hazards, hazards, normal
from skyrl_isoexec.kernels.numeric.proof import REPEATS, ROW_COUNTS, Proof, ProofError


@pytest.fixture
def proof() -> Proof:
    return Proof()


def test_bits_are_compared(proof: Proof) -> None:
    """Signed zeros differ, NaN equals NaN whatever its payload, and a last bit shows."""
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    proof.equal("a", torch.tensor([0.0, 1.0, float("nan")]), torch.cat([torch.tensor([0.0, 1.0]), payload]))
    assert not proof.failures
    proof.equal("a", torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0 + 2**-23]), at="here")
    assert proof.failures == ["a, here: 2 of 2 elements differ"]
    check = proof.checks["a"]
    assert (check.comparisons, check.elements, check.differing) == (2, 5, 2)


def test_another_shape_or_dtype_differs(proof: Proof) -> None:
    proof.equal("a", torch.zeros(2), torch.zeros(1, 2))
    proof.equal("a", torch.zeros(2), torch.zeros(2).bfloat16())
    assert proof.checks["a"].differing == 4 and "bfloat16" in proof.failures[1]


def test_nothing_is_refused(proof: Proof) -> None:
    with pytest.raises(ProofError, match="proves nothing"):
        proof.equal("a", torch.zeros(0, 3), torch.zeros(0, 3))
    for count in (0, torch.tensor(0)):
        with pytest.raises(ProofError, match="'ties' did not occur"):
            proof.reached("ties", count)
    with pytest.raises(ProofError, match="no check"):
        Proof().finish()
    with pytest.raises(ValueError, match="zip"):
        proof.equal("a", (torch.zeros(1), torch.zeros(1)), (torch.zeros(1),))


def test_empty_results(proof: Proof) -> None:
    proof.empty("no rows", torch.zeros(0, 3), torch.zeros(0, 3))
    assert not proof.failures and proof.hazards == {"no rows: empty": 1}
    proof.empty("no rows", torch.zeros(0, 3), torch.zeros(3, 0))
    assert len(proof.failures) == 1


def test_digests_follow_bits_and_order() -> None:
    def digest(*tensors: torch.Tensor) -> str:
        proof = Proof()
        for x in tensors:
            proof.equal("a", x, x)
        return proof.checks["a"].to_dict()["digest"]

    a, b = torch.tensor([1.0]), torch.tensor([-0.0])
    assert digest(a, b) == digest(a.clone(), b.clone())
    assert len({digest(a, b), digest(b, a), digest(a, -b), digest(a), digest(a.bfloat16(), b), digest(a[None], b)}) == 6


def test_progress_is_told_when_a_check_is_complete() -> None:
    lines: list[str] = []
    proof, one = Proof(lines.append), torch.ones(2)
    proof.equal("a", one, one)
    proof.equal("a", one, one)
    assert lines == []
    proof.equal("b", one, -one)
    assert lines == ["a: 2 comparisons, 4 elements: equal"]
    proof.finish()
    assert lines[1] == "b: 1 comparisons, 2 elements: 2 DIFFER"


def test_rows_finds_what_depends_on_the_batch(proof: Proof) -> None:
    pool, anchor = normal(1, max(ROW_COUNTS), 8), normal(2, 1, 8)
    proof.rows("own", lambda x: x * 2, (pool,), (anchor,))
    assert not proof.failures and proof.checks["own"].comparisons == len(ROW_COUNTS)
    proof.rows("number", lambda x: x * (1 + len(x) // 1024), (pool,), (anchor,))
    proof.rows("last", lambda x: torch.cat([x[:-1], x[-1:] * (len(x) == 1)]), (pool,), (anchor,))
    assert [f.split(":")[0] for f in proof.failures] == ["number, 1024 rows"] + [
        f"last, {count} rows" for count in ROW_COUNTS[1:]
    ]


def test_autograd_needs_a_graph(proof: Proof) -> None:
    proof.autograd("a", lambda x: x * 2, torch.ones(2))
    with pytest.raises(ProofError, match="graphs recorded"):
        proof.autograd("b", lambda x: x.detach() * 2, torch.ones(2))
    proof.autograd("c", lambda x: x * (2 if torch.is_grad_enabled() else 3), torch.ones(2))
    assert len(proof.failures) == 1


def test_repeats_finds_one_call_that_differs(proof: Proof) -> None:
    calls = iter(range(10 * REPEATS))
    proof.repeats("a", lambda: torch.tensor([1.0 if next(calls) != 77 else 2.0]))
    assert proof.checks["a"].comparisons == REPEATS and len(proof.failures) == 1


def test_inputs_are_the_same_bits_everywhere() -> None:
    """Numbers written down once: no vectorised logarithm of one processor is in them."""
    x = normal(3, 2, 3)
    expected = [[1054062505, 1046234364, 1031417010], [-1086261661, 1074747583, 1064519166]]
    assert x.view(torch.int32).tolist() == expected
    sample = normal(0, 10**5)
    assert abs(sample.mean()) < 0.02 and abs(sample.std() - 1) < 0.02 and 3 < sample.abs().max() < 3.5
    assert torch.equal(normal(1, 4, scale=2.0), normal(1, 4) * 2)


def test_hazards_are_counted() -> None:
    counts = count_hazards(hazards(1, 20, 30, finite=False))
    assert set(counts) == {"+0", "-0", "subnormal", "inf", "NaN"} and min(counts.values()) > 1
    assert count_hazards(torch.ones(3)) == {}
