"""The unified model in vLLM. Importing this package imports no vLLM; `transfer` and `settings` need none at all."""
