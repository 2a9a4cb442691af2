"""The one model both runtimes run: a plain PyTorch decoder that knows its kernels and its axis, and no host."""
