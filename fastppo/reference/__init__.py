"""The definition of each op in plain PyTorch: same signature, any float dtype, no kernel."""
