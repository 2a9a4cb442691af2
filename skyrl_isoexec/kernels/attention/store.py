"""The compiled loop that puts rows of keys and values into the pages of a cache.

Shapes: T tokens, K key-value heads, D head dimension; the layout of a page is `spec.kv_cache_shape`'s.
"""

from skyrl_isoexec.kernels.numeric.cpu import compiled, f32, i64, inlined, u16


@inlined
def _store(pages, page, offset, head, t, num_kv_heads, head_dim, page_size, k, v):
    """One head of one row into both planes of its page; typed pointers `pages`, k, v."""
    source = (t * num_kv_heads + head) * head_dim
    plane = num_kv_heads * head_dim * page_size
    base = 2 * page * plane + head * head_dim * page_size
    for d in range(head_dim):
        pages[base + d * page_size + offset] = k[source + d]
        pages[base + plane + offset * head_dim + d] = v[source + d]


@compiled
def store(k, v, cache, slots, num_rows, num_pages, num_kv_heads, head_dim, page_size, is_bf16):
    """Put rows k, v [T, K, D] at int64 slots of the cache, addresses first; returns a slot that is too large, or -1."""
    targets = i64(slots)
    for t in range(num_rows):
        if targets[t] >= num_pages * page_size:
            return targets[t]
    for t in range(num_rows):
        if targets[t] < 0:
            continue
        page, offset = targets[t] // page_size, targets[t] % page_size
        for head in range(num_kv_heads):
            if is_bf16:
                _store(u16(cache), page, offset, head, t, num_kv_heads, head_dim, page_size, u16(k), u16(v))
            else:
                _store(f32(cache), page, offset, head, t, num_kv_heads, head_dim, page_size, f32(k), f32(v))
    return -1
