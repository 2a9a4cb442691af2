"""A difference of two contracts is a sentence a person can act on."""

from dataclasses import replace

from skyrl_isoexec.contract import Tolerance, diff, seal


def test_equal(contract):
    assert diff(contract, contract) == [] == diff(contract, seal(contract))


def test_a_constant(contract):
    i, entry = next((i, e) for i, e in enumerate(contract.composition) if e.region == ("attn.core",))
    changed = replace(entry, constants={"kv_block": 32, "kv_partition": 512})
    composition = (*contract.composition[:i], changed, *contract.composition[i + 1 :])
    assert diff(contract, seal(replace(contract, composition=composition))) == [
        f"composition[{i}].constants.kv_block (of attn.core) is 16 in the first and 32 in the second; "
        "it moves numerical_policy"
    ]


def test_true_is_not_1(contract):
    one = seal(replace(contract, deployment={**contract.deployment, "x": 1}))
    yes = seal(replace(contract, deployment={**contract.deployment, "x": True}))
    assert diff(one, yes) == ["deployment.x is 1 in the first and True in the second; it moves deployment"]


def test_what_one_side_lacks(contract):
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    assert diff(contract, seal(replace(contract, versions=versions))) == [
        "versions.numba is '0.65.0' in the first and absent in the second; it moves numerical_policy",
        "versions.triton is absent in the first and '3.6.0' in the second; it moves numerical_policy",
    ]
    more = (*contract.claims.tolerances, Tolerance(name="a", boundary="b", bound="c"))
    (line,) = diff(contract, seal(replace(contract, claims=replace(contract.claims, tolerances=more))))
    assert line.startswith("claims.tolerances[0] is absent in the first and {'name': 'a', 'boundary': 'b'")


def test_a_new_entry_does_not_shift_the_others(contract):
    """Entries are told apart by what they cover, not by where they stand."""
    first = contract.composition[0]
    halves = (replace(first, cases=first.cases[:2]), replace(first, cases=first.cases[2:]))
    lines = diff(contract, seal(replace(contract, composition=(*contract.composition[1:], *halves))))
    assert len(lines) == 2 and all(
        line.startswith(("composition[0].cases (of", "composition[1] is absent")) for line in lines
    )


def test_stale_digests_are_named_only_where_nothing_explains_them(contract):
    other = replace(contract.identities, semantic="0" * 64)
    (line,) = diff(contract, replace(contract, identities=other))
    assert line.startswith(f"identities.semantic is '{contract.identities.semantic}' in the first and '000")
    assert len(diff(contract, replace(contract, identities=None))) == 3
    assert len(diff(contract, seal(replace(contract, model=replace(contract.model, family="llama"))))) == 1
