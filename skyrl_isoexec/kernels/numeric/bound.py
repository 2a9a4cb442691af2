"""How far a product of the tensor core may lie from the exact one: a bound for every element, from its partial sums.

Notable: the tensor core takes STEP products at a time, aligns them with the accumulator and cuts off what lies below
the last place of the largest of them. A step so loses less than one unit for the accumulator, and one for all products
of the step together, each unit 2**-23 of what it is taken of. The errors of all steps have the sign of the sum, so they
grow with the number of steps, not with its root: a bound has to follow K.
"""

import torch
from torch import Tensor

STEP = 16
"""Products of bf16 that one instruction adds to an accumulator."""
UNIT = 2.0**-23


def product_bound(x_MK: Tensor, w_NK: Tensor, num_leaves: int = 1) -> tuple[Tensor, Tensor]:
    """(exact product, bound) in float64 for finite operands; leaves of K are rounded sums, added by a balanced tree."""
    exact, bound = [], []
    for x, w in zip(x_MK.double().chunk(num_leaves, 1), w_NK.double().chunk(num_leaves, 1), strict=True):
        partial = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float64, device=x.device)
        passed = x.abs() @ w.abs().T
        for k in range(0, x.shape[1], STEP):
            partial = partial + x[:, k : k + STEP] @ w[:, k : k + STEP].T
            passed = passed + partial.abs()
        exact.append(partial)
        bound.append(passed * (2 * UNIT))
    while len(exact) > 1:
        exact = [a + b for a, b in zip(exact[0::2], exact[1::2], strict=True)]
        pairs = zip(bound[0::2], bound[1::2], exact, strict=True)
        bound = [a + b + UNIT * (c.abs() + a + b) for a, b, c in pairs]
    return exact[0], bound[0]
