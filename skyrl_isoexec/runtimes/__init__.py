"""One adapter per host. The two never import each other."""
