"""Row-parallel linear: fp32 leaves of K, added by a balanced tree."""
