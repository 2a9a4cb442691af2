"""The compiled loop of the chunkwise-parallel recurrent gated delta rule: one routine for packed rows, prefill, decode.

Notable: a row is always one step of the recurrence from the state in the page, so a decode step and a prefill run the
same code; the chain is taken over a chunk when its last row is there, from the rows that the page has kept. Packed
sequences share one page in scratch memory. What must stay equal: the order stated in `reference.py`.

Shapes: K key heads, V value heads, D their widths, C channels, W taps, L rows of a chunk, n rows of a segment.
"""

import numpy as np

from skyrl_isoexec.kernels.numeric.cpu import compiled, exp, f32, i32, inlined, write
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
    widths, widest = heads.key_width + heads.value_width, max(heads.key_width, heads.value_width)
    open_chunk = heads.key_width * heads.value_width + chunk * (1 + chunk + widths + heads.value_width)
    return rows_size(heads, conv_width, chunk) + open_chunk + 4 * chunk + 3 * widest


@inlined
def _recur(q, k, v, g, beta, state, key_width, width, scale, bf16, scratch, row, out):
    """One row of one value head: state [D, D] in place, the output to element `row` of out. Scratch: D numbers."""
    s, new, shrunk = f32(state), f32(scratch), exp(g)
    for i in range(key_width * width):
        s[i] = s[i] * shrunk
    combine(k, key_width, state, width, width, scratch)
    for d in range(width):
        new[d] = beta * (f32(v)[d] - new[d])
    for c in range(key_width):
        weight = f32(k)[c]
        for d in range(width):
            f32(state)[c * width + d] = f32(state)[c * width + d] + weight * f32(scratch)[d]
    combine(q, key_width, state, width, width, scratch)
    for d in range(width):
        write(out, bf16, row + d, new[d] * scale)


@inlined
def _advance_chain(keys, g, beta, values, chain, length, key_width, width, bf16, scratch):
    """One value head's chain [D, D] after the whole chunk that the page has kept."""
    start = scratch
    decay = start + 4 * key_width * width
    grown = decay + 4 * length
    decayed = grown + 4 * length * width
    inverse = decayed + 4 * length * key_width
    fresh = inverse + 4 * length * length
    k = fresh + 4 * length * width
    work = k + 4 * key_width
    snapshot(chain, key_width * width, bf16, start)
    for t in range(length):
        for d in range(key_width):
            f32(k)[d] = f32(keys)[d * length + t]
        extend(
            t, f32(g)[t], f32(beta)[t], k, values + 4 * t * width, keys, decay, grown, decayed, inverse, fresh, start,
            length, key_width, width, bf16, work,
        )  # fmt: skip
    close(keys, decay, fresh, chain, length, key_width, width, bf16, work)


@compiled
def advance(
    x, a, b, conv, a_log, dt_bias, out, table, query_start, seq_lens, scratch,
    conv_rows, chain, keys, kept, values, recurrent,
    conv_step, chain_step, keys_step, kept_step, values_step, recurrent_step,
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
    mixed, _, _, g, beta, work = made
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
                g_at = kept + 4 * (page * kept_step + head * length)
                beta_at = g_at + 4 * value_heads * length
                values_at = values + 4 * (page * values_step + head * length * width)
                state_at = recurrent + 4 * (page * recurrent_step + head * key_width * width)
                chain_at = chains + 4 * head * key_width * width
                if t0 == 0:
                    snapshot(chain_at, key_width * width, bf16, state_at)
                for i in range(count):
                    q, k, v = mixed_row(mixed, i, key_head, head, sizes)
                    f32(g_at)[t0 + i] = f32(g)[i * value_heads + head]
                    f32(beta_at)[t0 + i] = f32(beta)[i * value_heads + head]
                    for d in range(width):
                        f32(values_at)[(t0 + i) * width + d] = f32(v)[d]
                    row = ((first + i) * value_heads + head) * width
                    _recur(
                        q, k, v, f32(g_at)[t0 + i], f32(beta_at)[t0 + i], state_at, key_width, width, scale, bf16,
                        work, row, out,
                    )  # fmt: skip
                if t0 + count == length:
                    _advance_chain(keys_at, g_at, beta_at, values_at, chain_at, length, key_width, width, bf16, work)
            position += count
    return 0
