"""One folder per operator; an operator never imports another. `bundle.load_kernels` chooses one implementation."""
