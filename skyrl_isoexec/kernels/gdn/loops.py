"""The compiled loop of the row-causal gated delta rule: one routine for packed rows, prefill and decode, fp32 and bf16.

Notable: a row is always computed alone, from what its chunk holds in the page, so a decode step and a prefill run the
same code. Packed sequences share one page in scratch memory. A segment is the tokens of a request that lie in one
chunk; its rows are made for all heads, then each head goes through them. What must stay equal: the order stated in
`reference.py`.

Shapes: K key heads, V value heads, D their widths, C channels, W taps, L rows of a chunk, n rows of a segment.
"""

import numpy as np

from skyrl_isoexec.kernels.numeric.cpu import compiled, exp, f32, i32, inlined, rounded, write
from skyrl_isoexec.kernels.numeric.gdn_heads import GdnHeads
from skyrl_isoexec.kernels.numeric.gdn_loops import (
    begin,
    carry,
    check,
    close,
    extend,
    mixed_row,
    prepare,
    rows_size,
    snapshot,
)
from skyrl_isoexec.kernels.numeric.gdn_tile import combine


def scratch_size(heads: GdnHeads, conv_width: int, chunk: int) -> int:
    """fp32 numbers of scratch that `advance` needs."""
    widest = max(heads.key_width, heads.value_width)
    return rows_size(heads, conv_width, chunk) + heads.key_width * heads.value_width + 4 * chunk + 4 * widest


@inlined
def _output(t, q, keys, decay, fresh, start, length, key_width, width, scale, bf16, scratch, row, out):
    """Row t of one value head, whose exp(G_t - G_s) are in scratch[:L], to element `row` of out."""
    scores, sums = scratch + 4 * length, scratch + 8 * length
    more = sums + 4 * width
    combine(q, key_width, keys, length, t + 1, scores)
    for s in range(t + 1):
        f32(scores)[s] = rounded((f32(scratch)[s] * f32(scores)[s]) * scale, bf16)
    combine(scores, t + 1, fresh, width, width, sums)
    combine(q, key_width, start, width, width, more)
    grown = exp(f32(decay)[t]) * scale
    for d in range(width):
        write(out, bf16, row + d, grown * f32(more)[d] + f32(sums)[d])


@compiled
def advance(
    x, a, b, conv, a_log, dt_bias, out, table, query_start, seq_lens, scratch,
    conv_rows, chain, keys, decay, values, decayed, inverse, fresh,
    conv_step, chain_step, keys_step, decay_step, values_step, decayed_step, inverse_step, fresh_step,
    num_tokens, num_requests, num_pages, pages_each, table_stride, page_size, length,
    key_heads, value_heads, key_width, width, taps, scale, bf16,
):  # fmt: skip
    """Rows query_start[r] .. query_start[r + 1], the last of request r, through the pages of table[r]; writes out.

    Addresses of the operands, then of each state and the numbers between its pages; table, query_start and seq_lens
    hold int32. Returns 0, or a code of `gdn_checks` before anything is written.
    """
    starts, lengths = i32(query_start), i32(seq_lens)
    bad = check(i32(table), table_stride, pages_each, num_pages, page_size, starts, lengths, num_requests, num_tokens)
    if bad:
        return bad
    scale, group = np.float32(scale), value_heads // key_heads
    sizes = (length, key_heads, value_heads, key_width, width, taps)
    made = begin(conv, bf16, sizes, scratch)
    mixed, _, _, g, beta, start = made
    work = start + 4 * key_width * width
    for r in range(num_requests):
        shift = np.int64(lengths[r]) - np.int64(starts[r + 1])  # from a token's row to its position
        position = np.int64(starts[r]) + shift
        while position < lengths[r] and starts[r] < starts[r + 1]:
            pages, first, t0 = table + 4 * r * table_stride, position - shift, position % length
            count = min(length - t0, lengths[r] - position)
            page = np.int64(i32(pages)[position // page_size])
            prepare(
                x, a, b, a_log, dt_bias, bf16, conv_rows, conv_step, keys, keys_step, pages, page_size, position,
                first, count, sizes, made,
            )  # fmt: skip
            chains = carry(chain, chain_step, value_heads * key_width * width, pages, position, page_size)
            for head in range(value_heads):
                key_head = head // group
                keys_at = keys + 4 * (page * keys_step + key_head * key_width * length)
                decay_at = decay + 4 * (page * decay_step + head * length)
                values_at = values + 4 * (page * values_step + head * length * width)
                decayed_at = decayed + 4 * (page * decayed_step + head * length * key_width)
                inverse_at = inverse + 4 * (page * inverse_step + head * length * length)
                fresh_at = fresh + 4 * (page * fresh_step + head * length * width)
                chain_at = chains + 4 * head * key_width * width
                snapshot(chain_at, key_width * width, bf16, start)
                for i in range(count):
                    t = t0 + i
                    q, k, v = mixed_row(mixed, i, key_head, head, sizes)
                    extend(
                        t, f32(g)[i * value_heads + head], f32(beta)[i * value_heads + head], k, v, keys_at, decay_at,
                        values_at, decayed_at, inverse_at, fresh_at, start, length, key_width, width, bf16, work,
                    )  # fmt: skip
                    row = ((first + i) * value_heads + head) * width
                    _output(
                        t, q, keys_at, decay_at, fresh_at, start, length, key_width, width, scale, bf16, work, row, out
                    )
                if t0 + count == length:
                    close(keys_at, decay_at, fresh_at, chain_at, length, key_width, width, bf16, work)
            position += count
    return 0
